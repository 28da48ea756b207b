"""What should happen to experts that get no gradient: `python -m eco_dist.experiments.idle`.

Note: open loop
    Rows of a quantized weight sleep and wake as experts do; the gradients are given. Each recipe is compared with fp32
    master weights that get the same gradients under the same rule for idle groups. What counts is the distance at the
    end, rms, in units of the rms grid step of the stored weight.

Note: closed loop
    A small SMoE learns two kinds of text; half of its experts serve the second kind, which comes in bursts. *asleep* is
    the loss on it at the end of the last sleep, *awake* after the last burst, *always* that of the first kind.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from eco_dist.models import next_token_loss
from eco_dist.models.smoe import SMoE, SMoEConfig
from eco_dist.moe import MoEConfig, MoELayer, Router, Routing
from eco_dist.numerics import grid_step
from eco_dist.numerics.codec import unpack
from eco_dist.numerics.groups import expand_to_elements
from eco_dist.optim import ECOAdamW
from eco_dist.optim.shard import StateKey
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_

ROWS, COLUMNS = 64, 128
MASTER = Recipe(compensation="master", rounding="nearest")  # type: ignore[arg-type]


def recipes() -> Iterator[tuple[str, Recipe]]:
    """Everything that is compared."""
    for rounding, injection, idle in itertools.product(
        ("nearest", "stochastic"), ("paper", "auto", "displacement"), ("step", "skip")
    ):
        yield f"{rounding} {injection} {idle}", Recipe(rounding=rounding, injection=injection, idle=idle)  # type: ignore[arg-type]
    for rounding, idle in itertools.product(("nearest", "stochastic"), ("step", "skip")):
        yield f"{rounding} naive {idle}", Recipe(compensation="none", rounding=rounding, idle=idle)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sleep:
    """Who is awake when.

    Attributes:
        name: for the table.
        awake, asleep: steps of each, in turn; with `chance` instead, awake in that share of steps at random.
    """

    name: str
    awake: int = 0
    asleep: int = 0
    chance: float = 0.0

    def awake_rows(self, step: int, generator: torch.Generator) -> Tensor:
        """Mask `[ROWS, 1]`; rows start at different points of their turn."""
        if self.chance:
            return torch.rand(ROWS, 1, generator=generator) < self.chance
        phase = (step + torch.arange(ROWS) * (self.awake + self.asleep) // ROWS) % (self.awake + self.asleep)
        return (phase < self.awake)[:, None]


SLEEPS = (Sleep(name="2 % of steps", chance=0.02), Sleep(name="20 on, 180 off", awake=20, asleep=180))


def open_loop(recipe: Recipe, sleep: Sleep, *, lr: float, beta2: float, steps: int, seed: int) -> float:
    """Distance from the master weight at the end, see the module's note."""
    weights = [_weight(recipe, seed), _weight(MASTER.replace(idle=recipe.idle), seed)]
    optimizers = [ECOAdamW([weight], lr=lr, betas=(0.9, beta2), weight_decay=0.1, seed=seed) for weight in weights]
    generator = torch.Generator().manual_seed(seed + 1)
    pull = torch.randn(ROWS, COLUMNS, generator=generator) * 0.3
    for step in range(steps):
        noise = torch.randn(ROWS, COLUMNS, generator=generator)
        grad = (noise + pull) * 1e-3 * sleep.awake_rows(step, generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    master = optimizers[1].state[weights[1]][StateKey.MASTER]
    distance = weights[0].decode() - master
    return float(distance.square().mean().sqrt() / _grid(weights[0]).square().mean().sqrt())


def _weight(recipe: Recipe, seed: int) -> QuantizedWeight:
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.02
    return cast(QuantizedWeight, torch.nn.Parameter(QuantizedWeight.from_values(values, recipe, tensor_id=1)))


def _grid(weight: QuantizedWeight) -> Tensor:
    recipe = weight.recipe
    assert recipe.format is not None
    assert recipe.granularity is not None
    steps = grid_step(unpack(weight.codes, recipe.format, COLUMNS), recipe.format)
    return steps * expand_to_elements(weight.scales, COLUMNS, recipe.granularity)


# --- closed loop ------------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, BATCH = 512, 48, 4
PRETRAIN, STEPS, BURST, PAUSE = 300, 400, 20, 80
"""Steps in fp32, steps with the recipe, and steps of a burst and of the pause before it."""


HELD_OUT = 200_000
"""Bytes at the end of the text that are not trained on."""


class TwoKinds(Router):
    """A router that keeps the second half of the experts for the second kind of text."""

    second = False

    def forward(self, x: Tensor) -> Routing:
        """Route among one half of the experts."""
        half = self.config.experts // 2
        kept = slice(half, None) if self.second else slice(half)
        logits = torch.full((x.shape[0], self.config.experts), -torch.inf)
        logits[:, kept] = nn.functional.linear(x, self.layer.weight[kept])
        weights, experts = torch.topk(logits.softmax(-1), self.config.top_k, dim=-1)
        counts = torch.bincount(experts.flatten(), minlength=self.config.experts)
        nothing = torch.zeros(())
        return Routing(weights / weights.sum(-1, keepdim=True), experts, counts, nothing, nothing, nothing, nothing)


def build() -> SMoE:
    """The model: 2 layers, 8 experts, 2 a token."""
    moe = MoEConfig(width=64, hidden=64, experts=8, top_k=2, backend="native")
    model = SMoE(SMoEConfig(vocabulary=VOCABULARY, layers=2, width=64, heads=2, moe=moe))
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router = TwoKinds(moe)
    model.init_weights(0)
    return model


def text() -> Tensor:
    """Bytes of some of Python's own modules."""
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(data: Tensor, generator: torch.Generator, *, second: bool) -> Tensor:
    """Windows of the text; the second kind has tokens, and every second character, of its own."""
    starts = torch.randint(0, len(data) - 2 * LENGTH - 2, (BATCH,), generator=generator)
    stride = 2 if second else 1
    windows = torch.stack([data[s : s + stride * (LENGTH + 1) : stride] for s in starts.tolist()]).long()
    return windows + 256 * second


def loss_of(model: SMoE, tokens: Tensor, *, second: bool) -> Tensor:
    """Loss with the routers told which kind it is."""
    for router in model.modules():
        if isinstance(router, TwoKinds):
            router.second = second
    return next_token_loss(model(tokens[:, :-1])[0], tokens[:, 1:])


def train(model: SMoE, optimizer: ECOAdamW, data: Tensor, steps: int, seed: int) -> Iterator[int]:
    """Steps of the first kind, and one of the second kind beside each during bursts."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        yield step
        second = step % (BURST + PAUSE) >= PAUSE
        loss = loss_of(model, batch(data, generator, second=False), second=False)
        other = batch(data, generator, second=True)
        if second:
            loss = loss + loss_of(model, other, second=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def closed_loop(recipe: Recipe, start: dict[str, Tensor], data: Tensor, *, lr: float, seed: int) -> dict[str, float]:
    """Losses of the module's note after continued training with a recipe."""
    model = build()
    model.load_state_dict(start)
    quantize_weights_(model, recipe, skip_idle_experts=False)
    optimizer = ECOAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, seed=seed)
    held_out = data[-HELD_OUT:]
    result = {}
    for step in train(model, optimizer, data[:-HELD_OUT], STEPS, seed):
        if step == STEPS - BURST:
            result["asleep"] = evaluate(model, held_out, second=True)
    result["awake"] = evaluate(model, held_out, second=True)
    result["always"] = evaluate(model, held_out, second=False)
    return result


