"""The few collectives the package uses, and what differs between backends. No other file calls torch.distributed ops.

Every data collective is asynchronous and works on flat tensors laid out as N shards, one per rank, of equal or unequal
sizes (`shard_numels`). It returns a `Pending`, whose `wait()` finishes it; the tensors it uses are held until then.

                       NCCL, equal shards         NCCL, unequal or low precision   gloo
    all_gather         all-gather in place        one broadcast per shard          one broadcast per shard
    reduce_scatter     reduce-scatter in place    all-to-all, ordered local sum    send/receive, ordered local sum

On gloo (torch 2.13, 2 ranks, 100 MB) send/receive took 29 ms, all-to-all 48 ms, broadcasts 32 ms, gloo's own
reduce-scatter and all-gather several times that. The ordered sum adds in rank order in fp32, divides once and casts
once, so a gradient does not depend on the algorithm of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from vescale_optim.sharding.buffer_pool import BufferPool

# torch 2.13 renamed the flat collectives and warns about the old names; torch 2.11 only has the old ones.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way: `wait()` once, then the result is in place.

    Args:
        works: handles of torch.distributed.
        held: tensors that must outlive the communication; freed memory would be reused while it is still read.
        finish: local work that completes the result, run by `wait()`.
        release: gives scratch memory back, run by `wait()` last.
        blocks_host: whether `wait()` stops this thread until peers have joined (gloo) or only orders streams (NCCL).
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        held: Sequence[Tensor] = (),
        finish: Callable[[], None] | None = None,
        *,
        release: Callable[[], None] | None = None,
        blocks_host: bool = True,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._held = list(held)
        self._finish = finish
        self._release = release
        self.blocks_host = blocks_host

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._held = []
        release, self._release = self._release, None
        if release is not None:
            release()

    def drop_result(self) -> None:
        """Leave out `finish`: the communication still has to be waited for, its result is not wanted any more."""
        self._finish = None


class GroupReference:
    """An attribute that is a process group, or None, for as long as torch holds the group.

    `destroy_process_group` ends the threads of a group when nobody else refers to it. Those of a group that we kept would
    live until the interpreter ends, and abort the process where they still have a tensor to free (torch 2.13, gloo).
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_reference_of_{name}"

    def __set__(self, instance: Any, group: ProcessGroup | None) -> None:
        instance.__dict__[self._name] = None if group is None else ref(group)

    def __get__(self, instance: Any, owner: type) -> ProcessGroup | None:
        reference = instance.__dict__[self._name]
        group = None if reference is None else reference()
        if reference is not None and group is None:
            raise RuntimeError("the process group was destroyed; construct what used it after init_process_group, again")
        return group


