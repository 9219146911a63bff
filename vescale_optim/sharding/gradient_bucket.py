"""GradientBucket: the gradients of one bucket on their way from autograd to the shards.

    p.grad of this rank  ->  full (global buffer, local gradients)  ->  reduce-scatter  ->  shards (mean), seen through views
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vescale_optim.sharding.collectives import Pending, exact_factor
from vescale_optim.sharding.dbuffer import DBuffer
from vescale_optim.sharding.ragged import RaggedTensor


@dataclass(eq=False)
class GradientBucket:
    """The gradients of one bucket; the lists have one entry per parameter of its plan.

    Attributes:
        params, names: the parameters, and their names for messages.
        shards: mean gradients, this rank's shard.
        views: what `p.grad` becomes: RaggedTensors over `shards`.
        factor: what gradients are multiplied by on their way into `full`: 1 / ranks where that is exact, which saves a
            pass over the sum; else None.
        full: global buffer being filled by hooks; None while nothing arrived.
        in_flight: global buffer that a reduce-scatter is reading, with its handles in `pending`.
        is_launched: the bucket took part in the round of this flush-to-flush stretch.
        holds_sum: `shards` holds gradients to add to; else the next reduction overwrites them.
        adds: the reduction under way adds to them.
        written: `full` holds a gradient of the parameter.
        fired: its gradient finished in this backward.
        seen: it ever had a gradient, on any rank; None before the first one. Only those are waited for.
        present: it has a gradient since it was last cleared, on this rank; after a flush, on any rank.
        is_published: `p.grad` was set to its view, so that None there means that the user dropped it.
        dropped: the user dropped it while the reduce-scatter was under way.
    """

    params: list[nn.Parameter]
    names: list[str]
    shards: DBuffer
    views: list[RaggedTensor]
    full: Tensor | None = None
    in_flight: Tensor | None = None
    pending: list[Pending] = field(default_factory=list)
    is_launched: bool = False
    holds_sum: bool = False
    adds: bool = False
    seen: list[bool] | None = None
    factor: float | None = field(init=False)
    written: list[bool] = field(init=False)
    fired: list[bool] = field(init=False)
    present: list[bool] = field(init=False)
    is_published: list[bool] = field(init=False)
    dropped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        count = len(self.params)
        self.factor = exact_factor(self.shards.group.size(), self.shards.dtype)
        self.written, self.fired, self.present, self.is_published = ([False] * count for _ in range(4))

    def add(self, view: Tensor, grad: Tensor) -> None:
        """Add a local gradient to its view of `full`."""
        view.add_(grad, alpha=1 if self.factor is None else self.factor)

    def put(self, view: Tensor, grad: Tensor) -> None:
        """Write a local gradient into its view of `full`, as its first one."""
        if self.factor is None or grad.dtype != view.dtype:
            view.copy_(grad)
            if self.factor is not None:
                view.mul_(self.factor)
        else:
            torch.mul(grad, self.factor, out=view)

    def is_complete(self) -> bool:
        """Whether every gradient that can be expected in this backward has come."""
        seen = self.seen or [True] * len(self.params)
        return all(fired or not expected for fired, expected in zip(self.fired, seen, strict=True))
