"""The arithmetic of one step of 8-bit AdamW between reading codes and writing them: fp32, element by element, in place.

    m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
    p <- p (1 - lr wd) - lr (m / c1) / (sqrt(v) / sqrt(c2) + eps)

Where an element lies in a tensor does not matter, so parts of blocks get the bits of whole ones.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from vescale_optim.optimizers.rule import Group


def advance_moments_(m: Tensor, v: Tensor, grad: Tensor, group: Group) -> None:
    """The moments of this step from those of the last one."""
    beta1, beta2 = group["betas"]
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def step_parameter_(param: Tensor, m: Tensor, v: Tensor, scratch: Tensor, step: int, group: Group) -> None:
    """Decay and update; `scratch` is overwritten."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    denominator = torch.sqrt(v, out=scratch)
    denominator.div_(sqrt(1 - beta2**step)).add_(group["eps"])
    param.mul_(1 - lr * group["weight_decay"])
    param.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))
