#!/usr/bin/env bash
# Trains a configuration on one node or many, with torchrun. Run it on every node with the same arguments.
# Usage: launchers/torchrun.sh [--dry-run] [--max-restarts N] CONFIG [key=value ...]
#   --max-restarts     start the ranks again if one is lost, from the newest checkpoint (run.save_every says when there is one)
#   NNODES=1           number of nodes
#   NODE_RANK=0        number of this node
#   MASTER_ADDR        first node's address (needed for more than one node)
#   MASTER_PORT=29500  a free port there
#   NPROC_PER_NODE     ranks a node; its GPUs unless set, 1 without GPUs
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/arguments.sh

nnodes=${NNODES:-1} node_rank=${NODE_RANK:-0} port=${MASTER_PORT:-29500}
if [ "$nnodes" = 1 ]; then
    meeting=(--standalone)
else
    address=${MASTER_ADDR:?expected MASTER_ADDR, the address of the first node, for NNODES=$nnodes}
    meeting=(--nnodes="$nnodes" --node-rank="$node_rank" --master-addr="$address" --master-port="$port")
fi
[ "$max_restarts" = 0 ] || meeting+=(--max-restarts="$max_restarts")
command=(torchrun "${meeting[@]}" --nproc-per-node="$ranks_per_node" -m eco_dist train --config "$config" "${overrides[@]}")
if [ "$dry_run" = 1 ]; then
    echo "this is node $node_rank of $nnodes; ranks $((node_rank * ranks_per_node)) to $(((node_rank + 1) * ranks_per_node - 1)) of $((nnodes * ranks_per_node)) run here:"
    printf '  %q' "${command[@]}"
    echo
    exit 0
fi
. launchers/environment.sh plot
# A store of its own for every restart: ranks that share one with those before them may read dead ranks' addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${command[@]}"
