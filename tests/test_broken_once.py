"""Each of these was wrong once; the right value is the test."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from vescale_optim import RaggedTensor, ShardedAdamW, ShardedMuon

X = torch.linspace(-1, 1, 16).reshape(2, 8)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(dtype)


def moved(before: list[Tensor], model: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(before, model.parameters(), strict=True))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def load_after_construction(rank: int, world_size: int, mesh: Any) -> list[float]:
    model = net(torch.bfloat16)
    optimizer = ShardedAdamW(model, mesh, lr=1e-3, master_dtype=torch.float32)
    model.load_state_dict({name: torch.full_like(value, 3.0) for name, value in model.state_dict().items()})
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return [p.float().mean().item() for p in model.parameters()]


def test_weights_loaded_after_construction_reach_the_master_copy() -> None:
    for means in run_ranks(2, load_after_construction):
        assert means == pytest.approx([3.0] * 4, abs=0.02)


def resume_master(rank: int, world_size: int, mesh: Any) -> bool:
    def train(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            model(X.bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, other = net(torch.bfloat16), net(torch.bfloat16)
    make = lambda m: ShardedAdamW(m, mesh, lr=1e-4, master_dtype=torch.float32)  # noqa: E731
    optimizer, resumed = make(model), make(other)
    train(model, optimizer)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer)
    train(other, resumed)
    masters = [[s["master"].to_local() for s in o.state.values()] for o in (optimizer, resumed)]
    return same(values(model), values(other)) and same(*masters)


def test_master_copies_are_state_and_resume_exactly() -> None:
    assert run_ranks(2, resume_master) == [True, True]


def second_optimizer(rank: int, world_size: int, mesh: Any, keeps_first: bool) -> tuple[bool, float, str]:
    gc.collect()
    gc.disable()
    model = net()
    first = ShardedAdamW(model, mesh, lr=0.1)
    model(X).sum().backward()
    first.step()
    first.zero_grad()
    if not keeps_first:
        del first
    second = ShardedAdamW(model, mesh, lr=0.1)
    before = values(model)
    model(X).sum().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    second.step()
    gc.enable()
    message = ""
    if keeps_first:
        with pytest.raises(RuntimeError) as error:
            first.step()
        message = str(error.value)
    return moved(before, model) > 0.05, norm, message


@pytest.mark.parametrize("keeps_first", [False, True])
def test_a_later_optimizer_takes_the_parameters_over(keeps_first: bool) -> None:
    for has_moved, norm, message in run_ranks(2, second_optimizer, keeps_first):
        assert has_moved and norm > 0.1
        assert ("took their gradients over" in message) == keeps_first


def no_cycles(rank: int, world_size: int, mesh: Any) -> int:
    import weakref

    gc.collect()
    gc.disable()
    model = net()
    optimizer = ShardedMuon(model.named_parameters(), mesh)
    model(X).sum().backward()
    optimizer.step()
    storage = optimizer._storages["replicated"]
    watched = [weakref.ref(optimizer), weakref.ref(storage), weakref.ref(storage.reduction)]
    del storage
    del optimizer
    alive = sum(reference() is not None for reference in watched)
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    gc.enable()
    return alive + hooks


def test_a_deleted_optimizer_is_gone_at_once_with_its_hooks() -> None:
    assert run_ranks(2, no_cycles) == [0, 0]


def other_groups_first(rank: int, world_size: int, mesh: Any) -> float:
    dist.new_group([0])
    dist.new_group([0, 1])
    half = dist.new_group([1])
    before = net()
    ShardedAdamW(before, mesh)
    if rank == 1:
        dist.all_reduce(torch.zeros(1), group=half)
    return 1.0


def test_ranks_in_different_numbers_of_process_groups() -> None:
    assert run_ranks(3, other_groups_first) == [1.0] * 3


def reentrant_without_outer_frame(rank: int, world_size: int, mesh: Any) -> bool:
    """The frames of a CUDA device thread: the outer backward has none."""
    results = []
    for reentrant in (True, False):
        model = net()
        optimizer = ShardedAdamW(model, mesh, lr=0.1)
        for _ in range(2):
            x = X.clone().requires_grad_()
            hidden = checkpoint(model[0], x, use_reentrant=True) if reentrant else model[0](x)
            loss = model[2](model[1](hidden)).square().sum()
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)
            optimizer.step()
            optimizer.zero_grad()
        results.append(values(model))
    return same(*results)


def test_reentrant_checkpoints_beside_plain_layers() -> None:
    assert run_ranks(2, reentrant_without_outer_frame) == [True, True]


def clip_after_copy(rank: int, world_size: int, mesh: Any) -> tuple[float, float]:
    x = torch.randn(world_size, 2, 8, generator=torch.Generator().manual_seed(0))
    norms = []
    for copies in (False, True):
        model = net()
        optimizer = ShardedAdamW(model, mesh, lr=0.05)
        if copies:
            model, optimizer = copy.deepcopy((model, optimizer))
            optimizer.zero_grad()
        model(x[rank]).square().sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    return norms[0], norms[1]


def test_a_copy_clips_globally_after_zero_grad() -> None:
    (a, b), (c, d) = run_ranks(2, clip_after_copy)
    assert a == b == c == d


def unfreeze_and_clip(rank: int, world_size: int, mesh: Any, how: str) -> bool:
    model = net()
    if how == "unfreeze":
        model[0].requires_grad_(False)
        optimizer = ShardedAdamW(model.parameters(), mesh)
    else:
        optimizer = ShardedAdamW(model[2].parameters(), mesh)
    model(X).sum().backward()
    optimizer.step()
    if how == "unfreeze":
        model[0].requires_grad_(True)
    else:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    optimizer.zero_grad()
    before = values(model)
    model(X).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("how", ["unfreeze", "add_param_group"])
def test_parameters_that_join_at_zero_grad_are_clipped_with_the_others(how: str) -> None:
    assert run_ranks(2, unfreeze_and_clip, how) == [True, True]


def surgery(rank: int, world_size: int, mesh: Any, how: str) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    for edits in (False, True):
        model = net()
        optimizer = ShardedAdamW(model, mesh, lr=0.1)
        model(X).sum().backward()
        if edits:
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad()
            for param, grad in zip(model.parameters(), grads, strict=True):
                if how == "assign":
                    param.grad = grad
                else:
                    param.grad.copy_(grad)
        optimizer.step()
        results.append(values(model))
    return results[0], results[1]


@pytest.mark.parametrize("how", ["assign", "copy_"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_set_after_zero_grad_count(world_size: int, how: str) -> None:
    for plain, edited in run_ranks(world_size, surgery, how):
        assert same(plain, edited)


def grad_dtype_leak(rank: int, world_size: int, mesh: Any) -> tuple[float, float]:
    norms: list[float] = []
    model = net(torch.bfloat16)
    for grad_dtype in (torch.float32, None):
        model.zero_grad()
        optimizer = ShardedAdamW(model, mesh, grad_dtype=grad_dtype)
        model(X.bfloat16()).sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        del optimizer
    return norms[0], norms[1]


def test_grad_dtype_of_an_earlier_optimizer_does_not_stay() -> None:
    for first, second in run_ranks(2, grad_dtype_leak):
        assert second == pytest.approx(first, rel=0.02) and first > 0


def loading(rank: int, world_size: int, mesh: Any) -> tuple[float, float, bool, str, float]:
    model, single = net(), net()
    optimizer = ShardedAdamW(model.parameters(), mesh)
    model(X).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(torch.optim.AdamW(single.parameters()).state_dict())
    weight = model[0].weight
    without_state = float(optimizer.state[weight]["step"])
    is_zero = not bool(optimizer.state[weight]["exp_avg"].any())
    calls = []

    def before(opt: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: {**entry, "step": torch.tensor(77.0)} for key, entry in saved["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append(float(opt.state[weight]["step"])))
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(torch.optim.AdamW(single.parameters(), maximize=True).state_dict())
    return without_state, float(optimizer.state[weight]["step"]), is_zero, str(error.value), calls[0]


def test_load_state_dict_restores_what_torch_restores() -> None:
    for without_state, hooked, is_zero, message, seen in run_ranks(2, loading):
        assert (without_state, hooked, is_zero, seen) == (0.0, 77.0, True, 77.0)
        assert "maximize is True" in message


def doubles(rank: int, world_size: int, mesh: Any) -> tuple[bool, bool]:
    model = net(torch.float64)
    optimizer = ShardedAdamW(model, mesh, grad_sync="none")
    model(X.double()).sum().backward()
    optimizer.step()
    kept = net(torch.float64)
    before = values(kept)
    optimizer = ShardedAdamW(kept, mesh, lr=0.0, master_dtype=torch.float32)
    kept(X.double()).sum().backward()
    optimizer.step()
    ShardedAdamW([nn.Parameter(torch.tensor(-0.0, dtype=torch.float64))], mesh)
    return True, same(before, values(kept))


def test_fp64_parameters_keep_their_bits() -> None:
    assert run_ranks(2, doubles) == [(True, True)] * 2


def default_device(rank: int, world_size: int, mesh: Any) -> bool:
    model = net()
    torch.set_default_device("meta")
    try:
        optimizer = ShardedMuon(model.named_parameters(), mesh)
        x = torch.ones(2, 8, device="cpu")
        model(x).sum().backward()
        optimizer.step()
    finally:
        torch.set_default_device(None)
    return True


def test_a_default_device_does_not_move_what_belongs_on_the_cpu() -> None:
    assert run_ranks(2, default_device) == [True, True]


def refused_groups(rank: int, world_size: int, mesh: Any) -> tuple[list[int], list[str]]:
    model = net()
    optimizer = ShardedMuon(model.named_parameters(), mesh)
    counts, messages = [len(optimizer.param_groups)], []
    new = ("new", nn.Parameter(torch.ones(3, 3)))
    for group in ({"params": [new], "lr": -1.0}, {"params": [new, ("bias", model[0].bias)]}, {"params": {new[1]}}):
        with pytest.raises((ValueError, TypeError)) as error:
            optimizer.add_param_group(group)
        counts.append(len(optimizer.param_groups))
        messages.append(str(error.value))
    with pytest.raises(TypeError, match="set"):
        ShardedAdamW(set(net().parameters()), mesh)
    return counts, messages


def test_a_refused_group_leaves_nothing_behind() -> None:
    counts, messages = run_ranks(1, refused_groups)[0]
    assert counts == [2, 2, 2, 2]
    assert "lr is -1.0" in messages[0]


def invalid_on_one_rank(rank: int, world_size: int, mesh: Any) -> str:
    with pytest.raises(ValueError) as error:
        ShardedAdamW(net(), mesh, lr=-1.0 if rank == 1 else 1e-3)
    return str(error.value)


def test_a_wrong_hyperparameter_on_one_rank_raises_on_all() -> None:
    assert all("lr is -1.0; it must be >= 0" in message for message in run_ranks(3, invalid_on_one_rank))


def odd_entries(rank: int, world_size: int, mesh: Any) -> bool:
    model = net()
    group = {"params": list(model.parameters()), "tag": object(), "names": {"decay", "other"}, "pick": lambda p: p}
    optimizer = ShardedAdamW([group], mesh)
    model(X).sum().backward()
    optimizer.step()
    return True


def test_groups_may_carry_anything() -> None:
    assert run_ranks(2, odd_entries) == [True, True]


def stacks(rank: int, world_size: int, mesh: Any) -> bool:
    torch.manual_seed(1)
    weight, grad = torch.randn(3, 4, 5).bfloat16(), torch.randn(3, 4, 5).bfloat16()
    param = nn.Parameter(weight.clone())
    optimizer = ShardedMuon([param], mesh, lr=0.02)
    (param * grad).sum().backward()
    optimizer.step()
    experts = [nn.Parameter(matrix.clone()) for matrix in weight]
    for expert, part in zip(experts, grad, strict=True):
        expert.grad = part.clone()
    torch.optim.Muon(experts, lr=0.02).step()
    return torch.equal(param, torch.stack(list(experts)))


def test_bf16_stacks_step_like_separate_matrices() -> None:
    assert run_ranks(2, stacks) == [True, True]


def round_trip(rank: int, world_size: int, mesh: Any) -> bool:
    model = net()
    optimizer = ShardedMuon(model.named_parameters(), mesh)
    for _ in range(2):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    local = [value.to_local() if isinstance(value, RaggedTensor) else value for value in tensors]
    before = [value.clone() for value in local]
    optimizer.load_state_dict(optimizer.state_dict())
    after = local
    return same(before, after) and any(bool(value.any()) for value in after)


def test_loading_its_own_state_dict_keeps_the_state() -> None:
    """accelerate does so at prepare; dcp.load fills the very tensors of state_dict()."""
    assert run_ranks(2, round_trip) == [True, True]
