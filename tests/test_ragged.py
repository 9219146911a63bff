"""RaggedTensor: ranks hold flat, unequal ranges of a tensor, and everything a training loop does to it stays exact.

The expected value is always the same operation on the plain full tensor. Ranks with nothing (0 elements) are in nearly
every case: they are what breaks reductions, checkpoints and lists.
"""

import copy
import functools
import io
import itertools
import math
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.support.ranks import run_ranks
from vescale_optim.sharding import collectives, ragged_torch_2_11
from vescale_optim.sharding.ragged import RaggedShard, RaggedTensor, ReducedScalar
from vescale_optim.sharding.ragged_checkpoint import flat_range_boxes

SHAPES = [(10, 7), (3, 4, 5), (9,), (1, 1), (), (2, 0, 3)]


def shares(shape, num_ranks, kind="uneven"):
    """Elements per rank: cut inside rows, and with a rank that holds nothing where there are three or more."""
    numel = math.prod(shape)
    if kind == "last only":
        return [0] * (num_ranks - 1) + [numel]
    if kind == "even":
        return [numel // num_ranks + (rank < numel % num_ranks) for rank in range(num_ranks)]
    numels = [numel * (rank % 3 == 0) * 2 // 5 for rank in range(num_ranks)]
    return [*numels[:-1], numel - sum(numels[:-1])]


def ragged(full, mesh, kind="uneven", **kwargs):
    numels = shares(full.shape, mesh.size(mesh.ndim - 1), kind)
    placements = [Replicate()] * (mesh.ndim - 1) + [RaggedShard.from_numels(full.shape, numels)]
    rank = mesh.get_local_rank(mesh.ndim - 1)
    start = sum(numels[:rank])
    local = full.detach().reshape(-1)[start : start + numels[rank]].clone()
    return RaggedTensor.from_local(local, mesh, placements, full.shape, **kwargs)


def same(result, expected, rtol=0.0):
    """Whether a RaggedTensor holds the plain tensor, exactly unless told otherwise."""
    assert type(result) is RaggedTensor and result.to_local().dim() == 1
    assert result.shape == expected.shape and result.dtype == expected.dtype and result.stride() == expected.stride()
    torch.testing.assert_close(result.full_tensor(), expected, rtol=rtol, atol=rtol, equal_nan=True)
    return True


class count_all_reduces:
    """Counts the package's all-reduces on this rank."""

    def __enter__(self):
        self.count, self.original = 0, collectives.all_reduce

        def counted(*args, **kwargs):
            self.count += 1
            return self.original(*args, **kwargs)

        collectives.all_reduce = counted
        return self

    def __exit__(self, *error):
        collectives.all_reduce = self.original


# The placement.


@pytest.mark.parametrize(
    ("placement", "shape", "numels"),
    [
        (RaggedShard((0,), (2, 0, 1)), (6, 4), (16, 0, 8)),
        (RaggedShard((0, 1), (5, 1)), (3, 4), (10, 2)),
        (RaggedShard((), (0, 1, 0)), (3, 4), (0, 12, 0)),
        (RaggedShard((), (0, 1)), (), (0, 1)),
        (RaggedShard((0,), (1, 3)), (0, 4), (0, 0)),
        (RaggedShard((0, 1), (0, 0)), (0, 4), (0, 0)),
    ],
)
def test_local_units_are_contiguous_ranges(placement, shape, numels):
    assert placement.numels(shape) == numels
    ranges = [placement.range(shape, rank) for rank in range(len(numels))]
    assert [stop - start for start, stop in ranges] == list(numels)
    assert ranges[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_any_cut_of_a_tensor_is_a_placement(shape, data):
    numel = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    numels = tuple(b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True))
    assert RaggedShard.from_numels(shape, numels).numels(shape) == numels


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedShard((1,), (1, 1)), "prefix"),
        (lambda: RaggedShard((0, 2), (1, 1)), "prefix"),
        (lambda: RaggedShard((0,), (1, -1)), ">= 0"),
        (lambda: RaggedShard((0,), ()), "one number"),
        (lambda: RaggedShard((), (1, 1)), "one rank"),
        (lambda: RaggedShard((0,), (1, 2)).numels((4, 4)), "16 elements, into 3 units"),
        (lambda: RaggedShard((0,), (0, 0)).numels((4,)), "into 0 units"),
        (lambda: RaggedShard((0, 1), (1, 1)).numels((4,)), "shards 2 dims"),
        (lambda: RaggedShard.from_numels((3, 3), (4, 4)), "sum to 8"),
    ],
)
def test_placements_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_placement_is_a_value():
    placement = RaggedShard([0, 1], [3, 0, 2])
    assert placement == RaggedShard((0, 1), (3, 0, 2)) != RaggedShard((0,), (3, 0, 2))
    assert placement != Shard(0) and len({placement, RaggedShard((0, 1), (3, 0, 2))}) == 1
    assert pickle.loads(pickle.dumps(placement)) == copy.deepcopy(placement) == eval(repr(placement)) == placement
    assert not (placement.is_shard() or placement.is_replicate() or placement.is_partial())
    with pytest.raises(AttributeError):
        placement.dims = (0,)


# A flat range as boxes.


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (4, 1), (2, 3, 2), (1, 3, 4), (2, 2, 3, 2), (3, 1, 2, 2)])
def test_boxes_cover_every_flat_range_in_memory_order(shape):
    numel = math.prod(shape)
    index = torch.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = flat_range_boxes(shape, start, stop)
            covered = []
            for box in boxes:
                part = index[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
                assert tuple(part.shape) == box.sizes and part.numel() == box.stop - box.start > 0
                assert box.start == len(covered)
                covered += part.reshape(-1).tolist()
            assert covered == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.data())