@torch.no_grad()
def evaluate(model: SMoE, data: Tensor, *, second: bool) -> float:
    """Mean loss over the same 60 batches every time."""
    generator = torch.Generator().manual_seed(12345)
    losses = [float(loss_of(model, batch(data, generator, second=second), second=second)) for _ in range(60)]
    return sum(losses) / len(losses)


# --- both -------------------------------------------------------------------------------------------------------------


def pretrained(data: Tensor, seed: int) -> dict[str, Tensor]:
    """Weights after `PRETRAIN` steps in fp32 with both kinds in every step."""
    model = build()
    model.init_weights(seed)
    optimizer = ECOAdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(99 + seed)
    for _ in range(PRETRAIN):
        for second in (False, True):
            loss_of(model, batch(data, generator, second=second), second=second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def main(seeds: tuple[int, ...] = (0, 1)) -> None:
    """Print both tables; minutes on a quiet core."""
    print("open loop: distance from master weights in grid steps, a number a seed")
    for sleep, beta2, (name, recipe) in itertools.product(SLEEPS, (0.95, 0.999), recipes()):
        distances = [open_loop(recipe, sleep, lr=1e-4, beta2=beta2, steps=1000, seed=seed) for seed in seeds]
        print(f"{sleep.name}, beta2 {beta2}, {name}:", *(f"{distance:.2f}" for distance in distances))
    print("closed loop: losses in nats")
    data = text()
    masters = (("master step", MASTER), ("master skip", MASTER.replace(idle="skip")))
    for seed in seeds:
        start = pretrained(data[:-HELD_OUT], seed)
        for name, recipe in (*masters, *recipes()):
            losses = closed_loop(recipe, start, data, lr=3e-4, seed=seed)
            print(f"seed {seed}, {name}:", *(f"{key} {loss:.4f}" for key, loss in losses.items()))


if __name__ == "__main__":
    main()
