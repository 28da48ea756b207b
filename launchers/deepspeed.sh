#!/usr/bin/env bash
# Trains a configuration on the nodes of a hostfile, with DeepSpeed's launcher.
# Usage: launchers/deepspeed.sh [--dry-run] [--max-restarts N] CONFIG [key=value ...]
#   --max-restarts  start it again if a rank is lost, from the newest checkpoint (run.save_every says when there is one);
#                   with NODE_RANK on every node
#   HOSTFILE        lines "HOST slots=N"; without it this node alone
#   MASTER_ADDR     first node's address; the first host of the file unless set
#   MASTER_PORT=29500
#   NODE_RANK       set it to run on every node by hand, without ssh: this node's number. Unset, DeepSpeed reaches the
#                   others with pdsh, which needs ssh keys between the nodes.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/arguments.sh

port=${MASTER_PORT:-29500}
command=(deepspeed)
[ "$max_restarts" = 0 ] || command=(launchers/restart.sh "$max_restarts" deepspeed)
if [ -n "${HOSTFILE:-}" ]; then
    if [ ! -f "$HOSTFILE" ]; then
        echo "expected HOSTFILE to be a file with lines 'HOST slots=N', got '$HOSTFILE'" >&2
        exit 2
    fi
    nodes=$(grep -cE '^[^#[:space:]]' "$HOSTFILE" || true)
    if [ "$nodes" = 0 ]; then
        echo "expected lines 'HOST slots=N' in $HOSTFILE, got none" >&2
        exit 2
    fi
    first=$(grep -E '^[^#[:space:]]' "$HOSTFILE" | head -n 1 | cut -d ' ' -f 1)
    command+=(--hostfile "$HOSTFILE" --master_addr "${MASTER_ADDR:-$first}" --master_port "$port")
    [ -n "${NODE_RANK:-}" ] && command+=(--no_ssh --node_rank "$NODE_RANK")
else
    command+=(--num_gpus "$ranks_per_node" --master_port "$port")
fi
command+=(--no_local_rank --module eco_dist train --config "$config" "${overrides[@]}")
if [ "$dry_run" = 1 ]; then
    if [ -n "${HOSTFILE:-}" ]; then
        echo "$nodes nodes:"
        grep -E '^[^#[:space:]]' "$HOSTFILE" | sed 's/^/  /'
    else
        echo "this node alone, $ranks_per_node ranks"
    fi
    printf '  %q' "${command[@]}"
    echo
    exit 0
fi
. launchers/environment.sh plot,deepspeed
exec "${command[@]}"
