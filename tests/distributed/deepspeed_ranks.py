"""DeepSpeed engines on test ranks: what its launcher and a user's script would set up."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eco_dist import Recipe
from tests.distributed import ranks
from tests.distributed.models import batch, loss_of

ODD = {"width": 37, "hidden": 131}
EVEN = {"width": 128, "hidden": 384}


def run_ranks(world: int, function: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Any]:
    """As `ranks.run_ranks`, on workers that only see DeepSpeed: it patches torch modules and functions for good."""
    return ranks.run_ranks(world, function, *args, pool="deepspeed", fresh=fresh)


_prepared: list[dist.ProcessGroup] = []


def prepare_rank() -> None:
    """Environment and groups of a rank whose process group is up; once for each process group."""
    if _prepared and _prepared[0] is dist.group.WORLD:
        return
    _prepared[:] = [dist.group.WORLD]
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves half a minute of compiling
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slow where the processor has no fp16, but right
    forget_groups()
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)


def forget_groups() -> None:
    """DeepSpeed keeps process groups in module globals, and numbers modules and parameters by process.

    Those groups are gone, and the workers of the tests have not all built as many engines.
    """
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    deepspeed.zero.Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    for name, value in vars(groups).items():
        if name.endswith(("_GROUP", "_GROUP_RANKS")) and name.startswith("_"):
            setattr(groups, name, {} if isinstance(value, dict) else None)


def config(stage: int, dtype: str = "fp32", **extra: Any) -> dict[str, Any]:
    """A DeepSpeed JSON; keyword arguments replace or add top-level keys, `zero` and `eco` add to their sections."""
    zero = {"stage": stage, "reduce_bucket_size": 100_000, **extra.pop("zero", {})}
    if stage == 3:
        zero.setdefault("stage3_param_persistence_threshold", 0)
        # DeepSpeed's own F.linear would stay in place for whatever the worker runs next.
        zero.setdefault("memory_efficient_linear", False)
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "optimizer": {"type": "ECOAdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "seed": 7}},
        "gradient_clipping": 0.0,  # left out, ZeRO clips at 1
        "steps_per_print": 1_000_000,
        "eco": {"recipe": "fp8"},
    }
    if dtype != "fp32":
        result[dtype] = {"enabled": True}
    return {**result, **extra}


def recipe_of(eco: dict[str, Any]) -> Recipe:
    """What the `eco` section of a JSON stands for."""
    return Recipe.from_name(eco["recipe"]).replace(**eco.get("overrides", {}))


def engine_of(model: nn.Module, json: dict[str, Any], **arguments: Any) -> Any:
    """An engine for a model, by way of the import that users write."""
    prepare_rank()
    import deepspeed

    import eco_dist.deepspeed  # noqa: F401

    if "optimizer" not in arguments:
        arguments["model_parameters"] = model.parameters()
    return deepspeed.initialize(model=model, config=json, **arguments)[0]


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Steps on the batches that `tests.distributed.models` gives every rank alike."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Probe(nn.Module):
    """A parameter whose gradient is what forward is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * 0.1)

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


SHAPES = {
    "square": (64, 128),
    "wide": (10, 384),
    "one_row": (1, 128),
    "odd": (131, 37),
    "long_odd": (7, 300),
    "same_odd": (5, 37),
    "experts": (3, 5, 128),
    "embed": (23, 37),
    "norm": (53,),
}


class Probes(nn.Module):
    """Weights of many shapes; the gradient of each is chosen, whatever the engine."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.probes = nn.ModuleDict({name: Probe(shape) for name, shape in shapes.items()})
        self.shapes = dict(shapes)

    def forward(self, step: int) -> Tensor:
        return sum(probe(gradient) for probe, gradient in zip(self.probes.values(), self.gradients(step), strict=True))

    def gradients(self, step: int) -> list[Tensor]:
        """Multiples of 3/1024 below 1: averages of equal ones over 2 and 3 ranks are exact."""
        generator = torch.Generator().manual_seed(step)
        return [torch.randint(-300, 301, shape, generator=generator) * (3 / 1024) for shape in self.shapes.values()]


def train_probes(engine: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        engine.backward(engine(step))
        engine.step()


def contents(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Codes, scales and moments of this rank's units of every weight, and where they begin."""
    zero = engine.optimizer
    result = {}
    for shard in zero.shards.values():
        state = {key: value.clone() for key, value in zero.optimizer.state[shard.weight].items()}
        tensors = {"codes": shard.weight.codes.clone(), "scales": shard.weight.scales.clone(), **state}
        result[shard.plan.name] = {"first": torch.tensor(shard.run.first), **tensors}
    return result


def masters_config(stage: int, dtype: str, **extra: Any) -> dict[str, Any]:
    """The same JSON with DeepSpeed's own fp32 masters and torch's AdamW."""
    json = config(stage, dtype, **extra)
    del json["eco"]
    params = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    json["optimizer"] = {"type": "AdamW", "params": params}
    return json
