"""orthogonalize: Newton-Schulz iteration on batches of matrices.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), in the arithmetic of
`torch.optim.Muon` (torch 2.13): on CPU the result has the same bits for every matrix, batched or not, as long as its
largest entry is at ordinary scale; on CUDA batched kernels round differently, within bf16 noise. We differ below
torch's `eps`: matrices are scaled by a power of two first, which is exact, so a gradient of 1e-20 gives the same
direction as one of 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

Coefficients = tuple[float, float, float]

# Keller Jordan's quintic: the slope at zero is as large as convergence to about [0.7, 1.2] allows.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def orthogonalize(
    matrices: Tensor | Sequence[Tensor],
    *,
    coefficients: Coefficients | Sequence[Coefficients] = QUINTIC,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """An approximation of U V^T for each matrix U S V^T.

        X_0 = M / max(|M|_F, eps);   A = X X^T;   X <- a X + (b A + c A A) X      (on the transpose where rows > columns)

    Args:
        matrices: [batch, rows, columns], or a list of equal matrices; any floating dtype and strides; never written to.
        coefficients: (a, b, c) for all steps, or one triple per step.
        steps: iterations; ignored where `coefficients` lists one triple per step.
        eps: smallest norm divided by, after scaling the largest entry into [0.5, 1).
        dtype: of the iteration and of the result; one with the range of fp32 (bf16, fp32, fp64).

    Returns:
        [batch, rows, columns] of `dtype`, fresh memory; zero matrices stay zero.
    """
    rows, columns = matrices[0].shape
    is_tall = rows > columns
    short, long = (columns, rows) if is_tall else (rows, columns)
    x = torch.empty(len(matrices), rows, columns, dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(list(x), list(matrices))
    norm = norms_of(x)
    # Asking a device would stop the host; on CPU it saves three passes, and powers of two change no bit of the result.
    if x.device.type != "cpu" or not is_ordinary(norm, eps):
        norm = norms_of(scale_by_power_of_two_(x)).clamp(min=eps)
    x.div_(rearrange(norm, "b -> b 1 1"))
    # Two memories in turn: fresh ones would cost a page fault every 4 KiB on CPU, every time.
    spare, this = x.new_empty(len(matrices), short, long), x.view(len(matrices), short, long)
    gram, update = x.new_empty(2, len(matrices), short, short)
    x = x.mT if is_tall else x
    for a, b, c in schedule_of(coefficients, steps):
        product(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=update)
        x = add_product(x, update, x, beta=a, out=spare)
        spare, this = this, spare
    return x.mT if is_tall else x


def norms_of(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rearrange(matrices, "b r c -> b (r c)"), dim=1)


def is_ordinary(norm: Tensor, eps: float) -> bool:
    """Whether no square underflowed or overflowed on the way to these norms, and none is too small to divide by."""
    return all(max(eps, 1e-12) < value < 1e15 for value in norm.tolist())


# Up to this many multiplications torch 2.13 sends a single CPU product to another kernel than a batch, and the two round
# 1 of 3,000 bf16 matrices differently. Above, both run in the same kernel.
SMALL_PRODUCT = 16**3


def product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """left right for each matrix of a batch, with the bits of one `mm` per matrix on CPU."""
    if is_batch_exact(left, right):
        return torch.bmm(left, right, out=out)
    return torch.stack([torch.mm(a, b) for a, b in zip(left, right, strict=True)], out=out)


def add_product(term: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor) -> Tensor:
    """beta term + alpha left right for each matrix of a batch, with the bits of one `addmm` per matrix on CPU."""
    if is_batch_exact(left, right):
        if term.is_contiguous():
            out.copy_(term)
        else:  # on CPU (torch 2.13) transposing is fast in two dimensions only
            torch._foreach_copy_(list(out), list(term))
        return out.baddbmm_(left, right, beta=beta, alpha=alpha)
    matrices = zip(term, left, right, strict=True)
    return torch.stack([torch.addmm(t, a, b, beta=beta, alpha=alpha) for t, a, b in matrices], out=out)


def is_batch_exact(left: Tensor, right: Tensor) -> bool:
    """Whether the batched product runs in the kernel that a single one would run in."""
    return left.device.type != "cpu" or left.size(1) * left.size(2) * right.size(2) > SMALL_PRODUCT


def schedule_of(coefficients: Coefficients | Sequence[Coefficients], steps: int) -> list[Coefficients]:
    """One triple per step.

    Raises:
        ValueError: `coefficients` is neither a triple nor a list of triples, or `steps` is negative.
    """

    def is_triple(values: object) -> bool:
        return isinstance(values, Sequence) and len(values) == 3 and all(isinstance(v, int | float) for v in values)

    schedule = [coefficients] * steps if is_triple(coefficients) else list(coefficients)
    if steps < 0 or not all(map(is_triple, schedule)):
        raise ValueError(
            f"Newton-Schulz got coefficients {coefficients} and {steps} steps; give (a, b, c) and steps >= 0, "
            "or one (a, b, c) per step"
        )
    return [(float(a), float(b), float(c)) for a, b, c in schedule]


def scale_by_power_of_two_(matrices: Tensor) -> Tensor:
    """Multiply each matrix by the power of two that brings its largest entry into [0.5, 1], exact in binary; in place.

    Norms of gradients below 1e-19 underflow in fp32 squares. Zero and non-finite matrices are left as they are, and
    subnormal ones come as far as one factor reaches.
    """
    # Not the infinity norm: on CPU (torch 2.13) it takes ten times as long.
    largest = matrices.abs().amax(dim=(-2, -1), keepdim=True).float()
    _, exponent = torch.frexp(largest)
    exponent = torch.where(torch.isfinite(largest), -exponent, torch.zeros_like(exponent)).clamp(-126, 127)
    return matrices.mul_(torch.ldexp(torch.ones_like(largest), exponent).to(matrices.dtype))


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """FLOPs of `orthogonalize` on one matrix: per step two products over the short side s and one with it squared."""
    short, long = min(rows, columns), max(rows, columns)
    return steps * 2.0 * short * short * (2 * long + short)
