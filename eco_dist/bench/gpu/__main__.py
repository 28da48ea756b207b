"""The command: check that the kernel equals the reference on this GPU, time it beside its peers, print and save."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eco_dist.bench.gpu.contenders import COLUMNS, Contender, Size, contenders
from eco_dist.bench.gpu.timing import Clock, Measurement, cuda_clock, measure
from eco_dist.optim.kernels import Kernel
from eco_dist.optim.kernels.selfcheck import differences
from eco_dist.recipe import RECIPES

NO_GPU, DIFFERS = 2, 1
SIZES = (Size(elements=1 << 26), Size(elements=1 << 26, tensors=512), Size(elements=1 << 28), Size(elements=1 << 30))
TIMED = ("fp8", "fp8-bf16", "fp8-8bit", "paper", "fp8-residual", "int4", "bf16")
CHECKED = {name: recipe for name, recipe in RECIPES.items() if recipe.quantizes} | {
    "fp8, displacement": RECIPES["fp8"].replace(injection="displacement"),
    "fp8-8bit, stochastic moments": RECIPES["fp8-8bit"].replace(moments_rounding="stochastic"),
    "fp8, dynamic8 moments": RECIPES["fp8"].replace(moments="dynamic8"),
    "paper, idle skipped": RECIPES["paper"].replace(idle="skip"),
}
CASES = (((64, COLUMNS), torch.bfloat16), ((64, COLUMNS), torch.float32), ((33, 300), torch.float32))
LAUNCH_SHAPES = ((2, 1), (4, 2), (8, 4), (8, 8), (16, 4), (16, 8))
"""To compare, (blocks, warps): on tensors made for it, which is what an autotuner in the step cannot do."""


def check(kernel: Kernel, device: torch.device) -> dict[str, dict[str, int]]:
    """How many numbers differ from the reference's, for every recipe, shape and gradient; {} is as it must be."""
    found = {}
    for name, recipe in CHECKED.items():
        for shape, dtype in CASES:
            different = differences(kernel, recipe, shape, device=device, grad_dtype=dtype)
            if different:
                found[f"{name}, {shape}, {dtype}"] = different
    return found


def cases(kernel: Kernel, sizes: Sequence[Size]) -> Iterator[tuple[Contender, Size]]:
    """What is timed: `fp8` and `fp8-8bit` under several launch shapes, then everything at every size."""
    from eco_dist.optim.kernels.triton.kernel import TritonKernel
    from eco_dist.optim.kernels.triton.kind import LaunchShape

    for blocks, warps in LAUNCH_SHAPES:
        shape = LaunchShape(blocks=blocks, warps=warps)
        shaped = TritonKernel(lambda _, shape=shape: shape)  # type: ignore[misc]
        for contender in contenders(shaped, ("fp8", "fp8-8bit"))[:4:2]:
            yield dataclasses.replace(contender, name=f"{contender.name}, {blocks} blocks on {warps} warps"), sizes[0]
    for size in sizes:
        for contender in contenders(kernel, TIMED):
            yield contender, size


def time_all(
    kernel: Kernel,
    device: torch.device,
    *,
    sizes: Sequence[Size],
    clock: Clock,
    free_bytes: Callable[[], int],
    deadline: float,
) -> list[Measurement]:
    """Time the cases and print each; after the deadline (on `time.monotonic`) no other is begun."""
    results = []
    for contender, size in cases(kernel, sizes):
        if time.monotonic() > deadline:
            print("out of time: what is missing was not measured")
            break
        results.append(measure(contender, size, device, clock=clock, free_bytes=free_bytes()))
        print(row(results[-1]), flush=True)
    return results


def row(result: Measurement) -> str:
    """A line of the table, in Markdown."""
    start = f"| {result.name} | {result.elements / 2**20:g} Mi in {result.tensors} |"
    if result.milliseconds is None:
        return f"{start} - | - | {result.reason} |"
    return f"{start} {result.milliseconds:.3f} | {result.bandwidth_share:.2f} | |"


def about(device: torch.device) -> dict[str, Any]:
    """What is measured on."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "runtime": torch.version.cuda or torch.version.hip,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if the kernel differs from the reference, 2 without a GPU or without triton."""
    parser = argparse.ArgumentParser(description="Check and time the optimizer step on a GPU.")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="where the numbers go")
    parser.add_argument("--seconds", type=float, default=200, help="no timing is begun later than this")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
    if not torch.cuda.is_available():
        print("expected a GPU that torch can use, got none: run this on a machine with one", file=sys.stderr)
        return NO_GPU
    try:
        from eco_dist.optim.kernels.triton.kernel import TritonKernel
    except ImportError as error:
        print(f"expected the package triton, which comes with torch for GPUs, got: {error}", file=sys.stderr)
        return NO_GPU
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = TritonKernel()
    result = about(device)
    print(", ".join(f"{key} {value}" for key, value in result.items()))
    result["differences"] = check(kernel, device)
    print(f"numbers that differ from the reference's: {result['differences'] or 'none'}")
    print("\n| step | elements in tensors | ms | share of a copy's bandwidth | |\n|---|---|---|---|---|")
    timings = time_all(
        kernel,
        device,
        sizes=SIZES,
        clock=cuda_clock,
        free_bytes=lambda: torch.cuda.mem_get_info(device)[0],
        deadline=deadline,
    )
    result["timings"] = [dataclasses.asdict(timing) for timing in timings]
    options.output.write_text(json.dumps(result, indent=1))
    print(f"\nwritten to {options.output}")
    return DIFFERS if result["differences"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
