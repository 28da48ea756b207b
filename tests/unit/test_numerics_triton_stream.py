"""Triton draws the same random words as the reference, run in Triton's interpreter: no GPU is needed."""

import json
import os
import subprocess
import sys

import pytest
import torch

from eco_dist.numerics.philox import ROUNDS, philox4x32

pytest.importorskip("triton", reason="triton is Linux-only")

SEED, STREAM, STEP, FIRST, COUNT = 0x0123456789ABCDEF, 0x2ABCDEF1, 70_001, (1 << 33) + 5, 64

KERNEL = f"""
import torch, triton
import triton.language as tl

@triton.jit
def words(OUT, seed, first, stream, step, ROUNDS: tl.constexpr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    index = first + lanes.to(tl.int64)
    zero = lanes * 0
    c0, c1 = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    c2, c3 = (zero + stream).to(tl.uint32), (zero + step).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, n_rounds=ROUNDS)
    tl.store(OUT + lanes, w0.to(tl.int64))
    tl.store(OUT + COUNT + lanes, w1.to(tl.int64))
    tl.store(OUT + 2 * COUNT + lanes, w2.to(tl.int64))
    tl.store(OUT + 3 * COUNT + lanes, w3.to(tl.int64))

out = torch.empty(4 * {COUNT}, dtype=torch.int64)
words[(1,)](out, {SEED}, {FIRST}, {STREAM}, {STEP}, {ROUNDS}, {COUNT})
print(out.tolist())
"""


def test_triton_draws_the_same_words(tmp_path) -> None:
    script = tmp_path / "kernel.py"  # triton.jit reads its function's source from a file
    script.write_text(KERNEL)
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    index = torch.arange(COUNT) + FIRST
    fixed = torch.zeros_like(index)
    counter = (index & 0xFFFFFFFF, index >> 32, fixed + STREAM, fixed + STEP)
    expected = torch.cat(philox4x32(counter, (SEED & 0xFFFFFFFF, SEED >> 32)))
    assert torch.equal(torch.tensor(json.loads(run.stdout)), expected)
