"""The oracles keep their word: gradients that add up exactly, and references that are torch's own optimizers."""

from itertools import permutations

import pytest
import torch

from tests.support import values
from tests.support.reference import OneDevice, adamw, after_steps, muon, muon_for_matrices

SHAPES = values.MIXED_SHAPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_rank_gradients_add_up_exactly_in_any_order(world_size, micro_batches, dtype):
    grads = values.rank_gradients(SHAPES, world_size, micro_batches=micro_batches, dtype=dtype, seed=3)
    orders = list(permutations(range(world_size)))
    for order in orders[:: max(1, len(orders) // 24)]:
        for name in SHAPES:
            total = torch.zeros(SHAPES[name], dtype=dtype)
            for rank in order:
                for micro in range(micro_batches):
                    total += grads.parts[rank][micro][name]
            assert torch.equal(total / world_size, grads.mean[name])
    for micro in range(micro_batches):
        mean = sum(grads.parts[rank][micro]["tall"].double() for rank in range(world_size)) / world_size
        assert torch.equal(mean.to(dtype).double(), mean)
    assert grads.mean["tall"].unique().numel() > 50


def test_the_mean_does_not_depend_on_the_number_of_ranks():
    one = values.rank_gradients(SHAPES, 1, seed=5)
    for world_size in (2, 3, 8):
        assert all(torch.equal(values.rank_gradients(SHAPES, world_size, seed=5).mean[n], one.mean[n]) for n in SHAPES)
    assert not torch.equal(values.rank_gradients(SHAPES, 1, seed=6).mean["tall"], one.mean["tall"])


def test_ranks_without_a_gradient_count_as_zeros():
    grads = values.rank_gradients(SHAPES, 3, unused={"wide": [1], "tall": [0, 1, 2]})
    assert grads.of_rank(1)["wide"] is None
    assert torch.equal((grads.of_rank(0)["wide"] + grads.of_rank(2)["wide"]) / 3, grads.mean["wide"])
    assert grads.mean["tall"] is None and grads.of_rank(0)["tall"] is None
    assert torch.equal(grads.mean["wide"], values.rank_gradients(SHAPES, 2).mean["wide"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_produces_exactly_the_given_gradients(dtype):
    module = values.parameter_module(values.parameter_values(SHAPES, dtype=dtype))
    grads = values.rank_gradients(SHAPES, 3, dtype=dtype).of_rank(2) | {"bias": None}
    values.backward(module.named_parameters(), grads)
    assert module["bias"].grad is None
    assert all(torch.equal(p.grad, grads[name]) for name, p in module.named_parameters() if name != "bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_torch_on_separate_matrices(dtype):
    start = values.parameter_values(SHAPES, dtype=dtype)
    steps = [values.rank_gradients(SHAPES, 1, seed=s, dtype=dtype).mean for s in range(4)]
    rules = muon_for_matrices(muon(lr=0.02, weight_decay=0.3), adamw(lr=0.01))
    result = after_steps(start, steps, rules)

    flat = {n: v for n, v in start.items() if n != "stack"} | {f"stack{i}": start["stack"][i] for i in range(3)}
    flat = {n: torch.nn.Parameter(v.clone()) for n, v in flat.items()}
    optimizers = [
        torch.optim.Muon([p for p in flat.values() if p.ndim == 2], lr=0.02, weight_decay=0.3),
        torch.optim.AdamW([p for p in flat.values() if p.ndim < 2], lr=0.01, fused=True),
    ]
    for grads in steps:
        for name, p in flat.items():
            p.grad = (grads["stack"][int(name[-1])] if name[:-1] == "stack" else grads[name]).clone()
        for optimizer in optimizers:
            optimizer.step()
    for name, value in result.items():
        expected = torch.stack([flat[f"stack{i}"] for i in range(3)]) if name == "stack" else flat[name]
        assert torch.equal(value, expected), name
        assert not torch.equal(value, start[name])


@pytest.mark.parametrize(
    ("shape", "rule", "matrices"),
    [
        ((18, 5), {"splits": (8, 8, 1, 1)}, lambda x: [x[:8], x[8:16], x[16:17], x[17:]]),
        ((2, 6, 5), {"splits": (4, 2)}, lambda x: [x[0, :4], x[0, 4:], x[1, :4], x[1, 4:]]),
        ((6, 5), {"interleave": 2}, lambda x: [x[::2], x[1::2]]),
        ((16, 8, 3, 3), {"flatten": "conv"}, lambda x: [x.flatten(1)]),
        ((2, 5, 6), {"matrix_layout": "in_out"}, lambda x: [x[0].T, x[1].T]),
        ((5, 6), {"matrix_layout": "in_out", "splits": (4, 2)}, lambda x: [x.T[:4], x.T[4:]]),
    ],
)
def test_declared_pieces_step_as_parameters_of_their_own(shape, rule, matrices):
    start = values.parameter_values({"w": shape})
    steps = [values.rank_gradients({"w": shape}, 1, seed=s).mean for s in range(3)]
    result = after_steps(start, steps, {"w": muon(lr=0.1, **rule)})["w"]
    for k, piece in enumerate(matrices(result)):
        alone = {"w": matrices(start["w"])[k].contiguous()}
        piece_steps = [{"w": matrices(g["w"])[k].contiguous()} for g in steps]
        assert torch.equal(piece, after_steps(alone, piece_steps, {"w": muon(lr=0.1)})["w"])


def test_a_missing_gradient_skips_the_parameter_and_its_step_count():
    start = values.parameter_values({"a": (4,), "b": (4,)})
    grads = [values.rank_gradients({"a": (4,), "b": (4,)}, 1, seed=s).mean for s in range(2)]
    reference = OneDevice(start, {"a": adamw(lr=0.1), "b": adamw(lr=0.1)})
    reference.step(grads[0])
    reference.step(grads[1] | {"b": None})
    assert [reference.state(n)[0]["step"].item() for n in "ab"] == [2, 1]
    only_first = after_steps({"b": start["b"]}, [{"b": grads[0]["b"]}], {"b": adamw(lr=0.1)})
    assert torch.equal(reference.params["b"], only_first["b"])


def test_bf16_without_nesterov_keeps_its_momentum():
    start = values.parameter_values({"w": (6, 4)}, dtype=torch.bfloat16)
    reference = OneDevice(start, {"w": muon(lr=0.1, nesterov=False, momentum=0.5)})
    momentum = torch.zeros(6, 4, dtype=torch.bfloat16)
    for s in range(3):
        grad = values.rank_gradients({"w": (6, 4)}, 1, seed=s, dtype=torch.bfloat16).mean
        reference.step(grad)
        momentum.lerp_(grad["w"], 0.5)
        assert torch.equal(reference.state("w")[0]["momentum_buffer"], momentum)


def test_a_master_copy_is_the_torch_optimizer_on_an_fp32_clone():
    start = values.parameter_values({"w": (6, 4)}, dtype=torch.bfloat16)
    steps = [values.rank_gradients({"w": (6, 4)}, 1, seed=s, dtype=torch.bfloat16).mean for s in range(3)]
    result = after_steps(start, steps, {"w": adamw(lr=1e-3)}, master_dtype=torch.float32)["w"]
    clone = torch.nn.Parameter(start["w"].float())
    optimizer = torch.optim.AdamW([clone], lr=1e-3, fused=True)
    for grads in steps:
        clone.grad = grads["w"].float()
        optimizer.step()
    assert result.dtype == torch.bfloat16 and torch.equal(result, clone.detach().bfloat16())
