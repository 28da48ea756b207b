"""The model as the planner sees it: named shapes, how each is stored, and which of them travel together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import nn

from eco_dist.memory.activations import TransformerShape
from eco_dist.memory.baselines import Baseline, storage_of
from eco_dist.memory.storage import Storage
from eco_dist.recipe import Recipe
from eco_dist.weights import plan_conversion


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """A parameter.

    Attributes:
        name: its name.
        shape: global shape; of all experts together where they are one tensor.
        storage: how it is stored.
        unit: communication unit it belongs to: a block's name, "" for what is outside of the blocks.
        trainable: whether it has gradient and state.
        is_expert: whether expert parallelism cuts it along dimension 0.
        count: equal tensors this one stands for (experts kept apart).
        group: parameter group of the user's optimizer; ZeRO 1 and 2 lay each out by itself.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    unit: str = ""
    trainable: bool = True
    is_expert: bool = False
    count: int = 1
    group: int = 0

    @property
    def elements(self) -> int:
        """Elements of all it stands for."""
        return self.count * math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBuffer:
    """A buffer, the same on all ranks."""

    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything a plan needs to know of a model.

    Attributes:
        name: what it is called.
        recipe: name of the recipe or baseline its tensors are stored in.
        tensors: parameters in the order of the model.
        buffers: buffers.
        transformer: shape of its layers, for the activations; None if unknown.
        folds_layers: whether reports may put layers that differ only in their number on one line.
    """

    name: str
    recipe: str
    tensors: tuple[ModelTensor, ...]
    buffers: tuple[ModelBuffer, ...] = ()
    transformer: TransformerShape | None = None
    folds_layers: bool = False

    @property
    def parameters(self) -> int:
        """Elements."""
        return sum(tensor.elements for tensor in self.tensors)


def module_shape(
    model: nn.Module,
    recipe: Recipe | Baseline,
    *,
    skip: Sequence[str],
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
    transformer: TransformerShape | None = None,
    name: str = "",
) -> ModelShape:
    """Shape of a module, which may be on the meta device.

    Args:
        model: the model as it is before `quantize_weights_`.
        recipe: how its matrices are stored.
        skip: see `quantize_weights_`.
        also_skip: see `quantize_weights_`.
        plain: see `quantize_weights_`.
        transformer: shape of its layers.
        name: what it is called; default its class.
    """
    chosen = Recipe() if isinstance(recipe, Baseline) else recipe
    report = plan_conversion(model, chosen, skip=skip, also_skip=also_skip, plain=plain)
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    blocks = _block_prefix(model)
    tensors = []
    for conversion in report.conversions:
        if isinstance(recipe, Baseline):
            storage = recipe.others if conversion.recipe is None else recipe.matrices
        else:
            storage = storage_of(conversion.recipe)
        first = conversion.names[0]
        tensors.append(
            ModelTensor(
                name=first,
                shape=conversion.shape or (1,),
                storage=storage,
                unit=_unit(first, blocks),
                trainable=first in trainable,
                is_expert=".experts." in first,
            )
        )
    return ModelShape(
        name=name or type(model).__name__,
        recipe=recipe.name,
        tensors=tuple(tensors),
        buffers=tuple(ModelBuffer(name=key, bytes=b.numel() * b.element_size()) for key, b in model.named_buffers()),
        transformer=transformer,
    )


def _block_prefix(model: nn.Module) -> str | None:
    """Name of the longest `nn.ModuleList`, whose children `shard_model` shards one by one."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return max(lists, key=lambda name: lists[name]) if lists else None


def _unit(name: str, blocks: str | None) -> str:
    if blocks is None or not name.startswith(f"{blocks}."):
        return ""
    number = name[len(blocks) + 1 :].split(".")[0]
    return f"{blocks}.{number}"
