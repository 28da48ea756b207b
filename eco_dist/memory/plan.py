"""Predicted memory: from shapes, an engine and a mesh, before anything exists. Works on a laptop for any cluster.

Static bytes are exact: a formula per tensor and rank, read from the same layout functions that allocate. The timeline
of a step is a model (`peak/`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from eco_dist.memory.activations import Batch, TransformerShape
from eco_dist.memory.baselines import Baseline, resolve
from eco_dist.memory.categories import NOT_A_WEIGHTS, Category
from eco_dist.memory.layouts import Entry, Layout, ZeroOptions, combine, layout_of
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak import Backend, timeline
from eco_dist.memory.report import Holding, MemoryReport, Moment, RankMemory, TensorMemory, tensor_entries
from eco_dist.memory.tensors import ModelShape, module_shape
from eco_dist.memory.versions import versions
from eco_dist.recipe import Recipe
from eco_dist.weights import DEFAULT_SKIP

OPTIMIZERS = ("adamw", "sgd")
WITH_EXPERTS = ("fsdp2", "zero1", "zero2")
"""Engines with expert parallelism; DeepSpeed refuses its own MoE layer at stage 3."""


def plan(
    model: nn.Module,
    recipe: Recipe | Baseline | str,
    *,
    engine: str = "single",
    world_size: int = 1,
    shards: int | None = None,
    optimizer: str = "adamw",
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
    transformer: TransformerShape | None = None,
    batch: Batch | None = None,
    zero: ZeroOptions | None = None,
    backend: Backend = "nccl",
) -> MemoryReport:
    """Memory of a model before it is converted, for every rank.

    Args:
        model: the model as it is before `quantize_weights_`; the meta device will do.
        recipe: a recipe or baseline, or its name; `fp32-master` for ordinary AdamW.
        engine: one of `layouts.ENGINES`.
        world_size: number of ranks.
        shards: ranks that share one copy of the model (HSDP: fewer than `world_size`); default all.
        optimizer: `adamw` or `sgd`.
        skip: see `quantize_weights_`.
        also_skip: see `quantize_weights_`.
        plain: see `quantize_weights_`.
        transformer: shape of its layers; None leaves activations out of the timeline.
        batch: what a rank computes at a time; None leaves the timeline out.
        zero: keys of the DeepSpeed JSON for engines `zero0` to `zero3`; None for their defaults.
        backend: what carries gradients; gloo makes a copy of what it reduces. For the timeline under FSDP.

    Raises:
        ValueError: for an unknown engine, recipe or optimizer, or a world size the engine cannot have.
    """
    shape = module_shape(model, resolve(recipe), skip=skip, also_skip=also_skip, plain=plain, transformer=transformer)
    mesh = mesh_for(engine, world_size, shards=shards)
    return plan_shape(shape, engine=engine, mesh=mesh, optimizer=optimizer, batch=batch, zero=zero, backend=backend)


def mesh_for(engine: str, world_size: int, *, shards: int | None = None, ep: int = 1, tp: int = 1) -> Mesh:
    """The mesh of an engine.

    Raises:
        ValueError: for an unknown engine, a world size or a kind of parallelism it cannot have.
    """
    layout = layout_of(engine)
    if world_size < 1 or (layout.one_rank and world_size != 1):
        raise ValueError(f"expected world_size 1 for engine 'single' and at least 1 for others, got {world_size}")
    if shards not in (None, world_size) and engine != "fsdp2":
        raise ValueError(
            f"expected engine 'fsdp2' for fewer shards than ranks (HSDP), got '{engine}' with {shards} shards"
        )
    if ep > 1 and engine not in WITH_EXPERTS:
        raise ValueError(
            f"expected engine {', '.join(WITH_EXPERTS)} for expert parallelism, got '{engine}' with ep {ep}; "
            "set ep to 1"
        )
    if tp != 1:
        raise ValueError(
            f"expected tp 1, got {tp}: no engine here has tensor parallelism of quantized weights; use more shards"
        )
    return Mesh(world_size=world_size, shards=world_size if shards is None else shards, ep=ep)


def plan_shape(
    model: ModelShape,
    *,
    engine: str,
    mesh: Mesh,
    optimizer: str = "adamw",
    batch: Batch | None = None,
    in_backward: bool = False,
    budget: int | None = None,
    zero: ZeroOptions | None = None,
    backend: Backend = "nccl",
) -> MemoryReport:
    """Memory of a model that is known by its shapes.

    Args:
        model: shapes and storage.
        engine: one of `layouts.ENGINES`.
        mesh: ranks.
        optimizer: `adamw` or `sgd`.
        batch: what a rank computes at a time; None leaves the timeline out.
        in_backward: whether weights are stepped in backward.
        budget: bytes a device has.
        zero: keys of the DeepSpeed JSON; None for their defaults.
        backend: what carries gradients; gloo makes a copy of what it reduces.

    Raises:
        ValueError: for an unknown engine or optimizer, or experts that do not divide by the mesh's `ep`.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"expected optimizer to be one of {', '.join(OPTIMIZERS)}, got '{optimizer}'")
    if in_backward and engine not in ("single", "fsdp2"):
        raise ValueError(f"expected engine single or fsdp2 for stepping in backward, got '{engine}'; leave it out")
    layout, second_moment = layout_of(engine, zero), optimizer == "adamw"
    replicated = [entry for b in model.buffers for entry in tensor_entries(b.name, [(Category.BUFFERS, b.bytes)])]
    replicated += layout.replicated(model.tensors, mesh, second_moment)
    if model.folds_layers:
        replicated = _folded(replicated)
    moments: tuple[Moment, ...] = ()
    if batch is not None:
        moments = timeline(model, layout, mesh, batch, in_backward=in_backward, backend=backend)
    by_position: list[Holding] = []
    for start, stop, entries in combine(layout.pools(model.tensors, mesh, second_moment), mesh.shards):
        by_position += [_holding(entries, replicated, moments, fold=model.folds_layers)] * (stop - start)
    return MemoryReport(
        source="planned",
        engine=engine,
        recipe=model.recipe,
        parameters=model.parameters,
        ranks=tuple(RankMemory(rank=r, holding=by_position[r % mesh.shards]) for r in range(mesh.world_size)),
        model=model.name,
        mesh=str(mesh),
        optimizer=optimizer,
        versions=versions(),
        assumptions=tuple(_assumptions(model, layout, mesh, batch, optimizer, in_backward=in_backward)),
        budget=budget,
    )


