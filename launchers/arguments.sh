# Sourced by the multi-node launchers: [--dry-run] [--max-restarts N] CONFIG [key=value ...]
# -> dry_run, max_restarts, config, overrides, ranks_per_node.

dry_run=0 max_restarts=0
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) dry_run=1 ;;
    --max-restarts=*) max_restarts=${1#*=} ;;
    --max-restarts)
        max_restarts=${2:-}
        [ $# -gt 1 ] && shift
        ;;
    *) break ;;
    esac
    shift
done
if ! [[ $max_restarts =~ ^[0-9]+$ ]]; then
    echo "expected a number after --max-restarts, got '${max_restarts:-nothing}'" >&2
    exit 2
fi
if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    echo "expected an existing configuration file, got '${1:-nothing}'; usage: $0 [--dry-run] [--max-restarts N] CONFIG [key=value ...]" >&2
    exit 2
fi
config=$1
overrides=("${@:2}")
# A run that is started again goes on from its newest checkpoint.
[ "$max_restarts" = 0 ] || overrides=(run.resume=true "${overrides[@]}")
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
ranks_per_node=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
