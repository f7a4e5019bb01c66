"""The global order: a permutation, keyed, of constant memory, and cut into ranks and batches without gap or overlap."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.datamodules.sampler import SampleStream, Segment, ShardedEvalSampler, StreamSampler, permute


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 1000, 4097, 65537])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (-1, 2**40)])
def test_permutation_is_a_bijection(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**45), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_permutation_of_huge_domains_stays_inside_and_injective(n, seed, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    images = permute(np.array(indices), n, seed, 3)
    assert images.min() >= 0
    assert images.max() < n
    assert len(set(images.tolist())) == len(indices)


def test_order_is_fixed_for_all_time():
    """A checkpoint of today resumes in later versions: these numbers must never change."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [2, 0, 8, 1, 9, 7, 4, 5, 6, 3]
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, 42, 7).tolist() == [967520774502, 407000056200, 626414885002]


def test_small_permutations_are_close_to_uniform():
    """24 orders of four elements over 4800 keys: chi-square (23 degrees of freedom) below its 0.9999 quantile."""
    orders = [tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(4800)]
    counts = np.array([orders.count(order) for order in itertools.permutations(range(4))])
    assert ((counts - 200) ** 2 / 200).sum() < 58.6


def test_neighbours_are_scattered_and_passes_unrelated():
    n = 10_000
    first, second = (permute(np.arange(n), n, 0, epoch) for epoch in (0, 1))
    for a, b in ((first[:-1], first[1:]), (first, second), (np.arange(n), first)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(n)
    assert np.abs(np.diff(first)).mean() == pytest.approx(n / 3, rel=0.03)


def test_stream_is_a_function_of_the_position():
    stream = SampleStream(13, seed=5)
    whole = stream(np.arange(13 * 4))
    assert np.array_equal(stream(np.arange(20, 33)), whole[20:33])
    assert np.array_equal(stream(np.array([40, 2, 17])), whole[[40, 2, 17]])
    for start in range(0, 52, 13):
        assert sorted(whole[start : start + 13]) == list(range(13))
    assert SampleStream(3, shuffle=False)(np.arange(7)).tolist() == [0, 1, 2, 0, 1, 2, 0]


def sampler(num_samples, batch_size, replicas, rank, start=0, num_batches=None):
    stream = SampleStream(num_samples, seed=1)
    batches = num_batches or num_samples // (batch_size * replicas)
    return StreamSampler(
        range(num_samples),
        lambda epoch: [Segment(stream, start, batches)],
        num_batches=batches,
        batch_size=batch_size,
        num_replicas=replicas,
        rank=rank,
    )


@pytest.mark.parametrize(("batch_size", "replicas"), [(12, 1), (6, 2), (4, 3), (1, 12)])
def test_global_batches_do_not_depend_on_ranks(batch_size, replicas):
    ranks = [
        np.array(list(sampler(100, batch_size, replicas, rank))).reshape(-1, batch_size) for rank in range(replicas)
    ]
    global_batches = np.concatenate(ranks, axis=1)
    assert np.array_equal(global_batches.ravel(), SampleStream(100, seed=1)(np.arange(96)))


def test_chunks_do_not_show():
    long = list(sampler(50_000, 7, 2, 1, start=123, num_batches=3000))
    positions = 123 + np.arange(3000)[:, None] * 14 + 7 + np.arange(7)
    assert long == SampleStream(50_000, seed=1)(positions.ravel()).tolist()


def test_memory_and_start_do_not_grow_with_the_corpus():
    huge = sampler(10**12, 16, 1, 0, start=5 * 10**12 + 3)
    tracemalloc.start()
    first = list(itertools.islice(iter(huge), 20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(first)) == 20_000
    assert peak < 8e6


@pytest.mark.parametrize("num_samples", [1, 5, 12, 13])
@pytest.mark.parametrize(("batch_size", "replicas"), [(4, 1), (3, 2), (2, 4)])
def test_evaluation_counts_each_sample_once(num_samples, batch_size, replicas):
    ranks = [
        list(ShardedEvalSampler(range(num_samples), batch_size=batch_size, num_replicas=replicas, rank=rank))
        for rank in range(replicas)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    assert len(ranks[0]) % batch_size == 0
    together = torch.tensor(ranks).view(replicas, -1, batch_size).transpose(0, 1).flatten()
    assert together[:num_samples].tolist() == list(range(num_samples))
    assert (together[num_samples:] == -1).all()
    assert len(together) - num_samples < batch_size * replicas