def test_boxes_of_large_tensors_have_the_right_volume(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = flat_range_boxes(shape, start, stop)
    assert sum(math.prod(box.sizes) for box in boxes) == stop - start
    assert len({box.offsets for box in boxes}) == len(boxes) <= 2 * len(shape) - 1


# Making, gathering, moving.


def gather_and_view(rank, world_size, mesh):
    for shape in SHAPES:
        for kind in ("uneven", "even", "last only"):
            full = torch.randn(shape)
            x = ragged(full, mesh, kind)
            assert same(x, full) and isinstance(x, DTensor) and x.device_mesh == mesh
            # The local tensor is a view: writes through either side are seen by the other.
            local = x.to_local()
            local.add_(1)
            x.mul_(2)
            assert same(x, (full + 1) * 2) and x.to_local().data_ptr() == local.data_ptr()


def test_full_tensor_puts_the_flat_ranges_together():
    run_ranks(3, gather_and_view)
    run_ranks(1, gather_and_view)


def refuse_bad_locals(rank, world_size, mesh):
    placement = RaggedShard.from_numels((2, 3), shares((2, 3), world_size))
    numel = placement.numels((2, 3))[rank]
    for local, placements, message in [
        (torch.zeros(numel + 1), placement, "holds"),
        (torch.zeros(1, numel), placement, "flat"),
        (torch.zeros(2 * numel + 2)[::2][:numel] if numel > 1 else torch.zeros(7), placement, "contiguous"),
        (torch.zeros(numel, requires_grad=True), placement, "detach"),
        (torch.zeros(numel), [placement, Replicate()], "one placement per axis"),
        (torch.zeros(numel), Shard(0), "one RaggedShard"),
        (torch.zeros(numel), RaggedShard((0,), (1,) * (world_size + 1)), "mesh axis 0 has"),
    ]:
        with pytest.raises(ValueError, match=message):
            RaggedTensor.from_local(local, mesh, placements, (2, 3))


def test_a_local_tensor_that_does_not_fit_is_refused():
    run_ranks(3, refuse_bad_locals)


def move_between_placements(rank, world_size, mesh):
    draw = random.Random(1)
    for shape in [*SHAPES, (8, 3), (2, 6), (0, 4)]:
        numel, full = math.prod(shape), torch.randn(shape)

        def cut(numel=numel, shape=shape):
            cuts = sorted(draw.randint(0, numel) for _ in range(world_size - 1))
            numels = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]
            return RaggedShard.from_numels(shape, numels)

        root = RaggedShard((), tuple(int(r == 1) for r in range(world_size)))
        targets = [cut() for _ in range(4)] + [root, Replicate()] + [Shard(dim) for dim in range(len(shape))]
        for target in targets:
            x = RaggedTensor.distribute(full if rank == 0 else torch.zeros(shape), mesh, cut())
            moved = x.redistribute(placements=[target])
            assert moved.placements == (target,)
            torch.testing.assert_close(moved.full_tensor(), full, rtol=0, atol=0)
            if isinstance(target, RaggedShard):
                assert type(moved) is RaggedTensor and moved.to_local().numel() == target.numels(shape)[rank]
            else:
                assert type(moved) is DTensor
                expected = distribute_tensor(full, mesh, [target], src_data_rank=None)
                assert moved.to_local().shape == expected.to_local().shape and moved.stride() == expected.stride()
            back = RaggedTensor.distribute(moved, mesh, x.placements)
            copied = not back.to_local().numel() or back.to_local().data_ptr() != moved.to_local().data_ptr()
            assert same(back, full) and copied
        again = x.redistribute(placements=x.placements)
        assert again.to_local().data_ptr() == x.to_local().data_ptr()  # nothing moves, nothing is copied
    partial = DTensor.from_local(torch.full((4,), 1.0 + rank), mesh, [Partial()], run_check=False)
    total = torch.full((4,), sum(1.0 + r for r in range(world_size)))
    assert same(RaggedTensor.distribute(partial, mesh, RaggedShard.from_numels((4,), shares((4,), world_size))), total)
    assert x.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="one placement for each"):
        x.redistribute(placements=[Replicate(), Replicate()])


def test_redistribution_reaches_every_placement_and_returns():
    run_ranks(3, move_between_placements)


def shard_over_one_of_two_axes(rank, world_size, mesh):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.randn(5, 3)
    source = full if rank == 0 else torch.zeros(5, 3)
    first, second = RaggedShard.from_numels((5, 3), (4, 11)), RaggedShard.from_numels((5, 3), (15, 0))
    x = RaggedTensor.distribute(source, mesh, [Replicate(), first])
    assert same(x, full) and x.to_local().numel() == (4, 11)[rank % 2]
    y = x.redistribute(placements=[second, Replicate()])
    assert same(y, full) and y.to_local().numel() == (15, 0)[rank // 2]
    for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Shard(1), Shard(0)]):
        z = x.redistribute(placements=placements)
        torch.testing.assert_close(z.full_tensor(), full, rtol=0, atol=0)
        assert same(RaggedTensor.distribute(z, mesh, [Replicate(), second]), full)
    torch.testing.assert_close(x.norm().full_tensor(), full.norm())
    torch.testing.assert_close(y.sum().full_tensor(), full.sum())
    assert x.norm().placements[0] == Replicate()


def test_a_mesh_may_replicate_over_its_other_axes():
    run_ranks(4, shard_over_one_of_two_axes)


# Pointwise ops.

