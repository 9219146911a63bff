"""ShardedShampoo: every tile of a matrix preconditioned from both sides.

Source: Gupta et al., "Shampoo" (arXiv 1802.09568), in the form of Anil et al. (arXiv 2002.09018) and Shi et al.
(arXiv 2309.06497). For a tile with gradient G in step t, all in fp32:

    L <- b2 L + (1 - b2) G G^T          R <- b2 R + (1 - b2) G^T G          (plain sums where b2 = 1)
    M <- b1 M + (1 - b1) G              m = M / (1 - b1^t)
    X_L = (L / (1 - b2^t))^(-1/4)       X_R alike; recomputed every `precondition_frequency` steps; with another root and
                                        grafting still times c^(-1/4) where L grows to c L: the length is grafted anyway
    D = m / (sqrt(v) + grafting_eps)    the direction whose length is grafted; v depends on `grafting`
    P = X_L m X_R * |D| / (|X_L m X_R| + eps)               before `start_preconditioning_step`: P = D
    p <- p (1 - lr wd) - lr P                               with momentum: B <- mu B + P in the place of P

Tiles are cut from the logical parameter, so the result is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.caller_warnings import warn_caller
from vescale_optim.optimizers.adamw import adamw_beside, check_adamw_group
from vescale_optim.optimizers.base import Params
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.matrix_roots import EIGH_FLOPS, inverse_root
from vescale_optim.optimizers.rule import Group, Shards, StateSpec, Units
from vescale_optim.optimizers.tiled import TiledOptimizer
from vescale_optim.optimizers.tiles import (
    MATRIX_LAYOUT,
    Tile,
    add_grams,
    batches_of,
    each,
    has_values,
    is_positive_int,
    moment_state,
    pair_state,
    stacked,
    store,
    tile_blocks,
    tile_shapes,
    tiles_of,
)
from vescale_optim.sharding.blocks import Blocks

Grafting = Literal["adam", "rmsprop", "adagrad", "sgd"]
# Graftings whose direction is divided by the root of a second moment.
SCALED_GRAFTINGS = ("adam", "rmsprop", "adagrad")
# State of one matrix per side of a tile.
PAIRS = ("factors", "roots")
# The root of both sides with which an update has no unit: it neither grows nor shrinks with the gradients.
UNIT_ROOT = 4
# Largest condition of a root whose products on both sides of a moment have norms in fp32, squares of 1e38 at most.
MAX_CONDITION = 1e9


class ShardedShampoo(TiledOptimizer):
    """Shampoo for matrices and AdamW for the rest, sharded over `mesh`.

    A matrix with a dimension above `max_preconditioner_dim` = b is cut into tiles of b x b, each preconditioned by
    itself; a rank owns panels of b rows, so large matrices are spread over ranks. Parameters of three and more dimensions
    are stacks of matrices. Parameters of fewer than two dimensions and groups with `algorithm="adamw"` are updated by
    AdamW. Embeddings and heads are matrices like any other unless a group says otherwise.

    State per parameter element of a square b x b tile: 16 bytes of factors and roots, 4 of momentum, 4 of grafting.

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: device mesh of the ranks that train together.
        lr: step length; what AdamW wants where grafting is "adam".
        betas: decay of the first moment, in [0, 1), and of factors and grafting's second moment, in [0, 1]; 1 sums.
        eps: added to the norm that grafting divides by.
        weight_decay: decoupled; it does not enter the momentum.
        max_preconditioner_dim: b.
        precondition_frequency: steps between two computations of the roots of a tile. The tiles of all parameters take
            turns, shape by shape (`turns_of`): the one of turn t is due when step % frequency == t % frequency.
        start_preconditioning_step: first step with roots, computed for all tiles; -1 for `precondition_frequency`. Before
            it, and as long as a tile has no roots, the grafted direction is the update.
        grafting: whose step length each tile takes over: "adam" (bias-corrected), "rmsprop" (not), "adagrad" (sum of
            squares), "sgd" (norm of the first moment), or None for Shampoo's own, which follows gradients that suddenly
            grow only when the roots of a tile are computed next.
        grafting_eps: added to the root of grafting's second moment.
        momentum: of the preconditioned direction, in [0, 1).
        nesterov: look ahead by one step of it; needs momentum > 0.
        root_inv_override: p of the inverse p-th roots; None for twice the number of dimensions, 4.
        matrix_eps: lift of small eigenvalues, relative to the largest one of the factor, in [1e-9^p, 1).
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: defaults of the AdamW groups.
        options: keywords of every sharded optimizer, see `ShardedOptimizer`.

    A group may also say how its matrices lie: `flatten`, `splits`, `interleave`, `matrix_layout`, see `Blocks.matrices`.
    A step in which any gradient is not finite (or above 1e15) is skipped on all ranks, with a warning.
    """

    def __init__(
        self,
        params: Params,
        mesh: DeviceMesh,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_preconditioner_dim: int = 1024,
        precondition_frequency: int = 10,
        start_preconditioning_step: int = -1,
        grafting: Grafting | None = "adam",
        grafting_eps: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        root_inv_override: float | None = None,
        matrix_eps: float = 1e-6,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        **options: object,
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_preconditioner_dim=max_preconditioner_dim,
            precondition_frequency=precondition_frequency,
            start_preconditioning_step=start_preconditioning_step,
            grafting=grafting,
            grafting_eps=grafting_eps,
            momentum=momentum,
            nesterov=nesterov,
            root_inv_override=root_inv_override,
            matrix_eps=matrix_eps,
            **MATRIX_LAYOUT,
        )
        others = adamw_beside(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        super().__init__(params, mesh, defaults, algorithm="shampoo", others=others, **options)

    def check_group(self, group: Group) -> None:
        if group["algorithm"] == "adamw":
            check_adamw_group(group)
            return
        betas, start, root = group["betas"], group["start_preconditioning_step"], group["root_inv_override"]
        is_pair = len(betas) == 2 and 0 <= betas[0] < 1 and 0 <= betas[1] <= 1
        require(group["lr"] >= 0, "lr", group["lr"], ">= 0")
        require(is_pair, "betas", betas, "two values, the first in [0, 1), the second in [0, 1]")
        require(group["eps"] >= 0, "eps", group["eps"], ">= 0")
        require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], ">= 0")
        for name in ("max_preconditioner_dim", "precondition_frequency"):
            require(is_positive_int(group[name]), name, group[name], "an integer >= 1")
        is_start = start == -1 or is_positive_int(start)
        require(is_start, "start_preconditioning_step", start, "-1 or an integer >= 1")
        is_grafting = group["grafting"] in (*SCALED_GRAFTINGS, "sgd", None)
        require(is_grafting, "grafting", group["grafting"], '"adam", "rmsprop", "adagrad", "sgd" or None')
        require(group["grafting_eps"] > 0, "grafting_eps", group["grafting_eps"], "> 0")
        require(0 <= group["momentum"] < 1, "momentum", group["momentum"], "in [0, 1)")
        is_nesterov = not group["nesterov"] or group["momentum"] > 0
        require(is_nesterov, "nesterov", group["nesterov"], "False where momentum is 0")
        require(root is None or root > 0, "root_inv_override", root, "None or > 0")
        require(0 < group["matrix_eps"] < 1, "matrix_eps", group["matrix_eps"], "in (0, 1)")
        smallest = MAX_CONDITION ** -(root or UNIT_ROOT)
        allowed = f">= {smallest:.1e} where root_inv_override is {root}, or products of roots overflow"
        require(group["matrix_eps"] >= smallest, "matrix_eps", group["matrix_eps"], allowed)

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        return tile_blocks(shape, group["max_preconditioner_dim"], group)

    def cost(self, shape: Sequence[int], group: Group) -> float:
        eigh = EIGH_FLOPS / group["precondition_frequency"]
        # Two grams and two products every step; the eigenvalues of both factors in some.
        return sum(
            4.0 * rows * columns * (rows + columns) + eigh * (rows**3 + columns**3)
            for rows, columns in tile_shapes(self.blocks(shape, group))
        )

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        blocks = self.blocks(shape, group)
        pairs = [pair_state(name, blocks) for name in PAIRS]
        return pairs + [moment_state(name, blocks) for name in moment_names(group)]

    def compute(self, units: list[Units], group: Group) -> list[Tensor]:
        directions = [torch.empty_like(entry.values) for entry in units]
        tiles = tiles_of(units, directions, self.turns(units), PAIRS, moment_names(group))
        have_roots = have_both([tile.pairs["roots"] for tile in tiles])
        for has_roots in (True, False):
            same = [tile for tile, has in zip(tiles, have_roots, strict=True) if has == has_roots]

            def kind(tile: Tile, has_roots: bool = has_roots) -> tuple[int, bool]:
                return tile.step, is_due(tile.turn, tile.step, group, has_roots=has_roots)

            for batch in batches_of(same, kind):
                precondition(batch, group, has_roots=has_roots)
        return directions

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        lr = float(group["lr"])
        for param, direction in zip(shards.params, directions, strict=True):
            if group["weight_decay"]:
                param.mul_(1 - lr * group["weight_decay"])
            param.add_(direction, alpha=-lr)


def moment_names(group: Group) -> list[str]:
    """State of one number per element that the hyperparameters ask for."""
    grafting_sq = ["grafting_sq"] if group["grafting"] in SCALED_GRAFTINGS else []
    return ["exp_avg", *grafting_sq, *(["momentum_buffer"] if group["momentum"] > 0 else [])]


def uses_roots(step: int, group: Group, *, has_roots: bool) -> bool:
    """Whether preconditioning has started. By default it does not end again where the frequency is raised later."""
    start = group["start_preconditioning_step"]
    return step >= start if start > 0 else has_roots or step >= group["precondition_frequency"]


def is_due(turn: int, step: int, group: Group, *, has_roots: bool) -> bool:
    """Whether the roots of a tile are computed in this step: all that are missing, of the others those whose turn it is."""
    frequency = group["precondition_frequency"]
    is_first = step == group["start_preconditioning_step"]
    is_turn = is_first or not has_roots or step % frequency == turn % frequency
    return is_turn and uses_roots(step, group, has_roots=has_roots)


def have_both(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Whether both roots were ever computed: state starts as zeros, and a root is positive definite, its corner too."""
    flags = has_values([root[:1, :1] for pair in pairs for root in pair])
    return [left and right for left, right in zip(flags[::2], flags[1::2], strict=True)]


