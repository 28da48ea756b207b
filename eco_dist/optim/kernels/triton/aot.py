"""Compiling the kernels ahead of time, for GPUs this machine need not have.

`python -m eco_dist.optim.kernels.triton.aot` compiles every named recipe for every target and prints a table of
registers, spilled bytes and shared memory. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from eco_dist.optim.kernels.triton.device import step as device_code
from eco_dist.optim.kernels.triton.kind import Kind, kind_of, launch_shape, plain_kind
from eco_dist.optim.rules import Rule
from eco_dist.recipe import RECIPES, Injection

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
"""A100, H100, B200, MI300, MI350."""

_SIGNATURE = {
    "table": "*i64",
    "words": "*i64",
    "numbers": "*fp32",
    "maps": "*fp32",
    "totals": "*fp64",
    "count": "i32",
    "KIND": "constexpr",
    "BLOCKS": "constexpr",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: of a thread (AMD: vector registers).
        spilled: bytes a thread keeps in local memory for want of registers.
        shared: bytes of shared memory of a program.
    """

    registers: int
    spilled: int
    shared: int


def launches(name: str, *, grad_is_bf16: bool = True) -> Iterator[tuple[str, Kind]]:
    """The kernels a named recipe launches, AdamW: (name of the function in `device.step`, kind)."""
    recipe = RECIPES[name]
    if recipe.format is None:
        yield "step_blocks", plain_kind(Rule.ADAMW, grad_is_bf16=grad_is_bf16)
        return
    displaces = recipe.injection_in_force is Injection.DISPLACEMENT
    kind = kind_of(recipe, Rule.ADAMW, displaces=displaces, grad_is_bf16=grad_is_bf16)
    yield "step_rows" if kind.walks_rows else "step_blocks", kind
    if kind.granularity == "tensor":
        yield "measure_blocks", dataclasses.replace(kind, measures=True)


def compile_for(target: str, function: str, kind: Kind) -> CompiledKernel:
    """Compile one kernel for a target of `TARGETS`."""
    shape = launch_shape(kind)
    source = ASTSource(
        fn=getattr(device_code, function), signature=_SIGNATURE, constexprs={"KIND": kind, "BLOCKS": shape.blocks}
    )
    options = {"num_warps": shape.warps, "enable_fp_fusion": False}
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(kernel: CompiledKernel) -> Resources:
    """Registers, spills and shared memory of a compiled kernel."""
    if "amdgcn" in kernel.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"]))
        registers, spilled = int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
    else:
        registers, spilled = _cuda_resources(kernel.asm["cubin"])
    return Resources(registers=registers, spilled=spilled, shared=kernel.metadata.shared)


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", output)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile and print a table in Markdown."""
    parser = argparse.ArgumentParser(description="Compile the fused step for GPUs this machine need not have.")
    parser.add_argument("--target", action="append", choices=TARGETS, help="all unless given")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="all unless given")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    targets = options.target or list(TARGETS)
    print("| recipe | kernel | " + " | ".join(targets) + " |\n|---|---|" + "---|" * len(targets))
    rows = []
    for name in options.recipe or RECIPES:
        for function, kind in launches(name):
            found = {target: resources(compile_for(target, function, kind)) for target in targets}
            cells = (f"{taken.registers} / {taken.spilled} / {taken.shared}" for taken in found.values())
            print(f"| `{name}` | `{function}` | " + " | ".join(cells) + " |", flush=True)
            numbers = {target: dataclasses.asdict(taken) for target, taken in found.items()}
            rows.append({"recipe": name, "kernel": function, "targets": numbers})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
