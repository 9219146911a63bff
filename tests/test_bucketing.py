"""form_buckets: tensors travel together in the order of use, with little padding, even work, and time to overlap."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from vescale_optim.optimizers.orthogonalize import newton_schulz_flops
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.bucketing import Bucket, form_buckets
from vescale_optim.sharding.planner import TensorBlocks


def matrix(rows: int, columns: int) -> TensorBlocks:
    """A matrix that Muon needs whole."""
    return replace(Blocks.whole((rows, columns)).units, cost=newton_schulz_flops(rows, columns, 5))


def elements(numel: int) -> TensorBlocks:
    return TensorBlocks(numel)


def gpt(width: int, layers: int, vocabulary: int) -> list[TensorBlocks]:
    """In the order of ReplicatedStorage: what AdamW updates, then the matrices from the last layer to the first."""
    others = [elements(vocabulary * width), elements(width)] + [elements(9 * width + 4 * width)] * layers
    others += [elements(1024 * width), elements(vocabulary * width)]
    layer = [matrix(width, 4 * width), matrix(4 * width, width), matrix(width, width), matrix(3 * width, width)]
    return others + layer * layers


def formed(tensors: list[TensorBlocks], num_ranks: int, bucket_numel: int) -> tuple[list[Bucket], list[float]]:
    loads = [0.0] * num_ranks
    return form_buckets(tensors, num_ranks, bucket_numel=bucket_numel, align=16, loads=loads), loads


def imbalance(loads: list[float]) -> float:
    return max(loads) / (sum(loads) / len(loads))


def held(buckets: list[Bucket], num_ranks: int) -> list[int]:
    return [
        sum(sum(bucket.plan.extent(slot, rank).numel for slot in range(len(bucket.tensors))) for bucket in buckets)
        for rank in range(num_ranks)
    ]


# Width, layers, vocabulary, ranks; then what was found before boundaries were chosen: busiest FLOPs by the mean.
@pytest.mark.parametrize(
    "width, layers, vocabulary, num_ranks, flops",
    [
        (768, 12, 50304, 2, 1.001),
        (768, 12, 50304, 3, 1.001),
        (768, 12, 50304, 4, 1.02),
        (768, 12, 50304, 8, 1.1),
        (512, 8, 8192, 2, 1.001),
        (512, 8, 8192, 3, 1.02),
        (512, 8, 8192, 4, 1.001),
        (512, 8, 8192, 8, 1.02),
        (64, 4, 256, 3, 1.1),
    ],
)
def test_a_gpt_is_shared_evenly_with_little_padding(
    width: int, layers: int, vocabulary: int, num_ranks: int, flops: float
) -> None:
    tensors = gpt(width, layers, vocabulary)
    buckets, loads = formed(tensors, num_ranks, 4 << 20)
    total = sum(tensor.numel for tensor in tensors)
    assert sum(bucket.plan.padding for bucket in buckets) <= 0.03 * total
    assert imbalance(loads) <= flops
    assert max(held(buckets, num_ranks)) <= 1.05 * total / num_ranks


def test_buckets_hold_every_tensor_once_and_in_order() -> None:
    chooser = random.Random(7)
    for _ in range(30):
        kinds = [matrix(256, 256), matrix(64, 1024), elements(1000), TensorBlocks(96 * 256, 256), elements(0)]
        tensors = chooser.choices(kinds, k=chooser.randint(1, 60))
        num_ranks = chooser.choice([1, 2, 3, 8, 64])
        buckets, loads = formed(tensors, num_ranks, chooser.choice([1, 30_000, 1 << 20]))
        assert [index for bucket in buckets for index in bucket.tensors] == list(range(len(tensors)))
        for bucket in buckets:
            assert bucket.plan.tensors == tuple(tensors[index] for index in bucket.tensors)
            assert not bucket.plan.is_even or bucket.plan.padding_fraction <= 0.03 or not any(bucket.plan.tensors)
        assert sum(loads) == pytest.approx(sum(tensor.cost for tensor in tensors if tensor.numel))


def test_no_tensors_give_no_buckets() -> None:
    assert formed([], 4, 100) == ([], [0.0] * 4)


def test_the_same_tensors_give_the_same_buckets() -> None:
    tensors = gpt(512, 8, 8192)
    assert formed(tensors, 3, 1 << 20) == formed(tensors, 3, 1 << 20)


def test_tensors_that_can_be_cut_anywhere_leave_as_soon_as_they_fill_a_bucket() -> None:
    buckets, _ = formed([elements(4000)] * 100, 8, 16_000)
    assert [len(bucket.tensors) for bucket in buckets] == [4] * 25
    assert all(bucket.plan.padding_fraction < 0.01 for bucket in buckets)


def test_a_short_remainder_joins_the_last_bucket() -> None:
    buckets, _ = formed([elements(4000)] * 9, 2, 16_000)
    assert [len(bucket.tensors) for bucket in buckets] == [4, 5]


def test_boundaries_fall_where_matrices_fill_all_ranks() -> None:
    """Eight equal matrices fill eight ranks; a boundary elsewhere would leave a rank empty or give one two."""
    buckets, loads = formed([matrix(256, 256)] * 32, 8, 256 * 256 * 3)
    assert [len(bucket.tensors) for bucket in buckets] == [8, 8, 8, 8]
    assert all(bucket.plan.is_even and not bucket.plan.padding for bucket in buckets)
    assert imbalance(loads) == 1.0


def test_a_model_is_not_sent_in_one_bucket_where_several_waste_little() -> None:
    layer = [matrix(512, 512)] * 4 + [matrix(2048, 512)] * 3
    buckets, loads = formed(layer * 36, 16, 1 << 20)
    sizes = [bucket.plan.numel for bucket in buckets]
    assert max(sizes) <= 0.5 * sum(sizes)
    assert imbalance(loads) <= 1.05


def test_fewer_matrices_than_ranks_get_unequal_shards_in_few_buckets() -> None:
    """An owner receives its matrix from all ranks, whatever the others do: one bucket costs as much time as ten."""
    buckets, loads = formed([matrix(256, 256)] * 10, 64, 256 * 256)
    assert len(buckets) <= 2
    assert all(not bucket.plan.is_even and not bucket.plan.padding for bucket in buckets)
    assert sum(load > 0 for load in loads) == 10


def test_a_model_of_45_000_tensors_is_planned_for_1024_ranks_in_seconds() -> None:
    """The shapes of DeepSeek-V3: 58 layers of 256 experts and one shared one."""
    expert = [matrix(2048, 7168), matrix(2048, 7168), matrix(7168, 2048)]
    attention = [matrix(1536, 7168), matrix(24576, 1536), matrix(576, 7168), matrix(32768, 512), matrix(7168, 16384)]
    tensors = [elements(129280 * 7168)] * 2 + ([elements(7168)] * 4 + attention + expert * 257) * 58
    began = time.process_time()
    buckets, loads = formed(tensors, 1024, 128 << 20)
    assert time.process_time() - began < 10
    total = sum(tensor.numel for tensor in tensors)
    assert sum(bucket.plan.padding for bucket in buckets) <= 0.03 * total
    assert imbalance(loads) <= 1.5
