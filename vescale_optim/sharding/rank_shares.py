"""`RankShares`: how much of one tensor each rank holds, small however many ranks there are.

A tensor lies in one run of the global buffer, so the ranks that hold a part of it are neighbours and most ranks of a large
mesh hold nothing. Only what those neighbours hold is kept:

    (0, 0, 0, 512, 4096, 128, 0, 0, ..., 0)   on 10,240 ranks   ->   num_ranks 10240, first 3, held (512, 4096, 128)

Reads, compares and hashes as the tuple of all ranks. `BufferPlan.shares`, `RaggedShard.local_units` and
`RaggedLayout.numels` are of this kind. Pure Python.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class RankShares(Sequence[int]):
    """One number per rank: `held[i]` for rank `first + i`, 0 for all others. Made by `of` or `from_first`.

    Attributes:
        num_ranks: its length.
        first: the first rank that holds anything; 0 where none does.
        held: without zeros at either end, so that equal shares have equal fields.
    """

    num_ranks: int
    first: int
    held: tuple[int, ...]

    @classmethod
    def of(cls, shares: Iterable[int]) -> RankShares:
        """From one number per rank."""
        if isinstance(shares, RankShares):
            return shares
        values = tuple(map(operator.index, shares))
        return cls.from_first(len(values), 0, values)

    @classmethod
    def from_first(cls, num_ranks: int, first: int, shares: Sequence[int]) -> RankShares:
        """From the numbers of the ranks `first`, `first + 1`, ...; all others hold nothing."""
        begin, end = 0, len(shares)
        while begin < end and not shares[begin]:
            begin += 1
        while begin < end and not shares[end - 1]:
            end -= 1
        return cls(num_ranks, first + begin if begin < end else 0, tuple(shares[begin:end]))

    @property
    def total(self) -> int:
        """The sum over all ranks."""
        return sum(self.held)

    def before(self, rank: int) -> int:
        """The sum over the ranks before `rank`."""
        return sum(self.held[: max(rank - self.first, 0)])

    def times(self, factor: int) -> RankShares:
        """Every number multiplied by `factor`, which is at least 1."""
        return RankShares(self.num_ranks, self.first, tuple([share * factor for share in self.held]))

    def over(self, divisor: int) -> RankShares:
        """Every number divided by `divisor`, which divides all of them."""
        return RankShares(self.num_ranks, self.first, tuple([share // divisor for share in self.held]))

    def __len__(self) -> int:
        return self.num_ranks

    def __iter__(self) -> Iterator[int]:
        after = self.num_ranks - self.first - len(self.held)
        return chain(repeat(0, self.first), self.held, repeat(0, after))

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        position = range(self.num_ranks)[rank] - self.first
        return self.held[position] if 0 <= position < len(self.held) else 0

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankShares):
            return (self.num_ranks, self.first, self.held) == (other.num_ranks, other.first, other.held)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[object, ...]:
        return RankShares, (self.num_ranks, self.first, self.held)

    def __repr__(self) -> str:
        if self.num_ranks <= _SHORT:
            return repr(tuple(self))
        first, after = self.first, self.num_ranks - self.first - len(self.held)
        held = [str(value) for value in self.held]
        shown = held if len(held) <= _SHORT else [*held[: _SHORT // 2], "...", *held[-_SHORT // 2 :]]
        zeros = [f"{count} times 0" if count else "" for count in (first, after)]
        return f"({', '.join(part for part in (zeros[0], *shown, zeros[1]) if part)})"


_SHORT = 16
