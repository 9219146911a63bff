"""ShardedSOAP: Adam in the eigenbasis of Shampoo's factors.

Source: Vyas et al., "SOAP" (arXiv 2409.11321), in the order of its authors' reference implementation, which keeps the
first updates bounded. For a tile with gradient G, all in fp32:

    step 1       L = (1 - b) G G^T,  R = (1 - b) G^T G,  Q_L and Q_R their eigenbases; the parameter stays as it is
                 (where G = 0, the tile does this in the first step in which it is not)
    step 1 + s   g = Q_L^T G Q_R                              in the basis that knows nothing of G yet
                 M <- b1 M + (1 - b1) g,   V <- b2 V + (1 - b2) g^2
                 p <- p - lr c Q_L (M / (sqrt(V) + eps)) Q_R^T,   c = sqrt(1 - b2^s) / (1 - b1^s);   p <- p (1 - lr wd)
                 L <- b L + (1 - b) G G^T, R alike
                 every `precondition_frequency` steps:  Q <- qr(L Q), columns by descending eigenvalue estimate; M is
                 rotated into the new basis, V is permuted as the columns were
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale_optim.caller_warnings import warn_caller
from vescale_optim.optimizers.adamw import adamw_beside, check_adamw_group
from vescale_optim.optimizers.base import Params
from vescale_optim.optimizers.groups import require
from vescale_optim.optimizers.matrix_roots import QR_FLOPS, eigenbasis, permuted, power_step
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

# State of one matrix per side of a tile.
PAIRS = ("factors", "bases")
# State of one number per element, in the eigenbasis.
MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedSOAP(TiledOptimizer):
    """SOAP for matrices and AdamW for the rest, sharded over `mesh`.

    A matrix lives whole on its owner; one with a dimension above `max_precond_dim` = b is cut into tiles of b x b, each a
    matrix of its own. Parameters of three and more dimensions are stacks of matrices. Parameters of fewer than two
    dimensions and groups with `algorithm="adamw"` are updated by AdamW. Embeddings and heads are matrices like any other
    unless a group says otherwise.

    State per parameter element of a square matrix: 16 bytes of factors and bases, 8 of moments.

    Args:
        params: what torch.optim takes (parameters, named parameters, groups), or a module.
        mesh: device mesh of the ranks that train together.
        lr: step length; an element moves by about this much a step.
        betas: decay of the first and second moment.
        shampoo_beta: decay of the factors; -1 for the second of `betas`.
        eps: added to the root of the second moment.
        weight_decay: decoupled, after the update.
        precondition_frequency: steps between two refreshes of the basis of a tile. The tiles of all parameters take
            turns, shape by shape (`turns_of`): the one of turn t is due when (step - 1) % frequency == t % frequency.
        max_precond_dim: b.
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
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        adamw_lr: float | Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        **options: object,
    ) -> None:
        defaults = dict(
            lr=lr,
            betas=betas,
            shampoo_beta=shampoo_beta,
            eps=eps,
            weight_decay=weight_decay,
            precondition_frequency=precondition_frequency,
            max_precond_dim=max_precond_dim,
            **MATRIX_LAYOUT,
        )
        others = adamw_beside(adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay)
        super().__init__(params, mesh, defaults, algorithm="soap", others=others, **options)

    def check_group(self, group: Group) -> None:
        # The shared hyperparameters have the same ranges as AdamW's.
        check_adamw_group(group)
        if group["algorithm"] == "adamw":
            return
        beta = group["shampoo_beta"]
        require(group["eps"] > 0, "eps", group["eps"], "> 0")
        require(beta == -1 or 0 <= beta < 1, "shampoo_beta", beta, "-1 or in [0, 1)")
        for name in ("precondition_frequency", "max_precond_dim"):
            require(is_positive_int(group[name]), name, group[name], "an integer >= 1")

    def blocks(self, shape: Sequence[int], group: Group) -> Blocks:
        return tile_blocks(shape, group["max_precond_dim"], group)

    def cost(self, shape: Sequence[int], group: Group) -> float:
        frequency = group["precondition_frequency"]
        # Every step two grams, two products there and two back; in some a QR and a product per side, and the rotation.
        return sum(
            (6.0 + 4.0 / frequency) * rows * columns * (rows + columns)
            + (QR_FLOPS + 2.0) / frequency * (rows**3 + columns**3)
            for rows, columns in tile_shapes(self.blocks(shape, group))
        )

    def state_spec(self, shape: Sequence[int], group: Group) -> list[StateSpec]:
        blocks = self.blocks(shape, group)
        pairs = [pair_state(name, blocks) for name in PAIRS]
        return pairs + [moment_state(name, blocks) for name in MOMENTS]

    def compute(self, units: list[Units], group: Group) -> list[Tensor]:
        directions = [torch.empty_like(entry.values) for entry in units]
        tiles = tiles_of(units, directions, self.turns(units), PAIRS, MOMENTS)
        has_basis = has_values([tile.pairs["bases"][0] for tile in tiles])
        started = [tile for tile, has in zip(tiles, has_basis, strict=True) if has]
        waiting = [tile for tile, has in zip(tiles, has_basis, strict=True) if not has]
        if waiting:
            start(waiting, group)
        for batch in batches_of(started, lambda tile: is_due(tile.turn, tile.step, group)):
            precondition(batch, group)
        return directions

    def apply(self, shards: Shards, directions: list[Tensor], group: Group) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for param, direction, step in zip(shards.params, directions, shards.steps, strict=True):
            if step == 1:
                continue
            correction = math.sqrt(1 - beta2 ** (step - 1)) / (1 - beta1 ** (step - 1))
            param.add_(direction, alpha=-lr * correction)
            if group["weight_decay"]:
                param.mul_(1 - lr * group["weight_decay"])


