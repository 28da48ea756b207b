"""The sampler: disjoint ranks, one sequence for every world size, resume, each window once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eco_dist.training.sampler import WindowSampler, permute


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_permute_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(count, dtype=np.int64), count, seed=seed, epoch=epoch)
    assert sorted(image.tolist()) == list(range(count))


def test_permute_handles_large_texts_without_a_table() -> None:
    count = 2**40 + 12_345
    image = permute(np.arange(1000, dtype=np.int64), count, seed=1, epoch=2)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < count


def test_permutations_of_epochs_and_seeds_look_independent() -> None:
    count = 4096
    index = np.arange(count, dtype=np.int64)
    first = permute(index, count, seed=0, epoch=0)
    for other in (permute(index, count, seed=0, epoch=1), permute(index, count, seed=1, epoch=0), index):
        # a random permutation agrees with another in one place on average, and ranks correlate by about 1/sqrt(n)
        assert (first == other).sum() < 10
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.08


world = st.sampled_from([1, 2, 3, 4, 6])


@given(ranks=world, local=st.integers(1, 4), batches=st.integers(1, 5), seed=st.integers(0, 99))
def test_global_batches_do_not_depend_on_the_world_size(ranks: int, local: int, batches: int, seed: int) -> None:
    batch = 12 * local
    alone = WindowSampler(windows=100, batch=batch, seed=seed)
    many = [WindowSampler(windows=100, batch=batch, seed=seed, rank=r, world_size=ranks) for r in range(ranks)]
    for _ in range(batches):
        parts = [sampler.next_batch() for sampler in many]
        assert {len(part) for part in parts} == {batch // ranks}
        assert np.concatenate(parts).tolist() == alone.next_batch().tolist()


@given(windows=st.integers(12, 60), ranks=world, seed=st.integers(0, 99))
def test_each_window_is_dealt_once_an_epoch_over_all_ranks(windows: int, ranks: int, seed: int) -> None:
    batch = 12
    samplers = [WindowSampler(windows=windows, batch=batch, seed=seed, rank=r, world_size=ranks) for r in range(ranks)]
    dealt = [w for _ in range(windows) for s in samplers for w in s.next_batch().tolist()]
    assert len(dealt) == batch * windows
    for epoch in range(batch):
        assert sorted(dealt[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(before=st.integers(0, 20), ranks=world, seed=st.integers(0, 99))
def test_a_resumed_sampler_continues_as_if_uninterrupted_on_any_world(before: int, ranks: int, seed: int) -> None:
    through = WindowSampler(windows=50, batch=12, seed=seed)
    for _ in range(before):
        through.next_batch()
    state = through.state_dict()
    resumed = [WindowSampler(windows=50, batch=12, seed=seed, rank=r, world_size=ranks) for r in range(ranks)]
    for sampler in resumed:
        sampler.load_state_dict(state)
    for _ in range(8):
        assert np.concatenate([s.next_batch() for s in resumed]).tolist() == through.next_batch().tolist()
    assert resumed[0].epoch == through.epoch


def test_a_state_of_another_text_or_seed_is_refused() -> None:
    sampler = WindowSampler(windows=50, batch=10, seed=1)
    with pytest.raises(ValueError, match="windows 50, got 51"):
        sampler.load_state_dict({"position": 0, "windows": 51, "seed": 1})
    with pytest.raises(ValueError, match="seed 1, got 2"):
        sampler.load_state_dict({"position": 0, "windows": 50, "seed": 2})


def test_uneven_batches_and_short_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="divisible by the number of ranks"):
        WindowSampler(windows=50, batch=10, seed=0, world_size=3)
    with pytest.raises(ValueError, match=r"at least data\.batch=60"):
        WindowSampler(windows=50, batch=60, seed=0)
