"""Exchange: moves a bucket of tensors between the ranks that store them and the owners of their units, and back.

Ranks form a grid. Its columns hold different parts of every tensor, its rows are replicas. Each unit, a flat run of the
row-major tensor, has one owner (row, column). One packed all-to-all within the row brings the units to their owners; the
way back is the same routes with sends and receives swapped, and an all-gather over the rows of a column completes it:

              column 0   column 1                           to_owners            to_shards
    row 0     [a0 b0]    [a1 b1]      owner of A: (0, 1)     a0 -> (0, 1)        (0, 1) -> A's a0 back to (0, 0)
    row 1     [a0 b0]    [a1 b1]      owner of B: (1, 0)     b1 -> (1, 0)        (1, 0) -> B's b1 back to (1, 1)
                                                                                 then a0 down column 0, b0 up, ...

    exchange = Exchange(tensors, row=row, column=column, num_rows=2, num_columns=2, device=device)
    incoming = exchange.to_owners(shards, torch.bfloat16, column_group, pool)
    units = incoming.wait()                                      # one flat memory per tensor, None where nothing is owned
    outgoing = exchange.to_shards(directions, torch.bfloat16, column_group, row_group, pool)
    incoming.release()
    local_directions = outgoing.wait()
    outgoing.release()                                           # once they have been applied

A rank computes the routes of its own parts and its own units only; what arrives as one run is used where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.collectives import Pending, all_gather, all_to_all, in_sequence, is_host_backend
from vescale_optim.sharding.packing import Direction, Movement, Traffic, owners_direction, shards_direction
from vescale_optim.sharding.routes import Grid, OwnedRun, RoutedTensor, Routes, find_routes

__all__ = ["Arrival", "Exchange", "OwnedRun", "RoutedTensor", "Traffic"]

class Arrival:
    """Data on its way: `wait()` gives the results, `release()` ends their use.

    Results may be views of buffers or of what was passed in: read them only, and not after `release()`.
    """

    def __init__(self, pending: Pending, movement: Movement) -> None:
        self._pending = pending
        self._movement = movement

    def wait(self) -> list[Tensor | None]:
        self._pending.wait()
        return self._movement.finish()

    def release(self) -> None:
        self._movement.release()


class Exchange:
    """The routes of one bucket for the rank at (row, column) of the grid; built once.

    Args:
        tensors: the bucket, equal on all ranks of the grid.
        row, column: this rank's place; rank c of a column group is column c, rank r of a row group is row r.
        num_rows: replicas of the storage, 1 without.
        num_columns: ranks that hold different parts.
        device: of all memories.
    """

    def __init__(
        self,
        tensors: Sequence[RoutedTensor],
        *,
        row: int,
        column: int,
        num_rows: int,
        num_columns: int,
        device: torch.device | str,
    ) -> None:
        routes = find_routes(tensors, Grid(row, column, num_rows, num_columns))
        self._set_routes(routes, torch.device(device))

    def _set_routes(self, routes: Routes, device: torch.device) -> None:
        self._routes = routes
        self._device = device
        self._subsets: dict[tuple[bool, ...], Exchange] = {}
        self._to_owners = owners_direction(routes)
        self._to_shards = shards_direction(routes)

    def subset(self, present: Sequence[bool]) -> Exchange:
        """The exchange of some tensors of the bucket: same routes, smaller buffers; alike on all ranks.

        Lists keep an entry for every tensor; those of absent ones are ignored, and None in results.
        """
        present = tuple(present)
        if all(present):
            return self
        known = self._subsets.get(present)
        if known is None:
            known = self._subsets[present] = Exchange.__new__(Exchange)
            known._set_routes(self._routes.only(present), self._device)
        return known

    @property
    def communicates(self) -> bool:
        """Whether the all-to-alls run; else every unit of this row lies whole on its owner already."""
        return self._to_owners.communicates

    @property
    def to_owners_traffic(self) -> Traffic:
        return self._to_owners.traffic

    @property
    def to_shards_traffic(self) -> Traffic:
        return self._to_shards.traffic

    def to_owners(
        self, shards: Sequence[Tensor | None], dtype: torch.dtype, column_group: ProcessGroup | None, pool: BufferPool
    ) -> Arrival:
        """Start bringing the units to their owners.

        Args:
            shards: this rank's flat local memory of each tensor, of any dtype; None: all zeros.
            dtype: on the wire and of the result.
            column_group: the ranks of this row; None where `communicates` is False.

        Returns:
            Arrival: a flat memory for each tensor; None where this rank owns nothing of it.
        """
        return self._start(self._to_owners, shards, dtype, column_group, None, pool)

    def to_shards(
        self,
        owned: Sequence[Tensor | None],
        dtype: torch.dtype,
        column_group: ProcessGroup | None,
        row_group: ProcessGroup | None,
        pool: BufferPool,
    ) -> Arrival:
        """Start bringing values of the units back to where their tensors are stored.

        Args:
            owned: flat memories as `to_owners` gives them; None: all zeros, or nothing owned.
            dtype: on the wire and of the result.
            row_group: the ranks of this column; None where there is one row.

        Returns:
            Arrival: a flat local memory for each tensor, empty where this rank holds nothing of it.
        """
        return self._start(self._to_shards, owned, dtype, column_group, row_group, pool)

    def _start(
        self,
        direction: Direction,
        sources: Sequence[Tensor | None],
        dtype: torch.dtype,
        column_group: ProcessGroup | None,
        row_group: ProcessGroup | None,
        pool: BufferPool,
    ) -> Arrival:
        move = Movement(direction, sources, dtype, self._device, pool)

        def gather() -> Pending:
            return all_gather(move.arrivals, direction.section_numels, row_group)

        pending = Pending(blocks_host=row_group is None or is_host_backend(row_group, self._device))
        if direction.communicates:
            pending = all_to_all(move.send, direction.send_numels, move.received, direction.recv_numels, column_group)
        if direction.gathers:
            # In sequence also where this row exchanges nothing: others do, and all must gather in the same order.
            pending = in_sequence(pending, gather)
        move.copy_stays(sources)
        return Arrival(pending, move)
