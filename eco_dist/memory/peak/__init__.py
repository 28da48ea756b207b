"""The transient bytes of a step, engine by engine: models, checked against runs on CPU."""

from __future__ import annotations

from eco_dist.memory.activations import Batch
from eco_dist.memory.layouts.base import Layout
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak.fsdp1 import FSDP1Step
from eco_dist.memory.peak.fsdp2 import Step
from eco_dist.memory.peak.unit import Backend, Unit
from eco_dist.memory.peak.zero import ZeroStep
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelShape, ModelTensor

__all__ = ["Backend", "timeline"]


def timeline(
    model: ModelShape,
    layout: Layout,
    mesh: Mesh,
    batch: Batch | None,
    *,
    in_backward: bool = False,
    backend: Backend = "nccl",
) -> tuple[Moment, ...]:
    """Transient bytes of the fullest rank over one step.

    Args:
        model: shapes.
        layout: of the engine.
        mesh: ranks.
        batch: what a rank computes; None, or a model without known layers, leaves activations out.
        in_backward: whether weights are stepped as soon as their gradient is there (`step_in_backward`).
        backend: what carries gradients.
    """
    if layout.zero is not None:
        return tuple(ZeroStep(model, layout, mesh, batch).moments())
    members: dict[str, tuple[list[ModelTensor], list[ModelTensor]]] = {"": ([], [])}
    for tensor in model.tensors:
        is_nested = tensor.is_expert and mesh.ep > 1
        members.setdefault(tensor.unit, ([], []))[is_nested].append(tensor)
    compute = batch.compute_bytes if batch is not None else 2
    outside, experts = members.pop("")
    root = Unit.of([*outside, *experts], layout, mesh, compute, backend=backend, late=_at_the_entrance(model))
    units = []
    for layer, (block, experts) in enumerate(members.values()):
        units.append(Unit.of(block, layout, mesh, compute, backend=backend, layer=layer))
        if experts:
            units.append(Unit.of(experts, layout, mesh, compute, backend=backend, layer=layer, is_nested=True))
    kind = FSDP1Step if layout.name == "fsdp1" else Step
    step = kind(model, layout, mesh, batch, root, units, in_backward=in_backward, backend=backend)
    return tuple(step.moments())


def _at_the_entrance(model: ModelShape) -> set[str]:
    """Names of the tensors before the first block, whose gradients come last; none if the head is tied to them."""
    inside = [index for index, tensor in enumerate(model.tensors) if tensor.unit]
    if not inside or all(len(tensor.shape) < 2 for tensor in model.tensors[inside[-1] + 1 :]):
        return set()
    return {tensor.name for tensor in model.tensors[: inside[0]]}
