"""Packing: how the boxes of one direction of an exchange lie in its buffers, and the copies in and out of them.

        sources  --sent-->  send buffer  --all-to-all-->  arrivals  --arrived-->  results
                 ------------------------- copies ------------------------------>

Where rows are gathered, the arrivals have a section for each row, and what stays is packed behind what is received:

        | row 0: received, stays | row 1: received, stays | ...

A result that arrives as one run, in its own order, is a view of the arrivals; one that stays whole, a view of its source.
No process group here: `exchange` launches what moves the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from vescale_optim.sharding.buffer_pool import BufferPool
from vescale_optim.sharding.regions import Window, matching_windows, packed_window
from vescale_optim.sharding.routes import Grid, Piece, Routes

# Kernels read units as a whole, and the fast ones want aligned memory: the units of a tensor start where a tensor of its own
# would start on CPU.
UNIT_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Traffic:
    """Elements that one direction of an exchange moves and holds on this rank.

    sent, received: of the all-to-all. gathered: received from the other rows. buffers: of all scratch memory, results
    included where they lie in it.
    """

    sent: int
    received: int
    gathered: int
    buffers: int


@dataclass(frozen=True)
class Copy:
    """A box that stays on this rank: read from one memory, written to another."""

    tensor: int
    source: Window
    target: Window


@dataclass(frozen=True)
class Targets:
    """Where the result of each tensor lies: in a run of the arrivals or of its source, read in place, or in a buffer.

    numels: of the results, None for absent tensors. The dicts map tensors to where their run begins.
    align_bytes: a source run that does not begin at a multiple of this is copied.
    """

    numels: tuple[int | None, ...]
    in_arrivals: dict[int, int]
    in_source: dict[int, int]
    in_buffer: dict[int, int]
    buffer_numel: int
    align_bytes: int


@dataclass(frozen=True)
class Direction:
    """What travels one way.

        sources  --sent-->  send buffer  --all-to-all-->  arrivals  --arrived-->  targets
                 ------------------------- copies ------------------------------>

    Where rows are gathered, the arrivals have a section for each row, and what stays is packed behind what is received:

        | row 0: received, stays | row 1: received, stays | ...
    """

    communicates: bool
    gathers: bool
    sent: list[Piece]
    send_numels: list[int]
    recv_numels: list[int]
    packed_stays: list[Piece]
    section_numels: list[int]
    own_section: int
    arrived: list[Piece]
    copies: list[Copy]
    targets: Targets

    @property
    def send_numel(self) -> int:
        return sum(self.send_numels)

    @property
    def arrivals_numel(self) -> int:
        return sum(self.section_numels)

    @property
    def traffic(self) -> Traffic:
        gathered = self.arrivals_numel - self.section_numels[self.own_section] if self.gathers else 0
        buffers = self.send_numel + self.arrivals_numel + self.targets.buffer_numel
        return Traffic(self.send_numel, sum(self.recv_numels), gathered, buffers)


def owners_direction(routes: Routes) -> Direction:
    """From the shards to the owners of the units."""
    sent = routes.to_peer_owners(routes.grid.row)
    received = routes.from_peer_columns()
    arrived = list(chain(*received.values()))
    copies = [Copy(stay.tensor, *matching_windows(stay.held, stay.owned)) for stay in routes.stays]
    return Direction(
        communicates=any(routes.moves),
        gathers=False,
        sent=list(chain(*sent.values())),
        send_numels=_numels_of_columns(sent, routes.grid),
        recv_numels=_numels_of_columns(received, routes.grid),
        packed_stays=[],
        section_numels=[_numel(arrived)],
        own_section=0,
        arrived=arrived,
        copies=copies,
        targets=_place(routes.owner_numels, arrived, copies, align_bytes=UNIT_ALIGN_BYTES),
    )


def shards_direction(routes: Routes) -> Direction:
    """The same routes the other way: what was received is sent, what was sent is received."""
    grid = routes.grid
    gathers = grid.num_rows > 1
    sent = routes.from_peer_columns()
    received = routes.to_peer_owners(grid.row)
    if gathers:
        rows = range(grid.num_rows)
        sections = [[*chain(*routes.to_peer_owners(row).values()), *routes.to_owner(row, grid.column)] for row in rows]
        packed_stays = [Piece(stay.tensor, stay.owned.numel, packed_window(stay.owned)) for stay in routes.stays]
        copies = []
    else:
        sections = [list(chain(*received.values()))]
        packed_stays = []
        copies = [Copy(stay.tensor, *matching_windows(stay.owned, stay.held)) for stay in routes.stays]
    arrived = list(chain(*sections))
    return Direction(
        communicates=any(routes.moves),
        gathers=gathers,
        sent=list(chain(*sent.values())),
        send_numels=_numels_of_columns(sent, routes.grid),
        recv_numels=_numels_of_columns(received, routes.grid),
        packed_stays=packed_stays,
        section_numels=list(map(_numel, sections)),
        own_section=grid.row,
        arrived=arrived,
        copies=copies,
        targets=_place(routes.shard_numels, arrived, copies, align_bytes=1),
    )


def _numels_of_columns(pieces: Mapping[int, Sequence[Piece]], grid: Grid) -> list[int]:
    """Elements for each column, most of them none: a rank talks to few of thousands."""
    numels = [0] * grid.num_columns
    for column, of_column in pieces.items():
        numels[column] = _numel(of_column)
    return numels


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _place(
    numels: Sequence[int | None], arrived: Sequence[Piece], copies: Sequence[Copy], *, align_bytes: int
) -> Targets:
    """Read in place what came as one run, in the order of its target; give the rest a run of a buffer."""
    align_numel = align_bytes  # enough for every dtype
    arriving: list[list[tuple[int, Window]]] = [[] for _ in numels]
    position = 0
    for piece in arrived:
        arriving[piece.tensor].append((position, piece.window))
        position += piece.numel
    copied: list[list[tuple[int, Window]]] = [[] for _ in numels]
    for copy in copies:
        # A strided source is no run; -1 is where no run begins.
        copied[copy.tensor].append((copy.source.offset if copy.source.is_contiguous else -1, copy.target))
    in_arrivals, in_source, in_buffer, filled = {}, {}, {}, 0
    for tensor, numel in enumerate(numels):
        if not numel:
            continue
        start = _run_start(arriving[tensor], numel)
        if start is not None and start % align_numel == 0:
            in_arrivals[tensor] = start
            continue
        start = _run_start(copied[tensor], numel)
        if start is not None:
            in_source[tensor] = start
            continue
        in_buffer[tensor] = filled
        filled += -(-numel // align_numel) * align_numel
    return Targets(tuple(numels), in_arrivals, in_source, in_buffer, filled, align_bytes)


def _run_start(boxes: Sequence[tuple[int, Window]], numel: int) -> int | None:
    """Where a memory of `numel` elements begins, if these boxes, each (position, target), hold it in its own order."""
    starts = {position - target.offset for position, target in boxes}
    if len(starts) != 1 or not all(target.is_contiguous and position >= 0 for position, target in boxes):
        return None
    return starts.pop() if sum(target.size[0] for _, target in boxes) == numel else None


class Movement:
    """One direction on its way, without the collectives: made with everything packed that is sent.

    Attributes:
        send: what goes to the columns, by `direction.send_numels`.
        received: where the columns' answers go, by `direction.recv_numels`; a view of `arrivals`.
        arrivals: what the rows gather, by `direction.section_numels`; the own section is this rank's once received.
    """

    def __init__(
        self,
        direction: Direction,
        sources: Sequence[Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        self.direction = direction
        self._pool = pool
        wanted = direction.send_numel, direction.arrivals_numel, direction.targets.buffer_numel
        self._taken = [pool.take(numel, dtype, device) for numel in wanted if numel]
        buffers = iter(self._taken)
        nothing = torch.empty(0, dtype=dtype, device=device)
        self.send, self.arrivals, self._buffer = (next(buffers)[:numel] if numel else nothing for numel in wanted)
        start = sum(direction.section_numels[: direction.own_section])
        end = start + direction.section_numels[direction.own_section]
        self.received = self.arrivals[start : start + sum(direction.recv_numels)]
        self._results: list[Tensor | None] = []
        _pack(direction.sent, sources, self.send)
        _pack(direction.packed_stays, sources, self.arrivals[start + self.received.numel() : end])

    def copy_stays(self, sources: Sequence[Tensor | None]) -> None:
        """What stays on this rank, from its source to the results; may run while the rest is on its way."""
        targets = self.direction.targets
        self._results = [self._place(tensor, numel, sources[tensor]) for tensor, numel in enumerate(targets.numels)]
        copies = [copy for copy in self.direction.copies if copy.tensor in targets.in_buffer]
        _copy_or_zero(
            [copy.target.view(self._results[copy.tensor]) for copy in copies],
            [None if sources[copy.tensor] is None else copy.source.view(sources[copy.tensor]) for copy in copies],
        )

    def _place(self, tensor: int, numel: int | None, source: Tensor | None) -> Tensor | None:
        """The memory of one result; its values may still be missing."""
        targets = self.direction.targets
        if numel is None:
            return None
        if tensor in targets.in_arrivals:
            return self.arrivals.narrow(0, targets.in_arrivals[tensor], numel)
        if tensor in targets.in_buffer:
            return self._buffer.narrow(0, targets.in_buffer[tensor], numel)
        if numel == 0 or source is None:
            return self.arrivals.new_zeros(numel)
        run = source.narrow(0, targets.in_source[tensor], numel).to(self.arrivals.dtype)
        return run if run.data_ptr() % targets.align_bytes == 0 else run.clone()

    def finish(self) -> list[Tensor | None]:
        """The results, once everything has arrived."""
        targets = self.direction.targets
        packed = self.arrivals.split([piece.numel for piece in self.direction.arrived])
        unpacked = [
            (piece.window.view(self._results[piece.tensor]), _shaped(run, piece))
            for piece, run in zip(self.direction.arrived, packed, strict=True)
            if piece.tensor in targets.in_buffer
        ]
        if unpacked:
            torch._foreach_copy_(*map(list, zip(*unpacked, strict=True)))
        return self._results

    def release(self) -> None:
        """The results are used up: their memory may be taken by others."""
        self._results = []
        for buffer in self._taken:
            self._pool.give(buffer)
        self._taken = []


def _pack(pieces: Sequence[Piece], sources: Sequence[Tensor | None], buffer: Tensor) -> None:
    """Pieces one after another into the buffer, cast to its dtype."""
    runs = buffer.split([piece.numel for piece in pieces])
    _copy_or_zero(
        [_shaped(run, piece) for run, piece in zip(runs, pieces, strict=True)],
        [None if sources[piece.tensor] is None else piece.window.view(sources[piece.tensor]) for piece in pieces],
    )


def _shaped(run: Tensor, piece: Piece) -> Tensor:
    """The packed elements of a piece in the shape of its window."""
    return run if piece.window.is_contiguous else run.view(piece.window.size)


def _copy_or_zero(targets: Sequence[Tensor], sources: Sequence[Tensor | None]) -> None:
    zeroed = [target for target, source in zip(targets, sources, strict=True) if source is None]
    if zeroed:
        torch._foreach_zero_(zeroed)
    if len(zeroed) < len(targets):
        copied = [(target, source) for target, source in zip(targets, sources, strict=True) if source is not None]
        torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
