"""What a rule returns, checked where it is used: a mistake in it is named, and not a shape error far from its cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from vescale_optim.optimizers.rule import Rule, StateSpec
from vescale_optim.sharding.blocks import Blocks


def check_is_rule(name: str, rule: object) -> None:
    """Raise TypeError where what should be a rule is none, or cannot update anything."""
    if not isinstance(rule, Rule):
        kind = f"the class {rule.__name__}" if isinstance(rule, type) else type(rule).__name__
        raise TypeError(f"the rule of algorithm {name!r} is {kind}; give an instance of a Rule, as adamw_beside() does")
    if type(rule).apply is Rule.apply:
        raise TypeError(f"{type(rule).__name__} has no apply; a rule updates parameters there")


def check_blocks(rule: Rule, blocks: object, name: str, shape: Sequence[int]) -> Blocks:
    """What `rule.blocks` returned for a parameter."""
    if not isinstance(blocks, Blocks):
        raise TypeError(
            f"{type(rule).__name__}.blocks returned {type(blocks).__name__} for parameter '{name}' of shape {tuple(shape)}; "
            "return Blocks, for example Blocks.rows(shape, 1)"
        )
    if tuple(blocks.shape) != tuple(shape):
        raise ValueError(
            f"{type(rule).__name__}.blocks returned blocks of shape {blocks.shape} for parameter '{name}' of shape "
            f"{tuple(shape)}; they must cover the parameter"
        )
    return blocks


def check_state_specs(rule: Rule, specs: Sequence[StateSpec], blocks: Blocks, name: str) -> None:
    """Raise ValueError where state is given twice, or for another number of units than the parameter has."""
    if not isinstance(specs, list | tuple):
        raise TypeError(f"{type(rule).__name__}.state_spec returned {type(specs).__name__}; return a list of StateSpecs")
    for spec in specs:
        if not isinstance(spec, StateSpec):
            raise TypeError(f"{type(rule).__name__}.state_spec returned {spec!r} among its entries; return StateSpecs")
    names = [spec.name for spec in specs]
    for spec in specs:
        where = f"{type(rule).__name__}.state_spec gives state '{spec.name}' of parameter '{name}'"
        if names.count(spec.name) > 1 or spec.name in ("step", "master"):
            raise ValueError(f"{where} a name that is taken; 'step' and 'master' belong to the optimizer")
        numels = spec.unit_numels
        if isinstance(numels, tuple) and len(numels) != blocks.num_units:
            raise ValueError(
                f"{where} sizes for {len(numels)} units, but its blocks have {blocks.num_units}; give one size for each, or "
                "one number for all"
            )


def check_returned(
    rule: Rule, method: str, returned: Sequence[Tensor], numels: Sequence[int], names: Sequence[str]
) -> Sequence[Tensor]:
    """What `prepare` or `compute` returned: one flat tensor for each entry."""
    what = f"{type(rule).__name__}.{method} returned"
    if not isinstance(returned, list | tuple) or len(returned) != len(numels):
        found = f"{len(returned)} tensors" if isinstance(returned, list | tuple) else type(returned).__name__
        raise ValueError(f"{what} {found} for {len(numels)} entries; return a list with one flat tensor for each")
    for tensor, numel, name in zip(returned, numels, names, strict=True):
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != (numel,):
            found = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{what} {found} for parameter '{name}'; return it flat, of shape ({numel},)")
    return returned


class NoDirections(list[Tensor]):
    """The directions of an element-wise rule that measures nothing: there are none, and whoever reads some is told."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule

    def __iter__(self) -> Iterator[Tensor]:
        name = type(self._rule).__name__
        raise RuntimeError(f"{name}.apply reads directions, but {name} has no compute, which would make them")
