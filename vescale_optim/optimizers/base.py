"""ShardedOptimizer: a torch optimizer whose rule runs on shards.

It turns parameters, groups or a module into param groups, lets the storage plan and re-home them by the blocks that the
rule declares, and drives prepare, compute and apply. A subclass is a rule with defaults; see the README for one in 30
lines.

    step:  flush gradients, agree -> for every bucket: for every group: prepare, compute, apply; send the bucket
           -> parameters complete on all ranks

Parameters live in one storage per kind and device mesh (`Storage`): plain ones are replicated, DTensors stay as they are.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_optim.caller_warnings import warn_caller
from vescale_optim.optimizers.declaration import Declaration
from vescale_optim.optimizers.declaring import declared_blocks
from vescale_optim.optimizers.describe import describe_algorithms, describe_storages
from vescale_optim.optimizers.groups import (
    check_logical,
    check_mesh,
    check_mesh_covers,
    check_mesh_is_covered,
    check_plain_mesh,
    explain_difference,
    hyperparameters_of,
    names_of,
    record_of,
    require,
    unknown_keyword,
    warn_about_misspelt,
)
from vescale_optim.optimizers.rule import Group, Rule, StateSpec
from vescale_optim.optimizers.rule_checks import check_is_rule
from vescale_optim.optimizers.state import check_rule, check_state, copy_state, reset_state
from vescale_optim.optimizers.torch_state import full_state_dict
from vescale_optim.optimizers.update import BucketUpdate, run
from vescale_optim.sharding.agreement import Agreement, fingerprint
from vescale_optim.sharding.blocks import Blocks
from vescale_optim.sharding.dtensor_storage import DTensorStorage
from vescale_optim.sharding.eager import eager
from vescale_optim.sharding.meshes import flat_mesh, mesh_group
from vescale_optim.sharding.parameters import ManagedParameter, check_dtensor, check_plain, forget_gradient
from vescale_optim.sharding.storage import ReplicatedStorage
from vescale_optim.sharding.storage_protocol import Storage

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


# Flags of torch's optimizers that groups and checkpoints may carry, and that would change the result.
UNSUPPORTED = ("amsgrad", "capturable", "differentiable", "maximize")


_LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


class ShardedOptimizer(Rule, torch.optim.Optimizer):
    """Base of all sharded optimizers.

    Args:
        params: parameters, named parameters, groups (as torch.optim takes them), or a module.
        mesh: the ranks that train together. Plain parameters are equal on all of them; the meshes of DTensor parameters
            must lie within it.
        defaults: hyperparameters of a group that does not say otherwise.
        algorithm: name of this rule in `group["algorithm"]`, and so in checkpoints; None for the name of the class.
        others: further rules by name, each an instance and the defaults of its groups, as `adamw_beside` gives them. Groups
            choose one with `algorithm=`; the first one gets every parameter for which `is_fallback` is true.
        grad_sync: "reduce_scatter": the optimizer averages gradients over the mesh during backward, and `p.grad` is a
            RaggedTensor afterwards. "none": gradients are already equal on all ranks (DistributedDataParallel).
        master_dtype: torch.float32 keeps a wider copy of low-precision parameters, and state, in that dtype.
        grad_dtype: dtype in which gradients are added up and sent; None for the parameter's.
        bucket_mib: size of a bucket in MiB; None for 16, and 0.25 for each rank where that is more, so that shards stay
            worth a message. Buckets grow further until padding is at most 3 %.
        exchange_mib: at most this many MiB of buffers on each rank while units of DTensor parameters travel to their
            owners and back; a single parameter may need more.
        broadcast_parameters: compare plain parameters at construction and take rank 0's where ranks differ; DTensors stay
            as whoever sharded them made them.
        overlap_forward: `step()` returns while updated parameters still travel, and the first use of each waits. Not
            for models that are compiled or replayed from CUDA graphs, which use parameters without asking torch.

    Raises:
        ValueError: bad hyperparameters or parameters, by name; or ranks that disagree, on all of them.
        TypeError: a keyword that the optimizer does not have.
    """

    def __init__(
        self,
        params: Params,
        mesh: DeviceMesh,
        defaults: dict[str, Any],
        *,
        algorithm: str | None = None,
        others: Mapping[str, tuple[Rule, dict[str, Any]]] | None = None,
        grad_sync: Literal["reduce_scatter", "none"] = "reduce_scatter",
        master_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        bucket_mib: float | None = None,
        exchange_mib: float = 256,
        broadcast_parameters: bool = True,
        overlap_forward: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            raise unknown_keyword(type(self), next(iter(unknown)))
        check_mesh(mesh)
        require(grad_sync in ("reduce_scatter", "none"), "grad_sync", grad_sync, '"reduce_scatter" or "none"')
        if bucket_mib is None:
            bucket_mib = max(16, 0.25 * mesh.size())
        require(0 < bucket_mib < math.inf, "bucket_mib", bucket_mib, "None or a number > 0")
        require(0 < exchange_mib < math.inf, "exchange_mib", exchange_mib, "a number > 0")
        require(master_dtype in (None, torch.float32, torch.float64), "master_dtype", master_dtype, "None or torch.float32")
        floats = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)
        require(grad_dtype in floats, "grad_dtype", grad_dtype, "None or a floating dtype of 16 bits or more")
        if isinstance(params, set):
            raise TypeError("params is a set, whose order differs between ranks; give a list")
        if "lr" not in defaults:
            raise TypeError(f"the defaults of {type(self).__name__} are {sorted(defaults)}; every rule has an lr")
        self._algorithm = algorithm or type(self).__name__
        self._others = dict(others or {})
        for name, rule in [(self._algorithm, self), *((name, rule) for name, (rule, _) in self._others.items())]:
            check_is_rule(name, rule)
        self._options = dict(
            reduces_gradients=grad_sync == "reduce_scatter",
            master_dtype=master_dtype,
            grad_dtype=grad_dtype,
            bucket_bytes=int(bucket_mib * 2**20),
            exchange_bytes=int(exchange_mib * 2**20),
            broadcasts=broadcast_parameters,
        )
        self._mesh = mesh
        self._overlaps_forward = overlap_forward
        self._forget_plans()
        groups = self.module_groups(params) if isinstance(params, nn.Module) else params
        defaults = {"algorithm": self._algorithm, "rule_version": self.version, **defaults}
        try:
            super().__init__(groups, defaults)
        except (TypeError, ValueError) as error:
            self._tell_others(error)
            raise
        self._manage_parameters()

    # -- groups ------------------------------------------------------------------------------------------------------

    def module_groups(self, module: nn.Module) -> list[dict[str, Any]]:
        """Param groups of a module; override to route parameters by their role."""
        return [{"params": list(module.named_parameters())}]

    @classmethod
    def declared_blocks(cls, module: nn.Module) -> dict[str, Blocks]:
        """What this optimizer over `module` would need whole, by parameter name; `fully_shard` asks before there is one."""
        return declared_blocks(cls, module)

    def check_group(self, group: Group) -> None:
        """Raise ValueError where a hyperparameter of a group is out of range."""

    def is_fallback(self, shape: Sequence[int], group: Group) -> bool:
        """Whether a parameter of this shape cannot be updated by the main rule and goes to the first of `others`."""
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters join at the next `zero_grad` or `step`, on all ranks. A mixed group becomes two."""
        before = len(self.param_groups)
        try:
            for group in self._split_group(dict(param_group)):
                super().add_param_group(group)
                try:
                    self._check_added(self.param_groups[-1])
                except ValueError as error:
                    if group.get("algorithm") in (None, self._algorithm, param_group.get("algorithm")):
                        raise
                    raise ValueError(
                        f"{error} (in what goes to {group['algorithm']!r} of a group of both; {group['algorithm']}_lr and "
                        "so on in the group are for that part alone)"
                    ) from None
        except Exception:
            del self.param_groups[before:]
            raise

    def _split_group(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """One ordinary group per algorithm, each with its own hyperparameters; what the group itself says wins."""
        algorithm = group.get("algorithm")
        if algorithm is not None and algorithm != self._algorithm and algorithm not in self._others:
            names = ", ".join(map(repr, (self._algorithm, *self._others)))
            raise ValueError(f"a group has algorithm {algorithm!r}; {type(self).__name__} knows {names}")
        if not self._others or isinstance(group["params"], set):
            return [group]  # torch refuses sets: their order differs between runs
        entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        fallback_name = next(iter(self._others))
        chosen: dict[str, list[Any]] = {}
        for entry in entries:
            param = entry[1] if isinstance(entry, tuple) else entry
            needs_fallback = algorithm == self._algorithm or algorithm is None
            is_fallback = needs_fallback and isinstance(param, Tensor) and self.is_fallback(param.shape, group)
            chosen.setdefault(fallback_name if is_fallback else algorithm or self._algorithm, []).append(entry)
        if not entries:
            chosen[algorithm or self._algorithm] = []
        result = []
        for name in sorted(chosen, key=lambda name: name != self._algorithm):
            part = {**group, "params": chosen[name], "algorithm": name}
            if name in self._others:
                prefix, (_, defaults) = f"{name}_", self._others[name]
                said = {key: value for key, value in group.items() if not key.startswith(prefix)}
                prefixed = {
                    key.removeprefix(prefix): value for key, value in group.items() if key.startswith(prefix)
                }
                part = {**defaults, **said, **prefixed, "params": chosen[name], "algorithm": name}
            part["rule_version"] = self.rule_of(part).version
            result.append(part)
        return result

    def _check_added(self, group: Group) -> None:
        self._check_hyperparameters(group)
        warn_about_misspelt(group, {*self.defaults, *chain(*(defaults for _, defaults in self._others.values()))})
        for name, param in zip(names_of(group, len(self.param_groups) - 1), group["params"], strict=True):
            check_logical(name, param)
            if param.requires_grad:
                try:
                    self.rule_of(group).blocks(param.shape, group)
                except ValueError as error:
                    raise ValueError(f"parameter '{name}': {error}") from None

    def _check_hyperparameters(self, group: Group) -> None:
        lr = group["lr"]
        if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.device.type != "cpu"):
            raise ValueError(
                f"lr is a tensor of shape {tuple(lr.shape)} on {lr.device}; give a number or a CPU tensor of one element "
                "(reading it from a device would stop the host in every step)"
            )
        for name in UNSUPPORTED:
            require(not group.get(name), name, group.get(name), "False: sharded optimizers do not have it")
        try:
            self.check_group(group)
        except TypeError as error:
            raise ValueError(f"hyperparameters {hyperparameters_of(group)}: {error}; numbers must be numbers") from None

    def rule_of(self, group: Group) -> Rule:
        """The rule that updates a group: this optimizer, or one of its others."""
        others = self._others.get(group.get("algorithm"))
        return self if others is None else others[0]

    # -- planning ----------------------------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        """Nothing is managed yet; the first use plans, on all ranks."""
        self._storages: dict[object, Storage] = {}
        self._homes: dict[Tensor, tuple[Storage, int]] = {}
        self._declarations: dict[Tensor, Declaration] = {}
        self._loads: dict[int, float] = {}

    @property
    def _is_planned(self) -> bool:
        return bool(self._storages)

    def _agreement(self, topic: str = "construction of an optimizer, or parameters that join it") -> Agreement:
        return Agreement(mesh_group(self._mesh), topic)

    def _manage_parameters(self) -> None:
        """Plan and give state to parameters that are not managed yet, and let go of those that left the groups; on all
        ranks alike."""
        self._release_departed()
        try:
            new = self._unmanaged()
            declared = [self._declared(name, param, group) for name, param, group in new]
            self._check_declared(declared)
        except (TypeError, ValueError) as error:
            self._tell_others(error)
            raise
        self._agreement().require_same(
            [repr(self._options)] + [record_of(name, param, group) for name, param, group in new], explain_difference
        )
        # Without any parameter there is still a storage to agree through.
        storages = [self._storage_for(param) for _, param, _ in new] or [self._storage_for(None)]
        by_storage: dict[int, list[int]] = {}
        for number, storage in enumerate(storages[: len(new)]):
            by_storage.setdefault(id(storage), []).append(number)
        for storage in self._storages.values():
            numbers = by_storage.get(id(storage), [])
            if not numbers and storage.parameters:
                continue
            first = len(storage.parameters)
            storage.add([declared[number] for number in numbers])
            entries = [(index, *new[number][1:]) for index, number in enumerate(numbers, first)]
            self._homes.update({param: (storage, index) for index, param, _ in entries})
            self._make_state(storage, entries)

    def _tell_others(self, error: Exception) -> None:
        """Before an error that other ranks may not have: they would wait for this one. Raises where they have another."""
        self._agreement().require_same([f"{type(error).__name__}: {error}"], explain_difference)

    def _check_declared(self, parameters: Sequence[ManagedParameter]) -> None:
        """Raise where parameters cannot live in a storage on the optimizer's mesh; local, unlike what comes after."""
        plain = [managed for managed in parameters if not isinstance(managed.param, DTensor)]
        for managed in parameters:
            if isinstance(managed.param, DTensor):
                name, param = managed.name, managed.param
                check_mesh_covers(self._mesh, param.device_mesh, name, param)
                if self._options["reduces_gradients"]:
                    check_mesh_is_covered(self._mesh, param.device_mesh, name, param)
                check_dtensor(managed)
        if plain:
            if not any(isinstance(param, DTensor) for _, param, _ in self._trainable()):
                check_plain_mesh(self._mesh, plain[0].name, plain[0].param)
            check_plain(plain, self._mesh)

    def _storage_for(self, param: Tensor | None) -> Storage:
        """The storage of parameters that live like this one, made where there is none yet; on all its ranks alike."""
        options = self._options
        key = param.device_mesh if isinstance(param, DTensor) else "replicated"
        if key not in self._storages and isinstance(param, DTensor):
            self._storages[key] = DTensorStorage(
                param.device_mesh,
                master_dtype=options["master_dtype"],
                exchange_bytes=options["exchange_bytes"],
                loads=self._loads,
            )
        elif key not in self._storages:
            self._storages[key] = ReplicatedStorage(
                flat_mesh(self._mesh),
                reduces_gradients=options["reduces_gradients"],
                master_dtype=options["master_dtype"],
                grad_dtype=options["grad_dtype"],
                bucket_bytes=options["bucket_bytes"],
                broadcasts=options["broadcasts"],
            )
        return self._storages[key]

    def _declared(self, name: str, param: Tensor, group: Group) -> ManagedParameter:
        """A parameter with what its rule declares about it."""
        rule = self.rule_of(group)
        declaration = self._declarations[param] = Declaration.of(rule, name, param.shape, group)
        return ManagedParameter(
            name,
            param,
            declaration.blocks,
            rule.cost(param.shape, group),
            is_elementwise=rule.is_elementwise,
            has_unit_state=any(spec.where == "unit" for spec in declaration.specs),
            wire_dtype=declaration.wire_dtype,
            num_measured=rule.num_measured(param.shape, group),
        )

    def _release_departed(self) -> None:
        """Let go of storages none of whose parameters is in a group any more: accelerate swaps them for sharded ones."""
        departed = self._departed()
        if departed:
            names = [managed.name for key in departed for managed in self._storages[key].parameters]
            self._agreement("parameters that left their groups").require_same(names, explain_difference)
        for key in departed:
            storage = self._storages.pop(key)
            storage.retire()
            for managed in storage.parameters:
                del self._homes[managed.param], self._declarations[managed.param]
                self.state.pop(managed.param, None)

    def _departed(self) -> list[object]:
        """Keys of the storages whose parameters were all swapped for others."""
        members = {param for group in self.param_groups for param in group["params"]}
        return [
            key
            for key, storage in self._storages.items()
            if storage.parameters and members.isdisjoint(managed.param for managed in storage.parameters)
        ]

    def _make_state(self, storage: Storage, new: Sequence[tuple[int, Tensor, Group]]) -> None:
        """State exists from construction, on every rank alike, whether a parameter ever gets a gradient or not."""
        by_spec: dict[tuple[str, str, torch.dtype | None, float], dict[int, StateSpec]] = {}
        for index, param, group in new:
            for spec in self.rule_of(group).state_spec(param.shape, group):
                by_spec.setdefault((spec.name, spec.where, spec.dtype, spec.fill), {})[index] = spec
        made: dict[int, dict[str, DTensor]] = {index: {} for index, _, _ in new}
        for (name, where, dtype, fill), specs in by_spec.items():
            if where == "parameter":
                tensors = storage.allocate_like_parameters(list(specs), dtype, fill)
            else:
                numels = {index: spec.unit_numels for index, spec in specs.items()}
                tensors = storage.allocate_per_unit(numels, dtype, fill)
            for index, tensor in tensors.items():
                made[index][name] = tensor
        for index, tensor in storage.masters([index for index, _, _ in new]).items():
            made[index]["master"] = tensor
        for index, param, _ in new:
            earlier = self.state.get(param, {})
            state = {"step": torch.zeros((), device="cpu"), **made[index]}
            check_state(storage.parameters[index].name, state, earlier)
            self.state[param] = state
            copy_state(state, earlier)

    def _unmanaged(self) -> list[tuple[str, Tensor, Group]]:
        """Parameters that require gradients and that no storage looks after yet, each once."""
        new = {id(entry[1]): entry for entry in self._trainable() if entry[1] not in self._homes}
        return list(new.values())

    def _has_to_plan(self) -> bool:
        """Whether the groups hold other parameters than the storages do."""
        return bool(self._unmanaged() or self._departed())

    def _trainable(self) -> Iterable[tuple[str, Tensor, Group]]:
        """(name, parameter, group) of all parameters that require gradients, in the order of groups."""
        for number, group in enumerate(self.param_groups):
            for name, param in zip(names_of(group, number), group["params"], strict=True):
                if param.requires_grad:
                    yield name, param, group

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient on any rank; collective. A compiled loop runs it as it is.

        Raises:
            RuntimeError: on all ranks, where one found a fault; parameters and state are untouched then.
            ValueError: on all ranks, where hyperparameters or the set of parameters differ.
        """
        return eager(ShardedOptimizer._step)(self, closure)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _step(self, closure: Callable[[], Tensor] | None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_planned:
            if any(param.grad is not None and not isinstance(param, DTensor) for _, param, _ in self._trainable()):
                warn_caller(
                    "this optimizer is a copy that had not planned yet, so gradients were local until now: step() averages "
                    "them, but clipping before it saw one rank's own; call zero_grad() once after copying"
                )
            self._manage_parameters()
        else:
            # Nothing is asked of storages whose parameters have been swapped: their modules have let them go.
            self._release_departed()
            if not self._is_planned:
                self._manage_parameters()
        for storage in self._storages.values():
            storage.arrive()
        self._synchronize()
        if self._unmanaged():
            self._manage_parameters()
            self._synchronize()
        if not self._skips_step():
            self._update()
        return loss

    def _synchronize(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() cannot be captured in a CUDA graph: ranks agree on the host in every step; capture forward and "
                "backward alone"
            )
        hyperparameters = [hyperparameters_of(group) for group in self.param_groups]
        names, fault = [], None
        try:
            names = [name for name, _, _ in self._unmanaged()]
        except ValueError as error:
            fault = str(error)
        marks = fingerprint(hyperparameters), fingerprint(names)
        for storage in self._storages.values():
            agreed = storage.synchronize([marks[0], -marks[0], marks[1], -marks[1]], fault)
            if agreed[0] != -agreed[1]:
                storage.agreement.require_same(
                    [f"group {number}: {values}" for number, values in enumerate(hyperparameters)],
                    explain_difference,
                )
            if agreed[2] != -agreed[3]:
                storage.agreement.require_same([f"new parameter '{name}'" for name in names], explain_difference)
        for number, group in enumerate(self.param_groups):
            self._check_hyperparameters(group)
            self._check_declarations(names_of(group, number), group, hyperparameters[number])

    def _check_declarations(self, names: Sequence[str], group: Group, hyperparameters: Mapping[str, object]) -> None:
        """Raise where a group was edited so that its rule would need other blocks or state than parameters have."""
        for name, param in zip(names, group["params"], strict=True):
            declaration = self._declarations.get(param)
            if declaration is not None and not declaration.is_of(hyperparameters):
                self._declarations[param] = declaration.renewed(self.rule_of(group), name, param.shape, group)

    def _skips_step(self) -> bool:
        """Whether a rule cannot take the gradients (see `Rule.max_gradient`); the same on all ranks."""
        limits = [rule.max_gradient for rule in map(self.rule_of, self.param_groups) if rule.max_gradient is not None]
        if not limits:
            return False
        managed = list(self._homes.values())
        held = {}
        for number, (storage, index) in enumerate(managed):
            if storage.has_gradient(index) and storage.shard(index).numel():
                held[number] = storage.gradient(index)
        # A NaN is smallest and largest at once.
        extremes = [value.float() for grad in held.values() for value in torch.aminmax(grad)]
        largest = torch.stack(extremes).view(-1, 2).abs().amax(dim=1).tolist() if held else []
        bad = [number + 1 for number, value in zip(held, largest, strict=True) if not value <= min(limits)]
        (agreed,) = self._agreement("gradients that a rule cannot take").maximum([max(bad, default=0)])
        if agreed:
            storage, index = managed[agreed - 1]
            warn_caller(
                f"the gradient of parameter '{storage.parameters[index].name}' has NaN, infinite or huge entries: "
                f"all ranks skip this step, parameters and state are untouched (entries may be up to {min(limits):g})"
            )
        return agreed > 0

    def _update(self) -> None:
        number_of = {
            param: number for number, group in enumerate(self.param_groups) for param in group["params"]
        }
        updates = []
        for storage in self._storages.values():
            storage.refresh_copies()
            for bucket, members in enumerate(storage.bucket_members()):
                by_group: dict[int, list[int]] = {}
                for index in members:
                    number = number_of.get(storage.parameters[index].param)
                    if number is not None and storage.has_gradient(index):
                        by_group.setdefault(number, []).append(index)
                calls = [
                    (self.rule_of(self.param_groups[number]), self.param_groups[number], by_group[number])
                    for number in sorted(by_group)
                ]
                if calls:
                    updates.append(BucketUpdate(storage, bucket, calls, self.state.__getitem__))
        run(updates)
        for storage in self._storages.values():
            if self._overlaps_forward:
                storage.let_travel()
            else:
                storage.arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients. With grad_sync="reduce_scatter" `.grad` stays a sharded zero until the next flush, so that
        a rank whose next backward touches no parameter still takes part in clipping; the step skips such parameters.

        Parameters that were unfrozen or added join here; all ranks must call it then.
        """
        if not self._is_planned:
            self._manage_parameters()
        new = self._unmanaged()
        for _, param, _ in new:
            param.grad = None
        if self._has_to_plan():
            self._manage_parameters()
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._homes:
                    forget_gradient(param, set_to_none=set_to_none)
        for storage in self._storages.values():
            storage.clear_gradients(set_to_none=set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add up locally; the first backward outside, or `step()`, sends the sum.

        Concerns plain parameters; where a module is sharded (FSDP2), it decides itself when gradients are synchronised.
        """
        storage = self._storages.get("replicated")
        if storage is None or storage.reduction is None:
            return nullcontext()
        return storage.reduction.no_sync()

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch; tensors are this optimizer's own DTensors, and taking them communicates nothing.

        Only after all parameters were swapped for others, as accelerate does, must all ranks call: state is made anew.
        """
        if self._departed():
            self._manage_parameters()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of this optimizer, or of a single-device one with the same state names, at any world size.

        Tensors may be whole (plain), or DTensors of any placement (then every rank must call this). Values are copied
        into the sharded state and keep its dtype. Everything is checked before anything changes.

        Raises:
            ValueError: groups or shapes that do not fit, by parameter name.
        """
        if self._has_to_plan():
            self._manage_parameters()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        state_dict = self.adapt_state_dict(state_dict)
        saved = list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
        mine = [
            (name, param)
            for number, group in enumerate(self.param_groups)
            for name, param in zip(names_of(group, number), group["params"], strict=True)
        ]
        if len(saved) == len(mine) and len(state_dict["param_groups"]) == len(self.param_groups):
            self._check_rules(state_dict)
            for key, (name, param) in zip(saved, mine, strict=True):
                check_state(name, self.state.get(param, {}), state_dict["state"].get(key, {}))
            # A single-device optimizer's groups say less than ours; names are those of the parameters that are here.
            merged = [
                {**old, **{key: value for key, value in new.items() if key != "param_names"}}
                for old, new in zip(self.param_groups, state_dict["param_groups"], strict=True)
            ]
            for group in merged:
                self._check_hyperparameters(group)
            state_dict = {**state_dict, "param_groups": merged}
        self._load_groups(state_dict)
        for key, (_, param) in zip(saved, mine, strict=True):
            loaded = state_dict["state"].get(key, {})
            if loaded and param not in self._homes:
                # Frozen: it has no place in a storage until it is not, and waits as it came.
                self.state[param] = copy.deepcopy(dict(loaded))
                continue
            self._reset_state(param, loaded)
            copy_state(self.state.get(param, {}), loaded)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _check_rules(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the parameter, where the groups of a checkpoint mean other mathematics than ours."""
        for number, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=True)):
            for name, param in zip(names_of(group, number), group["params"], strict=True):
                if param in self.state:
                    check_rule(name, param.shape, self.rule_of(group), group, saved)

    def check_saved_group(self, name: str, param: Tensor, saved: Mapping[str, Any]) -> None:
        """Raise ValueError where state of a parameter, saved under the group `saved`, means something else here."""
        for group in self.param_groups:
            if param in self.state and any(param is member for member in group["params"]):
                check_rule(name, param.shape, self.rule_of(group), group, saved)

    def adapt_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state dict to be loaded, in the form of this optimizer; override to take those of others. Changes nothing."""
        return state_dict

    def full_state_dict(self, algorithm: str | None = None) -> dict[str, Any]:
        """The state as a single-device optimizer over the same groups has it, whole, on every rank; all ranks must call.

        Args:
            algorithm: only the groups of this algorithm, numbered anew: `torch.optim.Muon` takes "muon" of a ShardedMuon,
                and `torch.optim.AdamW` "adamw". None for all, which `load_state_dict` takes back.
        """
        if self._has_to_plan():
            self._manage_parameters()
        return full_state_dict(self.state_dict(), algorithm)

    def _load_groups(self, state_dict: dict[str, Any]) -> None:
        """Load the groups alone: torch casts floating state to the parameter's dtype and makes new tensors."""
        kept = {name: self.__dict__[name] for name in ("state", *_LOAD_HOOKS)}
        self.__dict__.update({name: OrderedDict() for name in _LOAD_HOOKS})
        try:
            super().load_state_dict({**state_dict, "state": {}})
        finally:
            self.__dict__.update(kept)

    def _reset_state(self, param: Tensor, loaded: Mapping[str, Any]) -> None:
        """State as it was at construction: what a checkpoint lacks starts anew."""
        # torch's `set_optimizer_state_dict` (2.13) leaves out frozen parameters, after `dcp.load` has filled their state.
        if param not in self._homes or not (loaded or param.requires_grad):
            return
        for group in self.param_groups:
            if any(param is member for member in group["params"]):
                reset_state(self.state[param], self.rule_of(group).state_spec(param.shape, group), loaded)

    def __getstate__(self) -> dict[str, Any]:
        extra = {name: self.__dict__[name] for name in ("_algorithm", "_others", "_options", "_mesh", "_overlaps_forward")}
        return {**super().__getstate__(), **extra}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """After unpickling or deepcopy the copy plans its own parameters at its first use, on all ranks."""
        super().__setstate__(state)
        if "_mesh" in state:
            self._forget_plans()

    # -- report ------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Buckets, padding and its cause or what is sent, bytes of state per rank, the busiest rank, who updates what."""
        if self._has_to_plan():
            self._manage_parameters()
        tables = describe_storages(type(self).__name__, list(self._storages.values()), self.state)
        return "\n\n".join(part for part in (tables, describe_algorithms(self.param_groups)) if part)