POINTWISE = [
    lambda x, y, s: x + y,
    lambda x, y, s: x - 2 * y,
    lambda x, y, s: 3.0 - x,
    lambda x, y, s: x * s,
    lambda x, y, s: s * x,
    lambda x, y, s: x / (y.abs() + 1),
    lambda x, y, s: x**2 + x.pow(3) + 2**x,
    lambda x, y, s: torch.add(x, y, alpha=0.3),
    lambda x, y, s: torch.addcmul(x, y, y, value=0.5),
    lambda x, y, s: torch.addcdiv(x, y, y.abs() + 1, value=-0.1),
    lambda x, y, s: x.lerp(y, 0.1).lerp(y, s),
    lambda x, y, s: x.clamp(-0.5, 0.5).clamp(min=s),
    lambda x, y, s: torch.maximum(x, y) - torch.max(x, y) + torch.fmin(x, y),
    lambda x, y, s: torch.where(x > y, x, y),
    lambda x, y, s: torch.where(x > 0, x, s),
    lambda x, y, s: x.masked_fill(y > 0, 2.0).masked_fill(y < -1, s),
    lambda x, y, s: (x == y) | ~(x != 0) & (x <= y) ^ (x >= s),
    lambda x, y, s: x.isnan() | x.isinf() | ~x.isfinite(),
    lambda x, y, s: torch.isclose(x, y, atol=0.1),
    lambda x, y, s: x.abs().sqrt() + x.exp() + x.sign() + x.neg() + x.square() + x.sigmoid() + x.tanh().relu(),
    lambda x, y, s: x.nan_to_num() + x.round() + x.floor() + x.reciprocal().trunc(),
    lambda x, y, s: x.bfloat16() * 2,
    lambda x, y, s: x.to(torch.float64).float().int() % 3,
    lambda x, y, s: x.clone().add_(y, alpha=2).mul_(s).sub_(1).div_(3).clamp_(-1, 1),
    lambda x, y, s: x.clone().lerp_(y, 0.2).addcmul_(y, y).addcdiv_(y, y.exp()).abs_().sqrt_().neg_(),
    lambda x, y, s: x.clone().copy_(y),
    lambda x, y, s: x.clone().copy_(y.bfloat16()),
    lambda x, y, s: x.clone().copy_(s),
    lambda x, y, s: x.clone().fill_(3).masked_fill_(y > 0, s),
    lambda x, y, s: x.clone().zero_(),
    lambda x, y, s: torch.add(x, y, out=torch.empty_like(x)),
    lambda x, y, s: torch.zeros_like(x) + torch.ones_like(x, dtype=torch.int32) + torch.full_like(x, 2.5),
    lambda x, y, s: x.new_zeros(x.shape) + x.new_ones(x.shape) + x.new_full(x.shape, 3) + x.new_empty(x.shape).zero_(),
    lambda x, y, s: x.detach() + x.data + x.view(x.shape) + x.expand(x.shape) + x.contiguous(),
    lambda x, y, s: torch.frexp(x)[0],
]


def apply_pointwise(rank, world_size, mesh):
    scalar = torch.tensor(0.7)
    replicated = DTensor.from_local(scalar, mesh, [Replicate()], run_check=False)
    pending = ragged(torch.tensor([0.7, 0.0, 0.0, 0.0]), mesh).sum()
    for shape in SHAPES:
        full, other = torch.randn(shape), torch.randn(shape)
        x, y = ragged(full, mesh), ragged(other, mesh)
        for number, op in enumerate(POINTWISE):
            expected = op(full, other, scalar)
            for s in (scalar, replicated, pending):
                # Vectorised exp and the like differ in the last bit from the scalar code for the rest of a row.
                assert same(op(x, y, s), expected, rtol=1e-6), number
        # A replicated DTensor is known to be equal everywhere, so its range is taken.
        assert same(x + DTensor.from_local(other, mesh, [Replicate()], run_check=False), full + other)
        same_ranges = RaggedTensor.from_local(
            y.to_local(), mesh, RaggedShard.from_numels(shape, shares(shape, world_size)), shape
        )
        assert same(x * same_ranges, full * other)
        assert x.mul_(2) is x and same(x, full * 2)


def test_pointwise_ops_equal_those_on_the_full_tensor():
    run_ranks(3, apply_pointwise)


FOREACH = [
    lambda xs, ys, s: torch._foreach_add(xs, ys),
    lambda xs, ys, s: torch._foreach_add(xs, ys, alpha=0.5),
    lambda xs, ys, s: torch._foreach_mul(xs, 0.5),
    lambda xs, ys, s: torch._foreach_mul(xs, s),
    lambda xs, ys, s: torch._foreach_sub(xs, [0.5] * len(xs)),
    lambda xs, ys, s: torch._foreach_abs(xs),
    lambda xs, ys, s: torch._foreach_maximum(xs, ys),
    lambda xs, ys, s: torch._foreach_lerp(xs, ys, 0.1),
    lambda xs, ys, s: torch._foreach_addcdiv(xs, ys, torch._foreach_exp(ys), value=0.1),
    lambda xs, ys, s: torch._foreach_addcmul(xs, ys, ys, torch.arange(float(len(xs)))),
    lambda xs, ys, s: (torch._foreach_mul_(xs, s), torch._foreach_add_(xs, ys, alpha=2), xs)[-1],
    lambda xs, ys, s: (torch._foreach_copy_(xs, ys), torch._foreach_sqrt_(torch._foreach_abs(xs)), xs)[-1],
    lambda xs, ys, s: (torch._foreach_zero_(xs), xs)[-1],
]


