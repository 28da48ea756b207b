#!/usr/bin/env bash
# Trains a small language model on real text on two ranks three times, with FP8 weights and fp32 moments, with FP8
# weights and 8-bit moments, and with fp32 master weights, and compares loss and memory. A few minutes on two CPU cores.
# Usage: launchers/quickstart.sh [key=value …]     overrides of configs/quickstart.yaml, e.g. run.steps=50
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/environment.sh plot

runs=runs/quickstart
for recipe in fp32-master fp8 fp8-8bit; do
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" torchrun --standalone --nproc-per-node=2 -m eco_dist train \
        --config configs/quickstart.yaml "recipe=$recipe" "run.directory=$runs/$recipe" "$@"
done
eco-dist compare "$runs/fp32-master" "$runs/fp8" "$runs/fp8-8bit" --plot "$runs/loss.png"
echo "The plot is $runs/loss.png"
