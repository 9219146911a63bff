"""The exchange: every element of every unit reaches its owner once, and what the owner made of it comes back once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from tests.support.layouts import indices, local_indices, placements_over, shapes
from tests.support.ranks import run_ranks
from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.collectives import shard_slices
from vescale_optim.sharding.exchange import Exchange, OwnedRun, RoutedTensor
from vescale_optim.sharding.packing import Direction, Movement, owners_direction, shards_direction
from vescale_optim.sharding.regions import PlacedRegions
from vescale_optim.sharding.routes import Grid, find_routes

CPU = torch.device("cpu")


class SpoiledPool(BufferPool):
    """Fresh buffers are NaN, so that an element nobody wrote is seen."""

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return super().take(numel, dtype, device).fill_(torch.nan)


@dataclass(frozen=True)
class Case:
    """A tensor of a bucket over a grid of num_rows x math.prod(mesh) ranks."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    runs: tuple[OwnedRun, ...]

    @property
    def routed(self) -> RoutedTensor:
        return RoutedTensor(
            self.shape, PlacedRegions(self.shape, self.mesh, self.placements, tuple(range(len(self.mesh)))), self.runs
        )

    def held(self, column: int) -> Tensor:
        """Flat indices of what a column holds."""
        coordinate = [int(place) for place in torch.unravel_index(torch.tensor(column), self.mesh)]
        return local_indices(self.shape, self.mesh, self.placements, coordinate)

    def owned(self, row: int, column: int) -> Tensor:
        """Flat indices of what an owner gets, in the order of its memory."""
        mine = [run for run in self.runs if (run.row, run.column) == (row, column)]
        return torch.cat([torch.arange(0), *(torch.arange(run.start, run.end) for run in mine)])


@st.composite
def cases(draw: st.DrawFn, mesh: tuple[int, ...], num_rows: int) -> Case:
    shape = draw(shapes)
    placements = draw(placements_over(shape, mesh))
    if Replicate() in placements and math.prod(mesh) > 1:
        # Columns hold different parts: every axis of the mesh cuts.
        placements = tuple(Shard(len(shape) - 1) for _ in mesh) if shape else placements
    numel = math.prod(shape)
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=5))})
    rows, columns = st.integers(0, num_rows - 1), st.integers(0, math.prod(mesh) - 1)
    runs = tuple(OwnedRun(a, b, draw(rows), draw(columns)) for a, b in pairwise(cuts))
    return Case(shape, mesh, placements, runs)


@st.composite
def buckets(draw: st.DrawFn) -> tuple[tuple[int, int], list[Case]]:
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3)]))
    num_rows = draw(st.integers(1, 3))
    bucket = draw(st.lists(cases(mesh, num_rows).filter(lambda case: case.shape != () or mesh == (1,)), max_size=4))
    return (num_rows, math.prod(mesh)), bucket


def travel(directions: dict[Any, Direction], sources: dict[Any, list[Any]], pool: BufferPool) -> dict[Any, list[Any]]:
    """One direction of all ranks of a grid, the collectives done by hand."""
    moves = {place: Movement(d, sources[place], torch.float32, CPU, pool) for place, d in directions.items()}
    for (row, column), move in moves.items():
        received = shard_slices(move.received, move.direction.recv_numels)
        for peer, slot in enumerate(received):
            sender = moves[row, peer]
            sent = shard_slices(sender.send, sender.direction.send_numels)[column]
            assert sent.shape == slot.shape
            assert move.direction.communicates or not sent.numel()
            slot.copy_(sent)
    if any(move.direction.gathers for move in moves.values()):
        sections = {place: shard_slices(move.arrivals, move.direction.section_numels) for place, move in moves.items()}
        own = {place: sections[place][place[0]].clone() for place in moves}
        for (row, column), slots in sections.items():
            for peer, slot in enumerate(slots):
                if peer != row:
                    slot.copy_(own[peer, column])
    for place, move in moves.items():
        move.copy_stays(sources[place])
    return {place: move.finish() for place, move in moves.items()}


