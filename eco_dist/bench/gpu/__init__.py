"""Checking and timing the step on a GPU: `launchers/gpu_check.sh`, or `python -m eco_dist.bench.gpu`."""
