"""Inverse p-th roots and eigenbases of symmetric positive semi-definite matrices, for Shampoo and SOAP.

Matrices are [n, n], or [batch, n, n] on devices whose kernels take batches. On CPU give them one by one, in memory of
their own: LAPACK's result for a matrix of a batch depends on the batch, and on how the memory is aligned.

Sources: Gupta et al., "Shampoo" (arXiv 1802.09568); Vyas et al., "SOAP" (arXiv 2409.11321) for the power step.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Duration of `eigh` and `qr` in FLOPs of a matrix product that takes as long, by n^3; one CPU core, n of 256 to 1024.
EIGH_FLOPS = 20.0
QR_FLOPS = 10.0


def inverse_root(matrices: Tensor, root: float, *, relative_eps: float, scale_root: float | None = None) -> Tensor | None:
    """A^(-1/root), with small eigenvalues lifted by a fraction of the largest one.

        A = Q diag(l) Q^T     ->     Q diag((max(l, 0) + relative_eps * max(l))^(-1/root)) Q^T

    The lift is relative, so that gradients of 1e-6 are preconditioned like gradients of 1.

    Args:
        matrices: symmetric, fp32 or wider; never written to.
        root: p of the p-th root, > 0.
        relative_eps: > 0; it bounds the condition of the result by relative_eps^(-1/root).
        scale_root: let c A have c^(-1/scale_root) times the result of A, whatever `root` is; None for `root`.

    Returns:
        Fresh memory; the identity for a zero matrix; None where no eigenvalues could be found.
    """
    decomposition = eigh(matrices)
    if decomposition is None:
        return None
    values, vectors = decomposition
    values = values.double().clamp(min=0)
    largest = values[..., -1:]
    lifted = torch.where(largest > 0, values + relative_eps * largest, 1.0).pow(-1 / root)
    if scale_root is not None:
        lifted *= torch.where(largest > 0, largest, 1.0).pow(1 / root - 1 / scale_root)
    return (vectors * lifted.to(vectors.dtype)[..., None, :]) @ vectors.mT


def eigenbasis(matrices: Tensor) -> Tensor | None:
    """Orthonormal eigenvectors as columns, those of the largest eigenvalues first; None where none could be found."""
    decomposition = eigh(matrices)
    return None if decomposition is None else decomposition[1].flip(-1)


def power_step(matrices: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration: the bases follow their slowly changing matrices, at the price of a QR.

    Args:
        matrices: symmetric.
        bases: orthonormal columns, near the eigenvectors.

    Returns:
        The new bases, column by column in memory where LAPACK made them (products of them round otherwise than those of a
        contiguous copy), and `order`: column i of the new basis continues column order[i] of the old one, largest estimate
        of the eigenvalue first.
    """
    images = matrices @ bases
    estimates = (bases * images).sum(-2)
    order = estimates.argsort(dim=-1, descending=True, stable=True)
    # What torch.linalg.qr computes, without its R.
    return torch.linalg.householder_product(*torch.geqrf(permuted(images, order, -1))), order


def permuted(matrices: Tensor, order: Tensor, dim: int) -> Tensor:
    """Rows (`dim` -2) or columns (-1) in the order [n] or [batch, n] of each matrix."""
    if matrices.ndim == 2:
        # The same values, many times faster.
        return matrices.index_select(dim, order)
    return matrices.take_along_dim(order.unsqueeze(-3 - dim), dim)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues, ascending, and eigenvectors; a second try in fp64; None where both fail.

    No exception: it would come on the owner of the matrix alone, and the other ranks would wait for it.
    """
    for dtype in (matrices.dtype, torch.float64):
        try:
            values, vectors = torch.linalg.eigh(matrices.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        if vectors.isfinite().all():
            return values.to(matrices.dtype), vectors.to(matrices.dtype)
    return None