@settings(max_examples=100)
@given(buckets(), st.data())
def test_every_element_reaches_its_owner_and_comes_back(
    bucket: tuple[tuple[int, int], list[Case]], data: st.DataObject
) -> None:
    (num_rows, num_columns), tensors = bucket
    places = [(row, column) for row in range(num_rows) for column in range(num_columns)]
    present = data.draw(st.tuples(*[st.booleans() | st.just(True) for _ in tensors]))
    routes = {
        place: find_routes([case.routed for case in tensors], Grid(*place, num_rows, num_columns)).only(present)
        for place in places
    }
    pool = SpoiledPool()
    values = [indices(case.shape).flatten() + 1000.0 * number for number, case in enumerate(tensors)]
    zero_on = data.draw(st.sampled_from([None, *places]))

    shards = {
        place: [v[case.held(place[1])] if place != zero_on else None for v, case in zip(values, tensors, strict=True)]
        for place in places
    }
    owned = travel({place: owners_direction(routes[place]) for place in places}, shards, pool)
    for place in places:
        for v, case, here, memory in zip(values, tensors, present, owned[place], strict=True):
            expected = case.owned(*place)
            if not here or not expected.numel():
                assert memory is None
                continue
            from_zeros = torch.isin(expected, case.held(zero_on[1])) if zero_on and zero_on[0] == place[0] else False
            assert torch.equal(memory, v[expected].masked_fill(torch.as_tensor(from_zeros), 0.0))
            assert memory.data_ptr() % 64 == 0

    directions = {
        place: [-v[case.owned(*place)] if here else None for v, case, here in zip(values, tensors, present, strict=True)]
        for place in places
    }
    local = travel({place: shards_direction(routes[place]) for place in places}, directions, pool)
    for place in places:
        for v, case, here, memory in zip(values, tensors, present, local[place], strict=True):
            assert memory is None if not here else torch.equal(memory, -v[case.held(place[1])])


def common_numel(a: Tensor, b: Tensor) -> int:
    return int(torch.isin(a, b).sum())


@settings(max_examples=40)
@given(buckets())
def test_traffic_is_what_owners_do_not_hold(bucket: tuple[tuple[int, int], list[Case]]) -> None:
    (num_rows, num_columns), tensors = bucket
    for row in range(num_rows):
        sent, communicates, moved = 0, set(), 0
        for column in range(num_columns):
            exchange = Exchange(
                [case.routed for case in tensors],
                row=row,
                column=column,
                num_rows=num_rows,
                num_columns=num_columns,
                device=CPU,
            )
            sent += exchange.to_owners_traffic.sent
            communicates.add(exchange.communicates)
            assert exchange.to_owners_traffic.sent == exchange.to_shards_traffic.received
            assert exchange.to_owners_traffic.received == exchange.to_shards_traffic.sent
            units = [case.owned(row, column) for case in tensors]
            at_home = [common_numel(u, case.held(column)) for u, case in zip(units, tensors, strict=True)]
            moved += sum(map(Tensor.numel, units)) - sum(at_home)
            others = [(r, c) for r in range(num_rows) if r != row for c in range(num_columns)]
            elsewhere = sum(common_numel(case.held(column), case.owned(*other)) for case in tensors for other in others)
            assert exchange.to_shards_traffic.gathered == elsewhere
        assert sent == moved and communicates == {moved > 0}


def test_what_lies_right_is_not_copied() -> None:
    """A whole unit at home is read where it is stored; a shard that comes back as one message is a view of the buffer."""
    shape = (4, 32)
    runs = (OwnedRun(0, 64, 0, 0), OwnedRun(64, 128, 0, 1))
    at_home = Exchange(
        [Case(shape, (2,), (Shard(0),), runs).routed], row=0, column=0, num_rows=1, num_columns=2, device=CPU
    )
    assert not at_home.communicates and at_home.to_owners_traffic.buffers == at_home.to_shards_traffic.buffers == 0
    pool, shard = BufferPool(), torch.arange(64.0)
    incoming = at_home.to_owners([shard], torch.float32, None, pool)
    (memory,) = incoming.wait()
    assert memory.data_ptr() == shard.data_ptr()
    incoming.release()
    whole = (OwnedRun(0, 128, 0, 1),)
    away = Exchange([Case(shape, (2,), (Shard(0),), whole).routed], row=0, column=0, num_rows=1, num_columns=2, device=CPU)
    assert (away.to_shards_traffic.received, away.to_shards_traffic.buffers) == (64, 64)
    assert away.subset((False,)).to_owners_traffic.buffers == 0 and not away.subset((False,)).communicates
    assert away.subset((False,)) is away.subset([False]) and away.subset((True,)) is away