def precondition(batch: Sequence[Tile], group: Group, *, has_roots: bool) -> None:
    """One step of tiles of one shape: update their state and fill their directions."""
    beta1, beta2 = group["betas"]
    step = batch[0].step
    gradients = stacked([tile.gradient for tile in batch])
    add_grams(batch, gradients, beta2)
    if is_due(batch[0].turn, step, group, has_roots=has_roots):
        has_roots = compute_roots(batch, bias_correction(beta2, step), group) or has_roots
    moments = [tile.moments["exp_avg"] for tile in batch]
    torch._foreach_lerp_(moments, each(gradients), 1 - beta1)
    moment = stacked(moments) / bias_correction(beta1, step)
    update = grafted = grafted_direction(batch, gradients, moment, group)
    if has_roots and uses_roots(step, group, has_roots=has_roots):
        left, right = (stacked([tile.pairs["roots"][side] for tile in batch]) for side in (0, 1))
        update = left @ moment @ right
        if group["grafting"] is not None:
            norms = norms_of(update) + group["eps"]
            # A zero update stays zero, without eps too.
            update.mul_(norms_of(grafted) / norms.masked_fill_(norms == 0, 1))
    store([tile.direction for tile in batch], with_momentum(batch, update, group))


def compute_roots(batch: Sequence[Tile], correction: float, group: Group) -> bool:
    """Inverse roots of both factors; where there are none, the last ones stay. Returns whether both were found."""
    root = group["root_inv_override"] or UNIT_ROOT
    # Grafting takes no length from the roots; their own, of a small p and small gradients, may lie outside of fp32.
    scale_root = root if group["grafting"] is None else UNIT_ROOT
    found = [False, False]
    for side in (0, 1):
        factors = stacked([tile.pairs["factors"][side] for tile in batch]) / correction
        roots = inverse_root(factors, root, relative_eps=group["matrix_eps"], scale_root=scale_root)
        if roots is not None:
            store([tile.pairs["roots"][side] for tile in batch], roots)
            found[side] = True
            continue
        warn_caller(
            f"no eigenvalues were found for a factor of parameter '{batch[0].name}' (tile {batch[0].index}, step "
            f"{batch[0].step}), in fp64 either; its last root stays in use, or the grafted direction where there is none"
        )
    return all(found)


