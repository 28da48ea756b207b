"""Two hundred steps with faults from a seeded schedule end with the bits of a run without any."""

import contextlib
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.checkpoint import CheckpointCorruptError, CheckpointError, load, save
from eco_dist.checkpoint.write import checkpoints
from eco_dist.optim.shard import local
from tests.distributed.models import batch, loss_of
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared

STEPS, SAVE_EVERY = 200, 10
PHASES = ("begin", "mid-shard", "after-data", "after-manifest", "before-rename", "before-latest", "after-latest")
KINDS = ("nan", "full disk", "crash", "damage")
Events = dict[str, int]


class Soak:
    """A run that meets faults, the same on all ranks."""

    def __init__(self, root: Path, seed: int | None) -> None:
        self.root, self.chance = root, None if seed is None else random.Random(seed)
        self.events: Events = dict.fromkeys(KINDS, 0)
        self.model, self.optimizer = prepared("fp8-8bit", seed=0)
        self.step = 0
        save(root, self.model, self.optimizer, step=0, keep=3)

    def strikes(self, kind: str, probability: float) -> bool:
        struck = self.chance is not None and self.chance.random() < probability
        self.events[kind] += struck
        return struck

    def run(self) -> None:
        while self.step < STEPS:
            if self.strikes("crash", 0.03):
                self.start_again()
            self.take_step(spoiled=self.strikes("nan", 0.04))
            if self.step % SAVE_EVERY == 0:
                self.save()
                if self.strikes("damage", 0.2):
                    self.damage()
                    self.start_again()

    def take_step(self, *, spoiled: bool) -> None:
        """A NaN on one rank leaves the step out on all; the batch comes again."""
        loss_of(self.model, batch(self.step)).backward()
        if spoiled and dist.get_rank() == self.step % 2:
            local(self.model.head.weight.grad)[0, 0] = torch.nan
        skipped = self.optimizer.skipped_steps
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.optimizer.skipped_steps == skipped + spoiled
        self.step += not spoiled

    def save(self) -> None:
        if self.strikes("full disk", 0.3):
            phase, rank = self.chance.choice(PHASES), self.chance.randrange(2)
            os.environ.update(ECO_DIST_FAULT=f"save:{phase}:raise:{rank}", RANK=str(dist.get_rank()))
        with contextlib.suppress(CheckpointError):
            save(self.root, self.model, self.optimizer, step=self.step, keep=3)
        os.environ.pop("ECO_DIST_FAULT", None)

    def damage(self) -> None:
        """Flip a bit of the newest checkpoint."""
        place = self.chance.random()
        if dist.get_rank() == 0:
            files = sorted(checkpoints(self.root)[-1].iterdir())
            path = files[self.step // SAVE_EVERY % len(files)]
            content = bytearray(path.read_bytes())
            content[int(place * len(content))] ^= 16
            path.write_bytes(content)
        dist.barrier()

    def start_again(self) -> None:
        """As new processes would: other weights, another seed, the newest checkpoint that is whole."""
        self.model, self.optimizer = prepared("fp8-8bit", seed=9)
        for folder in reversed(checkpoints(self.root)):
            try:
                self.step = load(folder, self.model, self.optimizer).step
                return
            except CheckpointCorruptError:
                continue
        raise AssertionError("no checkpoint was left")


def soak(root: str, seed: int | None) -> tuple[dict[str, Tensor], Events]:
    run = Soak(Path(root), seed)
    run.run()
    return contents(run.model, run.optimizer), run.events


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_with_faults_ends_as_one_without(seed: int, tmp_path: Path) -> None:
    expected, _ = run_ranks(2, soak, str(tmp_path / "calm"), None)[0]
    got, events = run_ranks(2, soak, str(tmp_path / "rough"), seed)[0]
    assert all(events[kind] for kind in KINDS), events
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