def apply_foreach(rank, world_size, mesh):
    scalar = torch.tensor(0.7)
    for op in FOREACH:
        full, other = [torch.randn(shape) for shape in SHAPES], [torch.randn(shape) for shape in SHAPES]
        xs, ys = [ragged(t, mesh) for t in full], [ragged(t, mesh) for t in other]
        plain = torch.randn(3)  # a plain parameter may stand between ragged ones
        results = op([*xs, plain.clone()], [*ys, plain], scalar)
        expected = op([*full, plain.clone()], [*other, plain], scalar)
        assert all(same(a, b, rtol=1e-6) for a, b in zip(results[:-1], expected[:-1], strict=True))
        assert type(results[-1]) is torch.Tensor and torch.equal(results[-1], expected[-1])
    with pytest.raises(ValueError, match="met a Tensor"):
        torch._foreach_add(xs, [y.to_local() for y in ys])
    norms = torch._foreach_norm([x for x in xs if x.numel()], math.inf)
    assert all(isinstance(norm, ReducedScalar) for norm in norms)


def test_foreach_ops_equal_those_on_full_tensors():
    run_ranks(3, apply_foreach)


def train_ragged_parameters(rank, world_size, mesh):
    grads = [[torch.randn(shape) for shape in SHAPES] for _ in range(3)]
    start = [torch.randn(shape) for shape in SHAPES]
    for make in [
        lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True, amsgrad=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
        lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1, foreach=True),
    ]:
        plain = [torch.nn.Parameter(t.clone()) for t in start]
        sharded = [torch.nn.Parameter(ragged(t, mesh)) for t in start]
        assert all(type(p) is RaggedTensor and isinstance(p, torch.nn.Parameter) for p in sharded)
        expected, optimizer = make(plain), make(sharded)
        for step in grads:
            for p, q, g in zip(plain, sharded, step, strict=True):
                p.grad, q.grad = g.clone(), ragged(g, mesh)
            expected.step()
            optimizer.step()
        for p, q in zip(plain, sharded, strict=True):
            torch.testing.assert_close(q.full_tensor(), p.data, rtol=1e-6, atol=1e-7)
        state = optimizer.state_dict()["state"]
        assert any(type(value) is RaggedTensor for value in state[0].values())


def test_stock_optimizers_update_ragged_parameters():
    run_ranks(3, train_ragged_parameters)


def refuse_everything_else(rank, world_size, mesh):
    full = torch.randn(6, 4)
    x = ragged(full, mesh)
    local = x.to_local()
    for op in [  # a plain operand, whatever its shape
        lambda: x + full,
        lambda: x + local,
        lambda: local + x,
        lambda: x.copy_(full),
        lambda: x.copy_(local),
        lambda: x.add_(torch.zeros(1)),
        lambda: torch.where(full > 0, x, x),
        lambda: torch.equal(x, full),
        lambda: full.clone().copy_(x),
        lambda: full.clone().add_(x),
        lambda: torch._foreach_add_([full.clone()], [x]),
        lambda: torch._foreach_add_([torch.tensor(1.0)], [ragged(torch.tensor(1.0), mesh)]),
        lambda: x + distribute_tensor(full, mesh, [Shard(0)]),
        lambda: x + ragged(full, mesh, "last only"),
        lambda: x.mul_(ragged(full.t().contiguous(), mesh)),
        lambda: x.add_(ragged(torch.tensor(1.0), mesh)),
    ]:
        with pytest.raises(ValueError, match=r"full_tensor|redistribute"):
            op()
    # A bias of which this rank holds everything: the local shape is the global one, and DDP would copy its bucket in.
    bias = ragged(torch.zeros(5), mesh, "last only")
    with pytest.raises(ValueError, match="met a Tensor"):
        bias.copy_(torch.ones(5))
    assert same(bias, torch.zeros(5))
    for op, name in [
        (lambda: x.view(-1), "view"),
        (lambda: x.flatten(), "view"),
        (lambda: x.t(), "aten.t"),
        (lambda: x[0], "select"),
        (lambda: x @ x.t(), "aten.t"),
        (lambda: x.sum(dim=0), "aten.sum.dim_IntList"),
        (lambda: x.sum(dim=(0, 1), keepdim=True), "aten.sum.dim_IntList"),
        (lambda: x.norm(dim=1), "linalg_vector_norm"),
        (lambda: x.max(dim=0), "aten.max.dim"),
        (lambda: x.std(), "std"),
        (lambda: x.argmax(), "argmax"),
        (lambda: x.cumsum(0), "cumsum"),
        (lambda: x.sort(), "sort"),
        (lambda: torch.rand_like(x), "rand_like"),
        (lambda: torch.cat([x, x]), "cat"),
        (lambda: list(x), "unbind"),
        (lambda: x.numpy(), "numpy"),
        (lambda: x.tolist(), "tolist"),
    ]:
        with pytest.raises(NotImplementedError, match=rf"{name}.*full_tensor"):
            op()
    assert same(x, full)


def test_plain_operands_and_unknown_ops_raise_and_name_the_way_out():
    run_ranks(3, refuse_everything_else)


# Reductions.

REDUCTIONS = [
    *[lambda x, p=p: x.norm(p) for p in (1, 2, 3, 0.5, 0, math.inf, -math.inf, -1)],
    lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    lambda x: torch._foreach_norm([x, x], 3)[1],
    lambda x: torch._foreach_norm([x])[0],
    torch.sum,
    torch.mean,
    torch.prod,
    torch.nansum,
    torch.max,
    torch.min,
    lambda x: x.amax(),
    lambda x: x.amin(dim=tuple(range(x.dim()))),
    lambda x: x.sum(dim=list(range(x.dim()))),
    lambda x: x.mean(dtype=torch.float64),
    lambda x: x.int().sum(),
    lambda x: x.int().max(),
    lambda x: x.int().min(),
    lambda x: torch.count_nonzero(x > 0),
    lambda x: (x > 1).any(),
    lambda x: (x > -9).all(),
    lambda x: (x > 0).all(),
    lambda x: (x > 0).max(),
    lambda x: x.isnan().sum(),
]


