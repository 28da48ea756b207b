"""Checkpoints of experts: every expert parallelism to every other."""

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_moe_state import loaded, saved, together


@pytest.mark.parametrize("before", [1, 2, 4])
def test_every_expert_parallelism_loads_every_other(before: int, tmp_path: Path) -> None:
    results = run_ranks(before if before > 1 else 2, saved, "fp8-8bit", before, str(tmp_path))
    expected, losses = together([result[0] for result in results]), results[0][1]
    for after in (1, 2, 4):
        results = run_ranks(4, loaded, "fp8-8bit", after, str(tmp_path))
        got = together([result[0] for result in results])
        for name, tensors in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, got[name], strict=True)), (name, after)
        assert results[0][1] == pytest.approx(losses, rel=1e-3)
