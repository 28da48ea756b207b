"""The study of docs/convergence.md, repeated and held to its claims: minutes long, run with `-m slow`."""

from pathlib import Path

import pytest

from eco_dist.experiments import finetune

WITHIN_MASTER = 0.003
"""Nats that compensation `momentum` may be above the same FP8 weights with fp32 master weights."""

WITHIN_FP32 = 0.005
"""Nats that it may be above fp32 weights: the FP8 forward pass has its own price."""

WITHIN_FP8 = 0.002
"""Nats that cheaper moments may add."""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> finetune.Result:
    return finetune.run(tmp_path_factory.mktemp("finetune"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ordering_on_two_seeds(result: finetune.Result) -> None:
    """Losing the error is worse than injecting it, on every seed, and injecting it is close to master weights."""
    assert all(gap > WITHIN_MASTER for gap in result.gap("fp8-naive", "fp8"))
    assert all(gap < WITHIN_MASTER for gap in result.gap("fp8", "fp8-master"))
    assert all(gap < WITHIN_FP32 for gap in result.gap("fp8", "fp32-master"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ["fp8-bf16", "fp8-8bit"])
def test_cheap_moments_cost_nothing_visible(result: finetune.Result, recipe: str) -> None:
    assert all(abs(gap) < WITHIN_FP8 for gap in result.gap(recipe, "fp8"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_stored_residual_is_as_good_as_master_weights(result: finetune.Result) -> None:
    near = [abs(gap) for gap in result.gap("fp8-residual", "fp8-master")]
    far = [abs(gap) for gap in result.gap("fp8", "fp8-master")]
    assert sum(near) < sum(far) / 3


def test_a_small_study_writes_its_result_and_resumes(tmp_path: Path) -> None:
    settings = finetune.Settings(pretrain_steps=3, finetune_steps=2, eval_sequences=8, seq_len=16, batch=4)
    recipes = ("fp32-master", "fp8-master", "fp8")
    first = finetune.run(tmp_path, seeds=(0,), recipes=recipes, settings=settings)
    written = (tmp_path / "seed-0" / "fp8" / "metrics.jsonl").stat().st_mtime_ns
    again = finetune.run(tmp_path, seeds=(0,), recipes=recipes, settings=settings)
    assert again == first
    assert (tmp_path / "seed-0" / "fp8" / "metrics.jsonl").stat().st_mtime_ns == written
    assert first.table().row_count == 3
    assert (tmp_path / finetune.RESULT_FILE).exists()