def grafted_direction(batch: Sequence[Tile], gradients: Tensor, moment: Tensor, group: Group) -> Tensor:
    """The direction whose length is taken over, and which is the update before preconditioning starts."""
    grafting, beta2 = group["grafting"], group["betas"][1]
    if grafting not in SCALED_GRAFTINGS:
        return moment
    decay = 1.0 if grafting == "adagrad" else beta2
    squares = [tile.moments["grafting_sq"] for tile in batch]
    torch._foreach_mul_(squares, decay)
    torch._foreach_addcmul_(squares, each(gradients), each(gradients), value=weight_of(decay))
    square = stacked(squares)
    root = (square / bias_correction(beta2, batch[0].step)).sqrt_() if grafting == "adam" else square.sqrt()
    root.add_(group["grafting_eps"])
    return torch.div(moment, root, out=root)


def with_momentum(batch: Sequence[Tile], update: Tensor, group: Group) -> Tensor:
    if group["momentum"] == 0:
        return update
    buffers = [tile.moments["momentum_buffer"] for tile in batch]
    torch._foreach_mul_(buffers, group["momentum"])
    torch._foreach_add_(buffers, each(update))
    momentum = stacked(buffers)
    return update.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum


def weight_of(decay: float) -> float:
    """Weight of what is new in a moving average; without decay it is a sum."""
    return 1 - decay if decay < 1 else 1.0


def bias_correction(decay: float, step: int) -> float:
    """What a moving average that started at zero has to be divided by; a sum is taken as it is."""
    return 1 - decay**step if decay < 1 else 1.0


def norms_of(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
