"""Random bits from a counter: known answers, the layout over elements, and independence of cuts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eco_dist.numerics import Stream, random_halves
from eco_dist.numerics.philox import philox4x32
from tests.reference import philox as reference

ONES = 0xFFFFFFFF
PI_COUNTER = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)

KNOWN_ANSWERS = [
    # Random123's kat_vectors: rounds, counter, key, result
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(rounds: int, counter: tuple, key: tuple, expected: tuple) -> None:
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), key, rounds)
    assert tuple(int(word) for word in words) == expected
    assert reference.philox(counter, key, rounds) == expected


widths = st.sampled_from([1, 2, 3, 7, 31, 127, 128, 129, 131, 200, 256, 257, 384, 509])
streams = st.builds(
    Stream,
    seed=st.integers(0, 2**64 - 1),
    tensor=st.integers(0, 2**28 - 1),
    step=st.integers(0, 2**32 - 1),
    purpose=st.integers(0, 3),
)


@settings(max_examples=40)
@given(stream=streams, columns=widths, first=st.integers(0, 2**40), data=st.data())
def test_each_element_draws_the_documented_half(stream: Stream, columns: int, first: int, data: st.DataObject) -> None:
    """Any key and row, far beyond 2^32 calls, against Python integers."""
    halves = random_halves(stream, (2, columns), first_row=first)
    row, column = data.draw(st.integers(0, 1)), data.draw(st.integers(0, columns - 1))
    expected = reference.half(
        seed=stream.seed,
        tensor=stream.tensor,
        step=stream.step,
        purpose=stream.purpose,
        row=first + row,
        column=column,
        columns=columns,
    )
    assert int(halves[row, column]) == expected


@settings(max_examples=40)
@given(stream=streams, columns=widths, rows=st.integers(1, 13), data=st.data())
def test_bits_do_not_depend_on_how_rows_are_cut(stream: Stream, columns: int, rows: int, data: st.DataObject) -> None:
    """Any partition of the rows, empty pieces included, draws the bits of the whole."""
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    borders = [0, *cuts, rows]
    pieces = [
        random_halves(stream, (end - start, columns), first_row=start) for start, end in itertools.pairwise(borders)
    ]
    assert torch.equal(torch.cat(pieces), random_halves(stream, (rows, columns)))


@pytest.mark.parametrize("shape", [(3, 5, 130), (2, 2, 2, 7)])
def test_leading_dimensions_count_as_rows(shape: tuple[int, ...]) -> None:
    stream = Stream(seed=1, tensor=2, step=3)
    flat = random_halves(stream, (torch.Size(shape[:-1]).numel(), shape[-1]))
    assert torch.equal(random_halves(stream, shape), flat.reshape(shape))


BASE = Stream(seed=5, tensor=6, step=7, purpose=0)


@pytest.mark.parametrize(
    "other",
    [
        Stream(seed=6, tensor=6, step=7),
        Stream(seed=5 + 2**32, tensor=6, step=7),
        Stream(seed=5, tensor=7, step=7),
        Stream(seed=5, tensor=6, step=8),
        Stream(seed=5, tensor=6, step=7, purpose=1),
        Stream(seed=6, tensor=5, step=7),
    ],
)
def test_seed_tensor_step_and_purpose_each_give_other_bits(other: Stream) -> None:
    """Uncorrelated: of 65,536 halves about one agrees by chance, and the correlation is within 5 sigma of 0."""
    one, two = (random_halves(stream, (512, 128)).double().flatten() for stream in (BASE, other))
    assert int((one == two).sum()) < 12
    correlation = torch.corrcoef(torch.stack((one, two)))[0, 1]
    assert abs(float(correlation)) < 5 / 256


def test_rows_beyond_two_to_the_32_do_not_repeat_the_first_ones() -> None:
    """The call number has 64 bits: with 32 of them row 2^28 would draw row 0's bits again."""
    first = random_halves(BASE, (4, 128))
    for row in (2**28, 2**28 + 1, 2**32):
        assert int((random_halves(BASE, (4, 128), first_row=row) == first).sum()) < 5


def test_halves_are_uniform_and_neighbours_uncorrelated() -> None:
    """65,536 x 8 halves: mean, variance, each bit, and lane-to-lane correlation within 5 sigma."""
    halves = random_halves(Stream(seed=0, tensor=0, step=1), (4096, 128)).double()
    count = halves.numel()
    assert halves.min() >= -32768
    assert halves.max() <= 32767
    sigma = 65536 / 12**0.5
    assert abs(float(halves.mean()) + 0.5) < 5 * sigma / count**0.5
    assert abs(float(halves.var()) / sigma**2 - 1) < 5 * (0.8 / count) ** 0.5
    for bit in range(16):
        ones = int(((halves.long() >> bit) & 1).sum())
        assert abs(ones - count / 2) < 5 * (count / 4) ** 0.5
    for shift in (1, 16, 128):
        pair = torch.stack((halves.flatten()[:-shift], halves.flatten()[shift:]))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / count**0.5


def test_zero_rows_draw_nothing() -> None:
    assert random_halves(BASE, (0, 17)).shape == (0, 17)
