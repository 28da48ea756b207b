"""A few hundred steps on real text: ECO under ZeRO beside DeepSpeed's own fp32 masters.

Run with `pytest -m slow -s tests/studies/test_deepspeed_loss.py`; prints the losses it compares.
"""

import sysconfig
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from eco_dist.models.llama import Llama
from eco_dist.models.presets import llama_config
from tests.distributed import ranks
from tests.distributed.deepspeed_ranks import config, engine_of, masters_config
from tests.distributed.models import loss_of

pytest.importorskip("deepspeed")

STEPS, LAST, LENGTH, SIZE = 300, 50, 64, 4
TOLERANCE = 0.03
"""Nats. The order in which bf16 gradients are summed (stage 2 or 3) alone moved a run as short as this by 0.011."""


def text() -> Tensor:
    """Source of a few modules of Python's standard library, as bytes below 128."""
    library = Path(sysconfig.get_paths()["stdlib"])
    joined = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    return torch.tensor([byte for byte in joined if byte < 128])


def losses(json: dict[str, Any], seed: int) -> float:
    """Mean loss of the last steps; every rank has batches of its own."""
    engine = engine_of(Llama(llama_config("tiny", vocabulary=128), seed=seed), json)
    tokens, rank = text(), torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    history = []
    for _ in range(STEPS):
        starts = torch.randint(len(tokens) - LENGTH - 1, (SIZE,), generator=generator)
        loss = loss_of(engine, torch.stack([tokens[start : start + LENGTH + 1] for start in starts]))
        engine.backward(loss)
        engine.step()
        history.append(loss.item())
    return mean(history[-LAST:])


def mean_loss(json: dict[str, Any], seed: int) -> float:
    return mean(ranks.run_ranks(2, losses, json, seed))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_is_that_of_fp32_masters(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 holds the bits of stage 2 (`test_deepspeed_layout.py`), so it is not trained again."""
    monkeypatch.setattr(ranks, "CALL_TIMEOUT_SECONDS", 1500)
    extra: dict[str, Any] = {"gradient_clipping": 1.0}
    masters = mean_loss(masters_config(2, "bf16", **extra), seed)
    print(f"\nseed {seed}: fp32 masters, stage 2: {masters:.4f}", flush=True)
    for stage, recipe in ((2, "fp8"), (3, "fp8"), (2, "fp8-8bit")):
        eco = mean_loss(config(stage, "bf16", eco={"recipe": recipe}, **extra), seed)
        print(f"seed {seed}: {recipe}, stage {stage}: {eco:.4f} ({eco - masters:+.4f})", flush=True)
        assert eco - masters < TOLERANCE
