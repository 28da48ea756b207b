#!/usr/bin/env bash
# Trains a small language model on real text on two ranks under FSDP2 three times, with fp32 master weights, with FP8
# weights and fp32 moments and with FP8 weights and 8-bit moments, and under DeepSpeed's ZeRO 2 with FP8 weights, and
# compares loss and memory. A few minutes on two CPU cores.
# Usage: launchers/quickstart.sh [key=value …]     overrides of configs/quickstart.yaml, e.g. run.steps=50
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/environment.sh plot,deepspeed

runs=runs/quickstart
finished=()
train() { # NAME [key=value …]
    local name=$1
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" torchrun --standalone --nproc-per-node=2 -m eco_dist train \
        --config configs/quickstart.yaml "run.directory=$runs/$name" "${@:2}"
    finished+=("$runs/$name")
}
for recipe in fp32-master fp8 fp8-8bit; do
    train "$recipe" "recipe=$recipe" "$@"
done
if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("deepspeed") is None)'; then
    train fp8-zero2 recipe=fp8 engine=deepspeed zero=2 "$@"
else
    echo "DeepSpeed is not installed: its row is left out"
fi
eco-dist compare "${finished[@]}" --plot "$runs/loss.png"
echo "The plot is $runs/loss.png"