def reduce_everything(rank, world_size, mesh):
    for shape in [(10, 7), (3, 4, 5), (2,), (1, 1), ()]:
        for special in (None, math.nan, math.inf):
            full = torch.randn(shape)
            if special is not None:
                full.view(-1)[-1] = special
            for kind in ("uneven", "last only"):
                x = ragged(full, mesh, kind)
                for number, op in enumerate(REDUCTIONS):
                    result, expected = op(x), op(full)
                    assert type(result) is ReducedScalar and result.shape == () and result.dtype == expected.dtype, number
                    torch.testing.assert_close(
                        result.full_tensor(), expected, equal_nan=True, msg=lambda m, n=number: f"{n} {m}"
                    )
    empty = ragged(torch.zeros(0, 4), mesh)
    assert float(empty.sum()) == 0 and float(empty.norm()) == 0 and math.isnan(float(empty.mean()))
    with pytest.raises((IndexError, RuntimeError)):
        empty.max()
    assert ragged(torch.tensor(3.5), mesh).item() == 3.5 and int(ragged(torch.tensor([[7]]), mesh)) == 7


def test_reductions_equal_those_on_the_full_tensor():
    run_ranks(3, reduce_everything)


def read_scalars(rank, world_size, mesh):
    full = torch.arange(1.0, 10.0)
    total = 45.0
    make = ragged(full, mesh).sum
    assert float(make()) == make().item() == total and int(make()) == 45 and bool(make() - 45) is False
    assert f"{make():.2f}" == "45.00" and make().tolist() == total and make().numpy() == total
    assert make() > 44.9 and torch.isfinite(make()) and (make() == total) and not make().isnan()
    assert make().cpu().item() == make().double().item() == make().clone().item() == make().detach().item() == total
    assert make().full_tensor() == make().to_local() == total and type(make().full_tensor()) is torch.Tensor
    assert make().redistribute(placements=[Replicate()]).placements == (Replicate(),)
    scalar = make()
    assert scalar.placements[0].is_partial() and "pending" in repr(scalar) and scalar.shape == ()
    scalar += 1
    assert scalar == total + 1 and type(scalar + 1) is torch.Tensor
    with count_all_reduces() as counted:
        scalar = make()
        assert [float(scalar), scalar.item(), float(scalar * 2)] == [total, total, 2 * total]
        assert counted.count == (world_size > 1) and "45" in repr(scalar) and scalar.placements == (Replicate(),)
        stack = torch.stack([make() for _ in range(20)])
        assert type(stack) is ReducedScalar and stack.tolist() == [total] * 20
        mixed = torch.stack([ragged(full, mesh).norm(), make(), ragged(full, mesh).max()])
        torch.testing.assert_close(mixed.full_tensor(), torch.tensor([full.norm(), total, 9.0]))
    assert counted.count == 5 * (world_size > 1)
    with pytest.raises(ValueError, match="mixes"):
        torch.stack([make(), torch.tensor(1.0)])
    for clone in (pickle.loads(pickle.dumps(make())), copy.deepcopy(make())):
        assert type(clone) is torch.Tensor and clone == total
    # Half precision: 300² is beyond float16, and the mean's sum too.
    half = torch.full((40, 40), 300.0, dtype=torch.float16)
    assert ragged(half[:1, :2], mesh).norm().item() == half[:1, :2].float().norm().half().item()
    assert ragged(half, mesh).mean().item() == 300.0
    # The parts 256, 1, 1 are added before they are rounded to bfloat16, whose neighbours are 256 and 258 here.
    assert ragged(torch.tensor([256.0, 1, 1], dtype=torch.bfloat16), mesh, "even").sum().item() == 258


def test_a_scalar_is_complete_however_it_is_read():
    run_ranks(3, read_scalars)
    run_ranks(1, read_scalars)


# Clipping and scaling.


def parameters_with_gradients(mesh, dtype=torch.float32):
    """(plain parameters with plain gradients, plain parameters with RaggedTensor gradients)"""
    grads = [3 * torch.randn(shape).to(dtype) for shape in SHAPES if math.prod(shape)]
    plain = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    sharded = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for i, (p, q, g) in enumerate(zip(plain, sharded, grads, strict=True)):
        p.grad, q.grad = g.clone(), ragged(g, mesh, ("uneven", "even", "last only")[i % 3])
    return plain, sharded


