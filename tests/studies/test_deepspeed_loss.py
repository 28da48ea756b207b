"""What dropping the master weights costs under DeepSpeed, in loss and in bytes: the table of docs/deepspeed.md.

The same trained weights are trained 300 steps further on the same batches: with DeepSpeed's own fp32 masters, with its
own bf16 masters and states, and with codes at every stage. `pytest -m slow -s tests/studies/test_deepspeed_loss.py`.
"""

import json
from pathlib import Path

import pytest

from eco_dist.experiments import finetune
from eco_dist.training import load_config, train
from tests.distributed import ranks
from tests.distributed.deepspeed_ranks import config, masters_config, prepare_rank, run_ranks
from tests.distributed.test_deepspeed_memory import BUCKET, held

pytest.importorskip("deepspeed")

WITHIN = {"fp8": 0.003, "fp8-8bit": 0.0035}
"""Nats that codes may be above fp32 masters."""

STEPS = 300
SEEDS = (0, 1)
BF16_STATES = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
ROWS = {
    "DeepSpeed, fp32 masters, stage 2": ("fp32-master", 2),
    "DeepSpeed, bf16 masters and states, stage 2": ("bf16-states", 2),
    "fp8, stage 1": ("fp8", 1),
    "fp8, stage 2": ("fp8", 2),
    "fp8, stage 3": ("fp8", 3),
    "fp8-8bit, stage 2": ("fp8-8bit", 2),
}
MASTERS = "DeepSpeed, fp32 masters, stage 2"


def val_loss(overrides: list[str]) -> float:
    """Final validation loss of a run of the training program on this rank and its peers."""
    prepare_rank()
    return train(load_config(None, overrides)).val_loss


def run(directory: Path, start: Path, recipe: str, stage: int, seed: int) -> float:
    """A row's loss; the settings are those of `finetune.Settings`, but for the number of steps."""
    settings = finetune.Settings(finetune_steps=STEPS)
    extra = BF16_STATES if recipe == "bf16-states" else {}
    file = directory / f"{recipe}-{stage}.json"
    # F.linear would stay replaced in a worker that other tests use.
    file.write_text(json.dumps({**extra, "zero_optimization": {"memory_efficient_linear": False}}))
    overrides = [
        f"model={settings.preset}",
        f"model.init_from={start}",
        f"recipe={'fp32-master' if extra else recipe}",
        f"data.seq_len={settings.seq_len}",
        f"data.batch={settings.batch}",
        f"optimizer.lr={settings.finetune_lr}",
        "optimizer.beta2=0.95",
        "schedule.final=0.0",
        f"run.directory={directory / f'seed-{seed}-{recipe}-{stage}'}",
        f"run.steps={STEPS}",
        f"run.seed={seed + 1000}",
        "run.log_every=100",
        f"run.eval_every={STEPS}",
        f"run.eval_sequences={settings.eval_sequences}",
        "run.overwrite=true",
        "run.plot=false",
        "engine=deepspeed",
        f"engine.zero={stage}",
        f"engine.json={file}",
    ]
    return run_ranks(2, val_loss, overrides)[0]


def live_bytes(recipe: str, stage: int) -> float:
    """Bytes a quantized parameter and rank after a step, by unique storages."""
    zero = {"reduce_bucket_size": BUCKET}
    if recipe in ("fp32-master", "bf16-states"):
        settings = masters_config(stage, "bf16", zero=zero)
        settings |= BF16_STATES if recipe == "bf16-states" else {}
    else:
        settings = config(stage, "bf16", eco={"recipe": recipe}, zero=zero)
    return max(run_ranks(2, held, [settings]))[0]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_loss_and_bytes_beside_deepspeeds_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CALL_TIMEOUT_SECONDS", 1800)
    losses: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in SEEDS:
        start = finetune.pretrain(tmp_path / f"pretrained-{seed}", finetune.Settings(), seed=seed)
        for name, (recipe, stage) in ROWS.items():
            losses[name].append(run(tmp_path, start, recipe, stage, seed))
            print(f"\nseed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    own = {name: live_bytes(*row) for name, row in ROWS.items()}
    gaps = {name: [a - b for a, b in zip(values, losses[MASTERS], strict=True)] for name, values in losses.items()}
    for name, values in losses.items():
        cells = [f"{own[name]:.2f}", *(f"{value:.4f}" for value in values), *(f"{gap:+.4f}" for gap in gaps[name])]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    assert all(gap < WITHIN[recipe] for name, (recipe, _) in ROWS.items() if recipe in WITHIN for gap in gaps[name])
    assert all(own[name] < own[MASTERS] - 2.5 for name, (recipe, _) in ROWS.items() if recipe.startswith("fp8"))