def is_host_backend(group: ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of `group` on `device` run on gloo, whose `wait()` blocks the host."""
    return "gloo" in str(group._get_backend(device).name()).lower()


def shard_slices(buffer: Tensor, shard_numels: Sequence[int]) -> list[Tensor]:
    """Views of the N shards of a flat buffer, in rank order."""
    starts = accumulate(shard_numels, initial=0)
    return [buffer[start : start + numel] for start, numel in zip(starts, shard_numels, strict=False)]


def all_gather(buffer: Tensor, shard_numels: Sequence[int], group: ProcessGroup) -> Pending:
    """Fill the flat `buffer` with every rank's shard, in place: this rank's shard already lies where it belongs."""
    if group.size() == 1:
        return Pending()
    shards = shard_slices(buffer, shard_numels)
    blocks_host = is_host_backend(group, buffer.device)
    if not blocks_host and len(set(shard_numels)) == 1:
        work = _all_gather_flat(buffer, shards[group.rank()], group=group, async_op=True)
        return Pending([work], [buffer], blocks_host=False)
    works = [
        dist.broadcast(shard, group=group, group_src=rank, async_op=True)
        for rank, shard in enumerate(shards)
        if shard.numel()
    ]
    return Pending(works, [buffer], blocks_host=blocks_host)


def reduce_scatter_mean(
    buffer: Tensor,
    shard_numels: Sequence[int],
    out: Tensor,
    group: ProcessGroup,
    pool: BufferPool,
    *,
    add: bool = False,
    is_divided: bool = False,
    tag: int = 0,
) -> Pending:
    """Mean over the ranks of this rank's shard of `buffer`, into `out` (added to it where `add`).

    The sum runs in fp32 (fp64 for fp64) in rank order, then one division, one cast; on NCCL an fp32 buffer of equal
    shards is summed in NCCL's order instead. Where `is_divided`, what `buffer` holds was divided by the number of ranks
    before (see `exact_factor`). `buffer` must not be touched before `wait()`; afterwards its own shard holds
    scratch values.
    On gloo, calls of different `tag` on one group may be launched in any order. Received copies lie in buffers of `pool`.
    """
    rank, size = group.rank(), group.size()
    divisor = 1 if is_divided else size
    shards = shard_slices(buffer, shard_numels)
    own = shards[rank]
    if size == 1:
        return Pending([], [buffer], lambda: _store_mean([own], out, add, divisor), blocks_host=False)
    if not is_host_backend(group, buffer.device) and buffer.dtype == torch.float32 and len(set(shard_numels)) == 1:
        work = _reduce_scatter_flat(own, buffer, op=ReduceOp.SUM, group=group, async_op=True)
        return Pending([work], [buffer], lambda: _store_quotient(own, divisor, out, add), blocks_host=False)
    if is_host_backend(group, buffer.device):
        # One copy can lie where the mean will be, this rank's own stays in `buffer`; the others need scratch.
        is_apart = out.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
        in_place = [(rank + 1) % size] if is_apart and out.dtype == buffer.dtype and not add else []
        others = [source for source in range(size) if source != rank and source not in in_place]
        received = pool.take(len(others) * own.numel(), buffer.dtype, buffer.device)
        places = dict(zip(others, shard_slices(received, [own.numel()] * len(others)), strict=True))
        places |= {rank: own, **dict.fromkeys(in_place, out)}
        parts = [places[source] for source in range(size)]
        works = _exchange_by_messages(shards, parts, group, tag)
    else:
        received = pool.take(size * own.numel(), buffer.dtype, buffer.device)
        parts = [received[source * own.numel() : (source + 1) * own.numel()] for source in range(size)]
        flat = received[: size * own.numel()]
        sizes = [own.numel()] * size
        works = [dist.all_to_all_single(flat, buffer, sizes, list(shard_numels), group=group, async_op=True)]
    return Pending(
        works,
        [buffer, received],
        lambda: _store_mean(parts, out, add, divisor),
        release=lambda: pool.give(received),
        blocks_host=is_host_backend(group, buffer.device),
    )


def _exchange_by_messages(
    shards: Sequence[Tensor], parts: Sequence[Tensor], group: ProcessGroup, tag: int
) -> list[Any]:
    """Send shard r to rank r, receive rank r's copy of this rank's shard into part r."""
    rank, size = group.rank(), group.size()
    works = []
    for step in range(1, size):
        # Each rank starts with another peer, so no rank is everybody's first.
        target, source = (rank + step) % size, (rank - step) % size
        if shards[target].numel():
            works.append(dist.isend(shards[target], group=group, group_dst=target, tag=tag))
        if parts[source].numel():
            works.append(dist.irecv(parts[source], group=group, group_src=source, tag=tag))
    return works


# Elements summed at a time on CPU: the sum, the division and the cast of a piece run in the last-level cache. Smaller
# pieces cost more in calls than they save (12.6 M elements: 35 ms in pieces of 2**13, 19 in 2**16, 12 in 2**20 and above).
CACHED_NUMEL = 1 << 20


def _store_mean(parts: Sequence[Tensor], out: Tensor, add: bool, divisor: int) -> None:
    """out (+)= sum of equally shaped parts / divisor: sum in list order in fp32 or wider, one division, one cast.

    One part may be `out` itself; the others are scratch.
    """
    step = CACHED_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        _store_mean_of_piece([part[start : start + step] for part in parts], out[start : start + step], add, divisor)


def _store_mean_of_piece(parts: Sequence[Tensor], out: Tensor, add: bool, divisor: int) -> None:
    wide = torch.promote_types(out.dtype, torch.float32)
    if out.dtype != wide or add:
        total, turn = parts[0].to(wide, copy=True), None
    elif parts[0].dtype != wide:
        total, turn = out.copy_(parts[0]), None
    else:
        # The running sum moves into `out` when it reaches the part that lies there, else with the last part.
        is_out = [part.data_ptr() == out.data_ptr() for part in parts]
        total, turn = parts[0], is_out.index(True) if any(is_out) else len(parts) - 1
    for position, part in enumerate(parts[1:], 1):
        total = torch.add(total, part, out=out if position == turn else total)
    _store_quotient(total, divisor, out, add)


def _store_quotient(total: Tensor, divisor: int, out: Tensor, add: bool) -> None:
    _divide(total, divisor)
    if add:
        # The cast comes before the addition: each round adds the gradient that a single reduction would have given.
        out.add_(total.to(out.dtype))
    elif total.data_ptr() != out.data_ptr():
        out.copy_(total)


def exact_factor(divisor: int, dtype: torch.dtype) -> float | None:
    """1 / divisor, where multiplying values by it before they are summed gives the same bits as dividing the sum.

    So for powers of two; not in fp16, whose small gradients would lose bits to its narrow range.
    """
    return 1 / divisor if divisor & (divisor - 1) == 0 and dtype != torch.float16 else None


def _divide(total: Tensor, divisor: int) -> None:
    if divisor == 1:
        return
    if divisor & (divisor - 1) == 0:
        total.mul_(1 / divisor)  # the same bits, and a multiplication is cheaper
    else:
        total.div_(divisor)


def all_reduce(
    tensor: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType = ReduceOp.SUM, *, async_op: bool = False
) -> Any:
    """All-reduce in place; returns torch's handle where `async_op`."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def all_reduce_mean(tensor: Tensor, group: ProcessGroup) -> Pending:
    """Mean over the ranks of the group, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(
        [work], [tensor], lambda: _divide(tensor, group.size()), blocks_host=is_host_backend(group, tensor.device)
    )


def broadcast(tensor: Tensor, group: ProcessGroup, *, source: int = 0) -> Pending:
    """Give every rank the tensor of rank `source` of the group, in place."""
    work = dist.broadcast(tensor, group=group, group_src=source, async_op=True)
    return Pending([work], [tensor], blocks_host=is_host_backend(group, tensor.device))


def all_to_all(
    send: Tensor,
    send_numels: Sequence[int],
    recv: Tensor,
    recv_numels: Sequence[int],
    group: ProcessGroup,
    *,
    tag: int = 0,
) -> Pending:
    """Send consecutive runs of the flat `send` to the ranks in order; what rank r sends here becomes run r of `recv`.

    Sizes are in elements, zero allowed. `send` and `recv` must not overlap (gloo, torch 2.13: wrong values), and neither
    may be touched before `wait()`. On gloo, calls of one tag match in the order in which they are made.
    """
    blocks_host = is_host_backend(group, send.device)
    if blocks_host:
        sends, receives = shard_slices(send, send_numels), shard_slices(recv, recv_numels)
        receives[group.rank()].copy_(sends[group.rank()])
        works = _exchange_by_messages(sends, receives, group, tag)
    else:
        out, what = recv[: sum(recv_numels)], send[: sum(send_numels)]
        works = [
            dist.all_to_all_single(out, what, list(recv_numels), list(send_numels), group=group, async_op=True)
        ]
    return Pending(works, [send, recv], blocks_host=blocks_host)


def in_sequence(first: Pending, start_second: Callable[[], Pending]) -> Pending:
    """`first`, then the collective that `start_second` launches on its result.

    On NCCL both are launched now: a stream of its own waits for the first, so neither this thread nor its stream does.
    On gloo the second starts in `wait()`, so all ranks must wait for such sequences in the same order.
    """
    if first.blocks_host:

        def finish() -> None:
            first.wait()
            start_second().wait()

        return Pending(finish=finish)
    with torch.cuda.stream(_sequence_stream(torch.cuda.current_device())):
        first.wait()
        second = start_second()
    return Pending([second], blocks_host=False)


@cache
def _sequence_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def all_to_all_uneven(
    send: Tensor, send_numels: Sequence[int], recv_numels: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send consecutive runs of the flat `send` to the ranks in order; returns what they sent here, in rank order."""
    received = send.new_empty(sum(recv_numels))
    dist.all_to_all_single(received, send.contiguous(), list(recv_numels), list(send_numels), group=group)
    return received


def all_gather_uneven(local: Tensor, numels: Sequence[int], group: ProcessGroup) -> Tensor:
    """Concatenation of every rank's flat tensor, `numels[r]` elements from rank r, on all ranks."""
    gathered = local.new_empty(sum(numels))
    shard_slices(gathered, numels)[group.rank()].copy_(local)
    all_gather(gathered, numels, group).wait()
    return gathered


def gather_objects(value: object, group: ProcessGroup) -> list[Any]:
    """Every rank's (picklable) value, in group-rank order, on all ranks."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def new_group_like(group: ProcessGroup, *, backend: str | None = None) -> ProcessGroup:
    """A further group over the ranks of `group`; only those ranks need to call."""
    return new_group_over(dist.get_process_group_ranks(group), [group], backend=backend)


def new_group_over(
    ranks: Sequence[int], along: Sequence[ProcessGroup], *, backend: str | None = None
) -> ProcessGroup:
    """A group over `ranks`, which the groups `along` connect: one, or one per axis of a mesh. Only those ranks call.

    torch (2.13) names such a group by how many groups the process has made so far, so ranks that are members of different
    numbers of groups (pipelines, experts, a logging group) would wait for each other under different names: the counts
    are brought to the same number while the group is made.
    """
    names = dist.distributed_c10d._world.pg_names
    device = torch.cuda.current_device() if dist.get_backend(along[0]) == "nccl" else "cpu"
    most = torch.tensor(len(names), device=device)
    for group in along:
        dist.all_reduce(most, ReduceOp.MAX, group=group)
    stand_ins = [object() for _ in range(int(most) - len(names))]
    names.update({stand_in: "" for stand_in in stand_ins})
    try:
        return dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    finally:
        for stand_in in stand_ins:
            del names[stand_in]


_control_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()
_tags: dict[str, Iterator[int]] = {}


def control_group(group: ProcessGroup) -> ProcessGroup:
    """The gloo group over the ranks of `group` on which optimizers agree; made once, since a group costs sockets.

    It is used outside of backward only, where all ranks run the same program.
    """
    known = _control_groups.get(group.group_name)
    if known is None or not is_alive(known):
        known = _control_groups[group.group_name] = new_group_like(group, backend="gloo")
    return known


def data_group(group: ProcessGroup, device_type: str) -> ProcessGroup:
    """A group for collectives launched inside backward: in the user's they could meet the user's own in another order.

    Tags keep the messages of several optimizers apart on gloo, where the control group serves all; on NCCL only the
    order counts, so each call gives a group of its own.
    """
    if is_host_backend(group, torch.device(device_type)):
        return control_group(group)
    return new_group_like(group)


_shared_data_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def shared_data_group(group: ProcessGroup, device_type: str) -> ProcessGroup:
    """`data_group`, one for all callers: they launch in one order, that of the modules."""
    known = _shared_data_groups.get(group.group_name)
    if known is None or not is_alive(known):
        known = _shared_data_groups[group.group_name] = data_group(group, device_type)
    return known


def new_tag(group: ProcessGroup) -> int:
    """A tag that no earlier call on this group gave; ranks that make the same calls get the same tags."""
    return next(_tags.setdefault(group.group_name, count(1)))


def is_alive(group: ProcessGroup) -> bool:
    """Whether torch still knows the group: `destroy_process_group` forgets all."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
