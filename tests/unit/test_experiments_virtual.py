"""The study of virtual weights: it runs, remembers what is done, and compares what it says."""

import dataclasses
from pathlib import Path

import pytest

from eco_dist.experiments import finetune, virtual


def test_a_small_study_runs_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(
        finetune.Settings(), pretrain_steps=2, finetune_steps=4, batch=4, seq_len=16, eval_sequences=4
    )
    arms = ("fp8-master", "fp8", "fp8, nearest")
    first = virtual.run(tmp_path, seeds=(0,), sizes=[small], arms=arms)
    losses = first.sizes["nano"]
    assert losses["fp8-master"].virtual == []
    for arm in arms[1:]:
        (stored,), (moved,) = losses[arm].stored, losses[arm].virtual
        assert stored != moved
        assert stored == pytest.approx(moved, abs=0.1)
    assert first.table().row_count == len(arms)
    monkeypatch.setattr(finetune, "train", None)  # nothing is trained again
    assert virtual.run(tmp_path, seeds=(0,), sizes=[small], arms=arms) == first
