"""However a flat parameter is cut, its chunks together are its stored values, and every unit has one owner."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from eco_dist import Recipe
from eco_dist.engines.flat.shards import PlannedWeight
from eco_dist.engines.fsdp1.chunk import Chunk
from eco_dist.engines.fsdp1.geometry import Geometry, Member

SHAPES = ((5, 7), (3, 128), (2, 256), (11,), (1, 13), (4, 3, 5))


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Members of any order with padding between them, in chunks down to one element."""
    recipe = Recipe.from_name("fp8").replace(granularity=draw(st.sampled_from(["block", "row", "tensor"])))
    members, offset = [], 0
    for number, shape in enumerate(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))):
        offset += draw(st.integers(0, 3))
        planned = PlannedWeight(name=str(number), shape=shape, recipe=recipe, tensor_id=number)
        elements = torch.Size(shape).numel()
        members.append(
            Member(
                name=str(number),
                shape=shape,
                offset=offset,
                elements=elements,
                planned=planned if len(shape) > 1 else None,
                group=0,
            )
        )
        offset += elements
    ranks = draw(st.integers(1, min(offset, 40)))
    return Geometry(members=tuple(members), chunk=-(-offset // ranks), ranks=ranks)


@given(geometries())
def test_chunks_together_are_the_flat_parameter(geometry: Geometry) -> None:
    flat = torch.randn(geometry.chunk * geometry.ranks, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(flat)
    for member in geometry.members:
        values = flat[member.offset : member.offset + member.elements]
        if member.planned is not None:
            units = member.planned.units
            decoded = torch.empty(units.count(member.elements), units.columns)
            units.decode_into(decoded, *units.encode(values))
            values = decoded.view(-1)
        expected[member.offset : member.offset + member.elements] = values
    found = torch.full_like(flat, torch.nan)
    for rank, part in enumerate(found.chunk(geometry.ranks)):
        chunk = Chunk(geometry, rank, torch.device("cpu"), None)
        chunk.assign(flat)
        chunk.fill(part)
    assert torch.equal(found, expected)


@given(geometries())
def test_gradients_of_owned_units_are_those_of_the_flat_parameter(geometry: Geometry) -> None:
    """What lies on this rank, and the tails that the others would send."""
    grads = torch.arange(geometry.chunk * geometry.ranks, dtype=torch.float32).view(geometry.ranks, geometry.chunk)
    found: list[list[torch.Tensor]] = [[] for _ in geometry.members]
    for rank in range(geometry.ranks):
        tails: dict[int, list[torch.Tensor]] = {}
        for cut in geometry.cut_units:
            if cut.owner == rank:
                tails[cut.member] = [grads[tail.rank, : tail.count] for tail in cut.tails]
        chunk = Chunk(geometry, rank, torch.device("cpu"), None)
        for number in range(len(geometry.members)):
            found[number].append(chunk.gradient(number, grads[rank], tails).reshape(-1))
    for member, pieces in zip(geometry.members, found, strict=True):
        assert torch.equal(torch.cat(pieces), grads.view(-1)[member.offset : member.offset + member.elements])
