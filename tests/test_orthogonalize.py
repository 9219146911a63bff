"""orthogonalize gives torch.optim.Muon's matrices, bit for bit, and keeps working where torch's underflow."""

from __future__ import annotations

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from vescale_optim.optimizers.orthogonalize import QUINTIC, newton_schulz_flops, orthogonalize, scale_by_power_of_two_

SHAPES = [(7, 13), (1, 64), (64, 1), (1, 1), (300, 50), (5, 5), (16, 24), (128, 128), (256, 96), (512, 640)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_torch_matrix_by_matrix(shape, dtype, scale, batch) -> None:
    matrices = (torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    result = orthogonalize(matrices)
    for matrix, found in zip(matrices, result, strict=True):
        assert torch.equal(found, torch_newton_schulz(matrix.clone(), QUINTIC, 5, 1e-7))


def test_input_is_never_written_to() -> None:
    matrices = torch.randn(2, 8, 4).bfloat16()
    before = matrices.clone()
    orthogonalize(matrices)
    assert torch.equal(matrices, before)


@pytest.mark.parametrize("exponent", [-120, -60, 60, 110])
def test_result_does_not_depend_on_the_scale_of_the_gradient(exponent: int) -> None:
    matrix = torch.randn(1, 12, 20, generator=torch.Generator().manual_seed(2)).double()
    matrix = (matrix.clamp(-1, 1) * 8).round() / 8
    scaled = (matrix * 2.0**exponent).float()
    assert torch.equal(orthogonalize(scaled), orthogonalize(matrix.float()))


def test_zero_matrix_stays_zero_and_bad_values_stay_visible() -> None:
    matrices = torch.zeros(2, 3, 5)
    matrices[1, 0, 0] = torch.nan
    zero, bad = orthogonalize(matrices)
    assert torch.equal(zero, torch.zeros(3, 5, dtype=torch.bfloat16))
    assert bad.isnan().any()


def test_scaling_is_exact() -> None:
    matrices = torch.randn(3, 4, 4) * 1e-20
    scaled = scale_by_power_of_two_(matrices.clone())
    ratio = scaled.double() / matrices.double()
    assert torch.equal(torch.frexp(ratio)[0], torch.full_like(ratio, 0.5))
    largest = scaled.abs().amax(dim=(-2, -1))
    assert ((largest >= 0.5) & (largest <= 1)).all()


def test_subnormal_gradients_still_give_a_direction() -> None:
    matrix = torch.eye(3)[None] * 2.0**-130
    result = orthogonalize(matrix)[0].float()
    assert result.isfinite().all() and (result.diagonal() > 0.5).all()


@pytest.mark.parametrize("shape", [(40, 64), (64, 40)])
def test_fp32_iteration_brings_singular_values_near_one(shape) -> None:
    values = torch.linalg.svdvals(orthogonalize(torch.randn(2, *shape), dtype=torch.float32))
    assert values.min() > 0.3 and values.max() < 1.3


def test_schedule_of_one_triple_per_step() -> None:
    matrix = torch.randn(1, 6, 6)
    assert torch.equal(orthogonalize(matrix, coefficients=[QUINTIC] * 3), orthogonalize(matrix, steps=3))


@pytest.mark.parametrize("coefficients, steps", [((1.0, 2.0), 5), ([(1.0, 2.0)], 5), (QUINTIC, -1)])
def test_bad_schedules_are_named(coefficients, steps) -> None:
    with pytest.raises(ValueError, match="Newton-Schulz got coefficients"):
        orthogonalize(torch.randn(1, 4, 4), coefficients=coefficients, steps=steps)


def test_flops_count_the_products_of_one_matrix() -> None:
    rows, columns, steps = 3, 5, 2
    gram, square, update = 2 * rows * rows * columns, 2 * rows**3, 2 * rows * rows * columns
    assert newton_schulz_flops(rows, columns, steps) == newton_schulz_flops(columns, rows, steps)
    assert newton_schulz_flops(rows, columns, steps) == steps * (gram + square + update)
