#!/usr/bin/env bash
# Checks the Triton step against the reference on this machine's GPU and times it beside its peers, in under 4 minutes.
# Usage: launchers/gpu_check.sh [--output FILE] [--seconds N]
# With a torch of your own that knows the GPU, run instead: python -m eco_dist.bench.gpu
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/environment.sh plot

python -m eco_dist.bench.gpu "$@"
