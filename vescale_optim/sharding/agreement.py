"""Agreement: what the ranks must know of each other before they communicate or change anything.

A small CPU channel (gloo) beside the data: host-side facts travel here, so agreeing never waits for a device. One
maximum over a vector of integers carries everything an optimizer step needs; objects are only gathered to explain a
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup, ReduceOp

from vescale_optim.sharding.collectives import GroupReference, all_reduce, control_group, gather_objects, new_tag


def fingerprint(value: object) -> int:
    """A 62-bit hash of `repr(value)`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 2


# Messages are as long as a multiple of this, so that those about different things can meet, and be told apart.
MESSAGE_NUMBERS = 512


class Agreement:
    """The control channel of the ranks of one group.

    Every message says what it is about. Ranks that meet in different ones (two optimizers stepped in another order, one
    that plans while others step) are told so, all of them.

    Args:
        group: the ranks that must agree; the channel is a gloo group over them.
        topic: what they agree on, in words that are the same on every rank.
    """

    group = GroupReference()

    def __init__(self, group: ProcessGroup, topic: str) -> None:
        self.group = control_group(group)
        self.rank = self.group.rank()
        self.size = self.group.size()
        self._set_topic(topic)

    def _set_topic(self, topic: str) -> None:
        self._topic, self._mark = topic, fingerprint(topic)

    def name_after(self, names: Sequence[str]) -> None:
        """Say in messages which parameters they are about."""
        first = f", the first {names[0]!r}" if names else ""
        self._set_topic(f"optimizer {new_tag(self.group)} of {len(names)} parameters{first} ({fingerprint(names):x})")

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Elementwise maximum over the ranks; every rank must give as many values."""
        return self.start_maximum(values)()

    def start_maximum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """The same without waiting: call the result to wait for it. Other ranks can go on meanwhile."""
        if self.size == 1:
            return lambda: list(values)
        numbers = [self._mark, -self._mark, *values]
        padding = -len(numbers) % MESSAGE_NUMBERS
        message = torch.tensor(numbers + [0] * padding, dtype=torch.int64, device="cpu")
        handle = all_reduce(message, self.group, ReduceOp.MAX, async_op=True)

        def wait() -> list[int]:
            handle.wait()
            largest, negated, *agreed = message[: len(numbers)].tolist()
            if largest != -negated:
                self._raise_other_topic()
            return agreed

        return wait

    def _raise_other_topic(self) -> NoReturn:
        topics = self.gather(self._topic)
        other = next(rank for rank, topic in enumerate(topics) if topic != topics[0])
        raise RuntimeError(
            f"ranks are at different points: rank 0 at {topics[0]}, rank {other} at {topics[other]}; construct, step and "
            "change optimizers in the same order on all ranks"
        )

    def is_same(self, value: object) -> bool:
        """Whether every rank gave the same value (by `repr`)."""
        mark = fingerprint(value)
        largest, smallest = self.maximum([mark, -mark])
        return largest == -smallest

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return gather_objects(value, self.group)

    def require_same(self, records: Sequence[str], explain: Callable[[str, int, str, int], str]) -> None:
        """Raise on every rank alike where the lists of records differ.

        Args:
            records: one line per thing that must be equal, in order.
            explain: (record here, its rank, the differing record, its rank) -> message; a missing record is "nothing".

        Raises:
            ValueError: on all ranks, about the first record in which some rank differs from rank 0.
        """
        if self.is_same(list(records)):
            return
        lists = self.gather(list(records))
        for index in range(max(map(len, lists))):
            line = [ranked[index] if index < len(ranked) else "nothing" for ranked in lists]
            for rank, record in enumerate(line):
                if record != line[0]:
                    raise ValueError(explain(line[0], 0, record, rank))

    def raise_fault(self, fault: str | None) -> NoReturn:
        """Raise the faults that ranks found, the same error on every rank; call it on all of them."""
        faults = {rank: text for rank, text in enumerate(self.gather(fault)) if text is not None}
        ranks = ", ".join(map(str, faults))
        raise RuntimeError(f"{next(iter(faults.values()))} (found on rank {ranks} of {self.size})")
