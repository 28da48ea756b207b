# Sourced by the multi-node launchers: [--dry-run] CONFIG [key=value ...] -> dry_run, config, overrides, ranks_per_node.

dry_run=0
if [ "${1:-}" = --dry-run ]; then
    dry_run=1
    shift
fi
if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    echo "expected an existing configuration file, got '${1:-nothing}'; usage: $0 [--dry-run] CONFIG [key=value ...]" >&2
    exit 2
fi
config=$1
overrides=("${@:2}")
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
ranks_per_node=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