BUCKET = [
    ((8, 6), (Shard(0),), ((0, 48),)),
    ((7, 5), (Shard(0),), ((0, 10), (10, 15), (15, 35))),
    ((1, 64), (Shard(0),), ((0, 64),)),
    ((6, 8), (Shard(1),), ((0, 16), (16, 48))),
    ((4, 3, 5), (Shard(2),), ((0, 15), (15, 60))),
    ((9,), (Shard(0),), ((0, 9),)),
    ((0, 4), (Shard(0),), ()),
    ((5, 2), (Shard(1),), ((0, 10),)),
]


def bucket_over(num_rows: int, num_columns: int, shift: int) -> list[Case]:
    places = [(row, column) for column in range(num_columns) for row in range(num_rows)]
    cases, turn = [], shift
    for shape, placements, cuts in BUCKET:
        runs = []
        for start, end in cuts:
            runs.append(OwnedRun(start, end, *places[turn % len(places)]))
            turn += 1
        cases.append(Case(shape, (num_columns,), placements, tuple(runs)))
    return cases


def exchange_there_and_back(rank: int, world_size: int, mesh: Any, num_rows: int) -> None:
    """Two buckets at once, some tensors absent, rank 0 without gradients; x comes back as 2x + 1 from whoever owns it."""
    num_columns = world_size // num_rows
    grid = init_device_mesh("cpu", (num_rows, num_columns))
    row, column = grid.get_coordinate()
    row_group, column_group = grid.get_group(0), grid.get_group(1)
    pool = SpoiledPool()
    buckets = [bucket_over(num_rows, num_columns, shift) for shift in (0, 3)]
    exchanges = [
        Exchange([c.routed for c in b], row=row, column=column, num_rows=num_rows, num_columns=num_columns, device=CPU)
        for b in buckets
    ]
    values = [[indices(case.shape).flatten() + 7.0 * n for n, case in enumerate(bucket)] for bucket in buckets]
    shards = [
        [v[case.held(column)] if rank else None for v, case in zip(vs, bucket, strict=True)]
        for vs, bucket in zip(values, buckets, strict=True)
    ]
    for wire in (torch.float32, torch.bfloat16):
        for present in ((True,) * 8, (True, False) * 4, (False,) * 8):
            moves = [exchange.subset(present) for exchange in exchanges]
            incoming = [move.to_owners(s, wire, column_group, pool) for move, s in zip(moves, shards, strict=True)]
            outgoing = []
            for move, arriving, bucket, vs in zip(moves, incoming, buckets, values, strict=True):
                owned = arriving.wait()
                for case, v, memory, here in zip(bucket, vs, owned, present, strict=True):
                    assert_is_owned(case, v, row, column, memory, here, wire)
                directions = [2 * v[case.owned(row, column)].to(wire) + 1 for case, v in zip(bucket, vs, strict=True)]
                outgoing.append(move.to_shards(directions, wire, column_group, row_group, pool))
                arriving.release()
            for arriving, bucket, vs in zip(outgoing, buckets, values, strict=True):
                for case, v, memory, here in zip(bucket, vs, arriving.wait(), present, strict=True):
                    assert memory is None if not here else torch.equal(memory, 2 * v[case.held(column)].to(wire) + 1)
                arriving.release()


def assert_is_owned(
    case: Case, values: Tensor, row: int, column: int, memory: Tensor | None, here: bool, wire: torch.dtype
) -> None:
    expected = case.owned(row, column)
    if not here or not expected.numel():
        assert memory is None
        return
    # Rank 0 at (0, 0) sends zeros.
    sent = values[expected]
    if row == 0:
        sent[torch.isin(expected, case.held(0))] = 0
    assert memory.dtype == wire and torch.equal(memory, sent.to(wire))


@pytest.mark.parametrize(("world_size", "num_rows"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)])
def test_values_travel_and_come_back(world_size: int, num_rows: int) -> None:
    run_ranks(world_size, exchange_there_and_back, num_rows)