def is_due(turn: int, step: int, group: Group) -> bool:
    """Whether the bases of a tile are refreshed in this step; tiles take turns."""
    frequency = group["precondition_frequency"]
    return (step - 1) % frequency == turn % frequency


def start(tiles: Sequence[Tile], group: Group) -> None:
    """Find the first bases of tiles that have none; their direction is zero in this step.

    Tiles without any gradient wait for one: in an arbitrary basis, which the next refresh would turn far, the second
    moment would be of no use (zero-initialised layers and unused experts start so).
    """
    torch._foreach_zero_([tile.direction for tile in tiles])
    has_gradient = has_values([tile.gradient for tile in tiles])
    for batch in batches_of([tile for tile, has in zip(tiles, has_gradient, strict=True) if has], lambda tile: None):
        add_to_factors(batch, stacked([tile.gradient for tile in batch]), group)
        bases = [eigenbasis(side_of(batch, "factors", side)) for side in (0, 1)]
        if any(basis is None for basis in bases):
            warn_caller(
                f"no eigenvectors were found for a factor of parameter '{batch[0].name}' (tile {batch[0].index}, step "
                f"{batch[0].step}), in fp64 either; it is left as it is and tried again in the next step"
            )
            continue
        for side in (0, 1):
            store([tile.pairs["bases"][side] for tile in batch], bases[side])


def precondition(batch: Sequence[Tile], group: Group) -> None:
    """One step of tiles of one shape: update their state and fill their directions."""
    gradients = stacked([tile.gradient for tile in batch])
    store([tile.direction for tile in batch], adam_direction(batch, gradients, group))
    # After the update: a basis that already knows a gradient would give it a second moment too small.
    add_to_factors(batch, gradients, group)
    if is_due(batch[0].turn, batch[0].step, group):
        refresh_bases(batch)


def add_to_factors(batch: Sequence[Tile], gradients: Tensor, group: Group) -> None:
    decay = group["betas"][1] if group["shampoo_beta"] == -1 else group["shampoo_beta"]
    add_grams(batch, gradients, decay)


def adam_direction(batch: Sequence[Tile], gradients: Tensor, group: Group) -> Tensor:
    """Adam's direction, without bias correction, computed in the eigenbasis and turned back."""
    beta1, beta2 = group["betas"]
    left, right = (side_of(batch, "bases", side) for side in (0, 1))
    projected = left.mT @ gradients @ right
    averages, squares = ([tile.moments[name] for tile in batch] for name in MOMENTS)
    torch._foreach_lerp_(averages, each(projected), 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, each(projected), each(projected), value=1 - beta2)
    root = stacked(squares).sqrt().add_(group["eps"])
    return left @ torch.div(stacked(averages), root, out=root) @ right.mT


def refresh_bases(batch: Sequence[Tile]) -> None:
    """Follow the factors; the moments go along into the new bases."""
    average = stacked([tile.moments["exp_avg"] for tile in batch])
    square = stacked([tile.moments["exp_avg_sq"] for tile in batch])
    left, right = (side_of(batch, "bases", side) for side in (0, 1))
    average = left @ average @ right.mT
    for side, old in enumerate((left, right)):
        bases, order = power_step(side_of(batch, "factors", side), old)
        square = permuted(square, order, side - 2)
        store([tile.pairs["bases"][side] for tile in batch], bases)
    left, right = (side_of(batch, "bases", side) for side in (0, 1))
    store([tile.moments["exp_avg"] for tile in batch], left.mT @ average @ right)
    store([tile.moments["exp_avg_sq"] for tile in batch], square)


def side_of(batch: Sequence[Tile], name: str, side: int) -> Tensor:
    """A state of one side of every tile, to be read."""
    return stacked([tile.pairs[name][side] for tile in batch])