def _holding(
    entries: Sequence[Entry], replicated: Sequence[TensorMemory], moments: tuple[Moment, ...], *, fold: bool
) -> Holding:
    quantized = [entry for entry in entries if entry.is_quantized]
    own = [memory for entry in entries for memory in entry.memory]
    return Holding(
        tensors=(*(_folded(own) if fold else own), *replicated),
        quantized_bytes=sum(m.bytes for entry in quantized for m in entry.memory if m.category not in NOT_A_WEIGHTS),
        quantized_parameters=sum(entry.elements for entry in quantized),
        timeline=moments,
    )


def _folded(tensors: Sequence[TensorMemory]) -> list[TensorMemory]:
    """Layers that differ only in their number on one line."""
    folded: dict[tuple[str, Category], tuple[int, int]] = {}
    for tensor in tensors:
        key = (re.sub(r"\.\d+\.", ".*.", tensor.name), tensor.category)
        held, count = folded.get(key, (0, 0))
        folded[key] = (held + tensor.bytes, count + tensor.count)
    return [
        TensorMemory(name=name, category=category, bytes=held, count=count)
        for (name, category), (held, count) in folded.items()
    ]


def _assumptions(
    model: ModelShape, layout: Layout, mesh: Mesh, batch: Batch | None, optimizer: str, *, in_backward: bool
) -> list[str]:
    said = [
        f"static bytes: formula per tensor, optimizer {optimizer}, layout of engine '{layout.name}' verified against "
        "live ranks"
    ]
    said.append("a CUDA context, the allocator's fragmentation and libraries' workspaces are not included")
    if batch is None:
        return [*said, "no batch given: transient bytes are not modelled"]
    dtype = "bf16" if batch.compute_bytes == 2 else "fp32"
    said.append(
        f"transient bytes are a model: {batch.sequences} x {batch.length:,} tokens a rank and micro-batch, {dtype} "
        f"compute, {'every block checkpointed' if batch.checkpoints else 'no activation checkpointing'}"
    )
    if in_backward:
        said.append("weights are stepped in backward: no gradient outlives its block")
    if model.transformer is None:
        said.append("activations are not modelled: the layers of this model are not known")
    elif any(model.transformer.is_routed(layer) for layer in range(model.transformer.layers)):
        said.append("experts are assumed to receive equal numbers of tokens")
    return said