def clip(rank, world_size, mesh):
    for foreach in (None, True, False):
        for norm_type in (2.0, 1.0, 3.0, math.inf, 0.0):
            plain, sharded = parameters_with_gradients(mesh)
            expected = torch.nn.utils.clip_grad_norm_(plain, 1.5, norm_type)
            with count_all_reduces() as counted:
                total = torch.nn.utils.clip_grad_norm_(sharded, 1.5, norm_type, foreach=foreach, error_if_nonfinite=True)
            if norm_type:
                assert counted.count == (world_size > 1)  # for all parameters together
            torch.testing.assert_close(total.full_tensor(), expected)
            assert isinstance(total, DTensor)
            for p, q in zip(plain, sharded, strict=True):
                assert type(q.grad) is RaggedTensor
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    plain, sharded = parameters_with_gradients(mesh)
    torch.nn.utils.clip_grad_value_(sharded, 0.5)
    torch.nn.utils.clip_grad_value_(plain, 0.5)
    assert all(same(q.grad, p.grad) for p, q in zip(plain, sharded, strict=True))
    total = torch.nn.utils.get_total_norm([p.grad for p in sharded], foreach=True)
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain])
    torch.testing.assert_close(total.full_tensor(), expected)
    torch.nn.utils.clip_grads_with_norm_(sharded, 0.1, total)
    torch.nn.utils.clip_grads_with_norm_(plain, 0.1, expected)
    for p, q in zip(plain, sharded, strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    # float16: each rank's norm fits, its square does not.
    plain, sharded = parameters_with_gradients(mesh, torch.float16)
    for p in (*plain, *sharded):
        p.grad.mul_(100)
    total, expected = (torch.nn.utils.clip_grad_norm_(ps, 1.0) for ps in (sharded, plain))
    assert math.isfinite(float(total)) and abs(float(total) / float(expected) - 1) < 0.01
    # NaN on one rank is everybody's NaN, in every norm.
    for norm_type in (2.0, math.inf):
        _, sharded = parameters_with_gradients(mesh)
        if sharded[0].grad.to_local().numel() and rank == 0:
            sharded[0].grad.to_local()[0] = math.nan
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(sharded, 1.0, norm_type, error_if_nonfinite=True)


def test_clipping_sees_the_global_norm():
    run_ranks(3, clip)
    run_ranks(1, clip)


def scale(rank, world_size, mesh):
    for bad_rank in (None, 0, world_size - 1):
        params = [
            torch.nn.Parameter(ragged(torch.ones(4, 5), mesh)),
            torch.nn.Parameter(ragged(torch.ones(3), mesh, "last only")),
        ]
        optimizer = torch.optim.SGD(params, lr=1.0, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        scaler.scale(torch.tensor(1.0))
        for p in params:
            p.grad = torch.full_like(p, 8.0)
            if rank == bad_rank and p.to_local().numel():
                p.grad.to_local()[-1] = math.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        skipped = bad_rank is not None
        assert scaler.get_scale() == (4.0 if skipped else 8.0)
        assert all(same(p.detach(), torch.full(p.shape, 1.0 if skipped else 0.0)) for p in params)
    # The parameters may be plain, and the gradients of several dtypes.
    _, sharded = parameters_with_gradients(mesh)
    sharded += parameters_with_gradients(mesh, torch.bfloat16)[1]
    for p in sharded:
        p.grad.fill_(4.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.tensor(1.0))
    scaler.unscale_(torch.optim.SGD(sharded))
    assert all(same(p.grad, torch.full_like(p.detach(), 2.0)) for p in sharded)


def test_infinite_gradients_on_one_rank_are_seen_by_all():
    run_ranks(3, scale)


def compare(rank, world_size, mesh):
    full = torch.randn(10, 7)
    x, y = ragged(full, mesh), ragged(full, mesh)
    assert torch.equal(x, y) is True and torch.allclose(x, y) is True and bool((x == y).all())
    if rank == 0:
        y.to_local()[3] += 1
    assert torch.equal(x, y) is False and torch.allclose(x, y) is False and not bool((x == y).all())
    assert torch.equal(x, ragged(full[:5].contiguous(), mesh)) is False
    # An equal mesh, made anew, is another object with groups of its own.
    twin = ragged(full, init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",)))
    assert twin.device_mesh is not mesh and torch.equal(x, twin) and same(x + twin, 2 * full)


def test_tensors_are_equal_only_if_they_are_on_all_ranks():
    run_ranks(3, compare)


# What happens before a read.


class Wait:
    """A hook that fills the tensor when it is called, reading it on the way, as a flush of pending gradients does."""

    def __init__(self):
        self.calls, self.tensors = 0, []

    def __call__(self):
        self.calls += 1
        for tensor in self.tensors:
            tensor.to_local().fill_(5.0)  # reads the tensor from within its own hook

    def __reduce__(self):
        raise AssertionError("a hook was pickled or copied")


def wait_before_reading(rank, world_size, mesh):
    def pending():
        wait = Wait()
        x = ragged(torch.zeros(6, 3), mesh, before_read=wait)
        wait.tensors = [x]
        return x, wait

    x, wait = pending()
    p = torch.nn.Parameter(torch.zeros(6, 3))
    p.grad = x
    assert (x.shape, x.dtype, x.device.type, x.numel(), x.dim(), x.stride()) == ((6, 3), torch.float32, "cpu", 18, 2, (3, 1))
    assert len(x.placements) == 1 and x.device_mesh == mesh and x.is_floating_point() and p.grad is x and not x.requires_grad
    assert "<not read yet>" in repr(x) and x.before_read is wait
    aliases = [x.detach(), x.data, x.view(6, 3), p.grad]
    zeros = torch.zeros_like(x) + x.new_zeros(6, 3)
    assert wait.calls == 0
    assert same(zeros, torch.zeros(6, 3)) and zeros.before_read is None and wait.calls == 0
    for alias in aliases:
        before = wait.calls
        assert same(alias, torch.full((6, 3), 5.0)) and wait.calls > before

    other = ragged(torch.ones(6, 3), mesh)
    for number, read in enumerate(
        [
            lambda x: x + 1,
            lambda x: other + x,
            lambda x: other.copy_(x),
            lambda x: x.zero_(),
            lambda x: x.to_local(),
            lambda x: x.full_tensor(),
            lambda x: x.redistribute(placements=x.placements),
            lambda x: RaggedTensor.distribute(x, mesh, x.placements),
            lambda x: x.norm(),
            lambda x: torch._foreach_norm([other, x]),
            lambda x: torch._foreach_mul_([x], 2.0),
            lambda x: torch._amp_foreach_non_finite_check_and_unscale_([x], torch.zeros(()), torch.ones(())),
            lambda x: torch.equal(x, other),
            lambda x: x.clone(),
            lambda x: x.bfloat16(),
            lambda x: copy.deepcopy(x),
            lambda x: pickle.dumps(x),
            lambda x: torch.save(x, io.BytesIO()),
            lambda x: x.__create_write_items__("x", x),
            lambda x: (
                [x.__get_tensor_shard__(item.index) for item in other.__create_write_items__("x", other)] or x.to_local()
            ),
            lambda x: x.share_memory_(),
        ]
    ):
        x, wait = pending()
        result = read(x)
        assert wait.calls > 0, number
        if type(result) is RaggedTensor and result is not x and number != 6:
            assert result.before_read is None, number
    x, wait = pending()
    x.before_read = None
    assert same(x, torch.zeros(6, 3)) and wait.calls == 0
    # One hook for many tensors; the bound method is another object each time it is taken.
    wait = Wait()
    first, second = (ragged(torch.zeros(4), mesh, before_read=wait.__call__) for _ in range(2))
    wait.tensors = [first, second]
    assert same(first + second, torch.full((4,), 10.0)) and wait.calls == 2

    def fail():
        raise RuntimeError("flush failed")

    x = ragged(torch.zeros(4), mesh, before_read=fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="flush failed"):
            x.mul_(2)


def test_the_hook_runs_before_data_is_touched_and_never_for_metadata():
    run_ranks(3, wait_before_reading)


# Copies, pickles, checkpoints.


def copy_and_save(rank, world_size, mesh):
    full = torch.randn(6, 4)
    x = ragged(full, mesh)
    buffer = torch.randn(100_000)
    view = RaggedTensor.from_local(buffer[: x.to_local().numel()].copy_(x.to_local()), mesh, x.placements, (6, 4))
    assert len(pickle.dumps(view)) < 20_000  # its own elements, not the buffer's
    saved = io.BytesIO()
    torch.save({"x": view}, saved)
    saved.seek(0)
    for clone in (
        copy.deepcopy(view),
        copy.copy(view),
        pickle.loads(pickle.dumps(view)),
        torch.load(saved)["x"],
        view.clone(),
    ):
        assert clone.placements == x.placements and clone.device_mesh == mesh and same(clone, full)
        clone.zero_()
    assert same(view, full)
    param = torch.nn.Parameter(ragged(full, mesh))
    param.grad = ragged(full * 2, mesh)
    param.note = "kept"
    for clone in (copy.deepcopy(param), pickle.loads(pickle.dumps(param))):
        assert isinstance(clone, torch.nn.Parameter) and clone.requires_grad and same(clone.detach(), full)
    clone = copy.deepcopy([param, param, param.grad])
    assert clone[0] is clone[1] and clone[0].note == "kept" and same(clone[0].grad, full * 2) and clone[0].grad is clone[2]
    # The model of a plain parameter with a ragged gradient.
    model = torch.nn.Linear(4, 6)
    model.weight.grad = x
    copy.deepcopy(model)
    assert same(copy.deepcopy(model.weight.grad), full)
    model.share_memory()
    assert model.weight.grad.is_shared() and same(model.weight.grad, full)
    model.to(torch.float64)
    assert model.weight.grad.dtype == torch.float64 and same(model.weight.grad, full.double())
    model.weight.grad.mul_(2)
    assert same(model.weight.grad, full.double() * 2)
    ragged_model = torch.nn.Linear(4, 6, bias=False)
    ragged_model.weight = torch.nn.Parameter(ragged(full, mesh))
    ragged_model.bfloat16()
    assert same(ragged_model.weight.detach(), full.bfloat16())
    assert same(ragged_model.state_dict()["weight"], full.bfloat16())
    assert "RaggedTensor(shape=(6, 4)" in repr(x)
    with pytest.raises(ValueError, match="same layout"):
        x.data = full


def test_copies_and_pickles_carry_this_ranks_elements():
    run_ranks(3, copy_and_save)


def checkpoint_state(mesh, kind, *, filled):
    """The values to save, which come in when they are first read, as a pending gradient does; or zeros to load into."""
    state = {}
    for name, values in full_values().items():
        x = state[name] = ragged(torch.zeros_like(values), mesh, kind)
        if filled:
            source = ragged(values, mesh, kind)
            x.before_read = functools.partial(x.to_local().copy_, source.to_local())
    return state


def full_values():
    values = {
        f"ragged{i}": (torch.arange(math.prod(s), dtype=torch.float32) + 100 * i).reshape(s) for i, s in enumerate(SHAPES)
    }
    return values | {"bf16": torch.arange(30.0).reshape(5, 6).bfloat16()}


def save_checkpoint(rank, world_size, mesh, path, asynchronous, axes):
    if axes:
        mesh = init_device_mesh("cpu", axes)
    state = checkpoint_state(mesh, "uneven", filled=True)
    if asynchronous:
        future = dcp.async_save(state, checkpoint_id=path)
        for value in state.values():
            value.to_local().fill_(-1)  # staged, so this must not reach the checkpoint
        future.result()
    else:
        dcp.save(state, checkpoint_id=path)


def load_checkpoint(rank, world_size, mesh, path):
    expected = full_values()
    for kind in ("uneven", "even", "last only"):
        state = checkpoint_state(mesh, kind, filled=False)
        dcp.load(state, checkpoint_id=path)
        assert all(same(state[name], expected[name]) for name in expected)
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    state = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in expected.items() if value.dim()
    }
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(state[name].full_tensor(), expected[name]) for name in state)


@pytest.mark.parametrize(("world_size", "asynchronous", "axes"), [(3, False, None), (3, True, None), (4, False, (2, 2))])
def test_checkpoints_load_at_any_world_size_and_placement(tmp_path, world_size, asynchronous, axes):
    path = str(tmp_path / "checkpoint")
    run_ranks(world_size, save_checkpoint, path, asynchronous, axes)
    for loading_size in (3,) if axes else (1, 4):
        run_ranks(loading_size, load_checkpoint, path)
    expected = full_values()
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def save_other_placements(rank, world_size, mesh, path):
    values = full_values()
    dcp.save(
        {
            name: distribute_tensor(value, mesh, [Shard(0)]) if value.numel() > 30 else value
            for name, value in values.items()
        },
        checkpoint_id=path,
    )


def test_other_checkpoints_load_into_ragged_tensors(tmp_path):
    path = str(tmp_path / "checkpoint")
    run_ranks(4, save_other_placements, path)
    run_ranks(3, load_checkpoint, path)


def state_dict_helpers(rank, world_size, mesh):
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in model:
        layer.weight = torch.nn.Parameter(ragged(layer.weight, mesh))
        layer.bias = torch.nn.Parameter(ragged(layer.bias, mesh, "last only"))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    updated = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    whole = StateDictOptions(full_state_dict=True)
    assert all(torch.equal(value, updated[name]) for name, value in get_model_state_dict(model, options=whole).items())
    moments = get_optimizer_state_dict(model, optimizer, options=whole)["state"]["0.weight"]
    assert moments["exp_avg"].shape == (6, 4) and type(moments["exp_avg"]) is torch.Tensor
    state = get_optimizer_state_dict(model, optimizer)
    assert type(state["state"]["1.bias"]["exp_avg"]) is RaggedTensor
    set_optimizer_state_dict(model, optimizer, state)
    set_model_state_dict(
        model, {name: ragged(value, mesh, "last only" if "bias" in name else "uneven") for name, value in full.items()}
    )
    assert all(same(p.detach(), full[name]) for name, p in model.named_parameters())
    for number, options in enumerate((whole, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)), 1):
        given = {name: value + number for name, value in full.items()}
        set_model_state_dict(model, given if rank == 0 or number == 1 else {}, options=options)
        assert all(same(p.detach(), full[name] + number) for name, p in model.named_parameters())
    with pytest.raises(RuntimeError, match="from_replicate"):
        model.load_state_dict(full)


