"""Inverse roots and eigenbases against fp64 arithmetic, and what happens where LAPACK gives up."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

from vescale_optim.optimizers import matrix_roots
from vescale_optim.optimizers.matrix_roots import eigenbasis, inverse_root, power_step


def positive(size: int, *, rank: int | None = None, seed: int = 0) -> Tensor:
    factor = torch.randn(size, rank or 2 * size, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T


@pytest.mark.parametrize("size", [1, 2, 7, 33])
@pytest.mark.parametrize("root", [1, 2, 4, 2.5])
def test_inverse_root_is_the_power_of_the_lifted_matrix(size: int, root: float) -> None:
    matrix = positive(size)
    before = matrix.clone()
    found = inverse_root(matrix, root, relative_eps=1e-3)
    values, vectors = numpy.linalg.eigh(matrix.double().numpy())
    expected = (vectors * (values + 1e-3 * values.max()) ** (-1 / root)) @ vectors.T
    numpy.testing.assert_allclose(found.numpy(), expected, rtol=2e-4, atol=2e-5 * numpy.abs(expected).max())
    assert torch.equal(matrix, before)


def test_the_lift_is_relative_and_bounds_the_root_of_a_singular_matrix() -> None:
    matrix = positive(20, rank=3)
    for scale in (1e-12, 1.0, 1e12):
        root = inverse_root(matrix * scale, 4, relative_eps=1e-6) * scale**0.25
        spectrum = torch.linalg.eigvalsh(root)
        largest = torch.linalg.eigvalsh(matrix)[-1]
        torch.testing.assert_close(spectrum[-1], (1e-6 * largest) ** -0.25, rtol=0.1, atol=0)
        torch.testing.assert_close(spectrum[0], largest**-0.25, rtol=1e-3, atol=0)


def test_a_zero_matrix_has_the_identity_as_root() -> None:
    assert torch.equal(inverse_root(torch.zeros(5, 5), 4, relative_eps=1e-6), torch.eye(5))


def test_eigenbasis_diagonalises_with_the_largest_first() -> None:
    matrix = positive(12)
    basis = eigenbasis(matrix)
    diagonal = basis.T @ matrix @ basis
    torch.testing.assert_close(diagonal, torch.diag(torch.linalg.eigvalsh(matrix).flip(0)), rtol=1e-4, atol=1e-3)


def test_power_steps_reach_the_eigenbasis_and_say_where_columns_went() -> None:
    matrix = positive(6)
    exact = eigenbasis(matrix)
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    basis, order = power_step(matrix, exact[:, shuffle])
    assert torch.equal(shuffle[order], torch.arange(6))
    torch.testing.assert_close((basis * exact).sum(0).abs(), torch.ones(6), rtol=1e-4, atol=0)
    basis = torch.eye(6)
    for _ in range(200):
        basis, _ = power_step(matrix, basis)
    torch.testing.assert_close((basis * exact).sum(0).abs(), torch.ones(6), rtol=1e-2, atol=0)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6), rtol=0, atol=1e-5)


def test_batches_hold_the_results_of_their_matrices() -> None:
    """The form that runs on devices with batched kernels."""
    matrices = torch.stack([positive(9, seed=seed) for seed in range(3)])
    roots, bases = inverse_root(matrices, 4, relative_eps=1e-4), eigenbasis(matrices)
    shuffle = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    refreshed, order = power_step(matrices, bases[:, :, shuffle])
    for index, matrix in enumerate(matrices):
        torch.testing.assert_close(roots[index], inverse_root(matrix, 4, relative_eps=1e-4))
        assert torch.equal(shuffle[order[index]], torch.arange(9))
        alone, _ = power_step(matrix, bases[index][:, shuffle])
        torch.testing.assert_close(refreshed[index], alone, rtol=1e-3, atol=1e-4)


def fail(dtypes: tuple[torch.dtype, ...]):
    original = torch.linalg.eigh

    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        if matrix.dtype in dtypes:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return original(matrix)

    return failing


def test_fp64_is_tried_where_fp32_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = positive(8)
    expected = inverse_root(matrix, 4, relative_eps=1e-6), eigenbasis(matrix)
    monkeypatch.setattr(matrix_roots.torch.linalg, "eigh", fail((torch.float32,)))
    root, basis = inverse_root(matrix, 4, relative_eps=1e-6), eigenbasis(matrix)
    torch.testing.assert_close(root, expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close((basis * expected[1]).sum(0).abs(), torch.ones(8), rtol=1e-3, atol=0)
    assert root.dtype == basis.dtype == torch.float32


def test_failure_of_both_is_an_answer_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_roots.torch.linalg, "eigh", fail((torch.float32, torch.float64)))
    assert inverse_root(positive(4), 4, relative_eps=1e-6) is None
    assert eigenbasis(positive(4)) is None


def test_non_finite_matrices_have_no_root() -> None:
    assert inverse_root(torch.full((4, 4), torch.nan), 4, relative_eps=1e-6) is None