def test_state_dict_helpers_of_torch_handle_ragged_parameters():
    run_ranks(3, state_dict_helpers)


# Autograd.


def give_plain_parameters_ragged_gradients(rank, world_size, mesh):
    x = ragged(torch.ones(6, 4), mesh)
    plain = torch.nn.Parameter(torch.randn(6, 4))
    plain.grad = x
    assert plain.grad is x
    # A plain gradient that meets a ragged one must not vanish in it.
    with pytest.raises(RuntimeError, match=r"autograd would add a plain gradient|mixed torch.Tensor"):
        (plain * 2).sum().backward()
    assert plain.grad is x and same(x, torch.ones(6, 4))
    optimizer = torch.optim.SGD([plain])
    with pytest.raises(ValueError, match="cannot be written into a Parameter"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert plain.grad is x and same(x, torch.zeros(6, 4))
    with pytest.raises(RuntimeError, match=r"size|shape"):
        torch.nn.Parameter(torch.zeros(4, 6)).grad = x


def test_plain_parameters_take_ragged_gradients():
    run_ranks(3, give_plain_parameters_ragged_gradients)


def differentiate(rank, world_size, mesh):
    full, weight = torch.randn(6, 4), torch.randn(6, 4)
    # ZeRO-3: the parameter is ragged, the layer computes with the whole tensor, the gradient is cut back.
    param = torch.nn.Parameter(ragged(full, mesh))
    for _ in range(2):
        (param.full_tensor() * weight).sum().backward()
    assert same(param.grad, 2 * weight)
    param.grad = None
    (param.redistribute(placements=[Replicate()]).to_local() * weight).sum().backward()
    assert same(param.grad, weight)
    param.grad = None
    moved = (param * 3).redistribute(placements=[RaggedShard((), (1, *(0,) * (world_size - 1)))])
    (moved.to_local() * 2).sum().backward()
    assert same(param.grad, torch.full((6, 4), 6.0))
    param.grad = None
    (param.to_local() * 2).sum().backward()
    assert same(param.grad, torch.full((6, 4), 2.0))
    with torch.no_grad():
        param.add_(1)
        assert param.to_local().grad_fn is None and same(param.detach(), full + 1)
    assert param.norm().item() == pytest.approx((full + 1).norm().item())
    param.data = ragged(full, mesh)
    assert same(param.detach(), full) and param.requires_grad


@pytest.mark.skipif(ragged_torch_2_11.IS_NEEDED, reason="torch 2.11 accumulates by stock DTensor ops")
def test_gradients_follow_the_layout():
    run_ranks(3, differentiate)


def draw_in_place(rank, world_size, mesh):
    placement = RaggedShard.from_numels((5, 7), (6, 29))
    tensor = RaggedTensor.from_local(torch.zeros(6 if rank == 0 else 29), mesh, placement, (5, 7))
    torch.manual_seed(3)
    torch.nn.init.normal_(tensor)
    torch.manual_seed(3)
    expected = torch.nn.init.normal_(torch.empty(5, 7))
    return torch.equal(tensor.full_tensor(), expected)


def test_a_random_fill_draws_what_one_device_draws():
    assert run_ranks(2, draw_in_place) == [True, True]
