"""ModuleState: the hooks of one wrapped module.

    before forward     gather, wait; gather the following module; cast inputs; watch the inputs' gradients
    after forward      reshard; watch the outputs' gradients; cast outputs
    outputs' gradients gather, wait; gather the module before                   (before the module's backward)
    inputs' gradients  reshard; send the gradients                              (after it)

Modules whose inputs need no gradient have no such end: the end of the whole backward does it for them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_optim.sharding.eager import eager
from vescale_optim.sharding.fully_sharded.group import Form, ShardedGroup
from vescale_optim.sharding.fully_sharded.schedule import ForwardPass, Schedule, is_in_backward
from vescale_optim.sharding.fully_sharded.tensors import cast_floating, map_tensors, tensors_that_require_grad


@dataclass(eq=False)
class Call:
    """One forward of one module, held by the autograd graph.

    Attributes:
        preceding: the module that ended last when this call began.
        position: its place in `forward.finished`.
        num_inputs, num_missing: inputs whose gradients are waited for; without any, the end of backward closes the call.
    """

    forward: ForwardPass
    preceding: ModuleState | None = None
    position: int = -1
    num_inputs: int = 0
    num_missing: int = 0


class ModuleState:
    """What a wrapped module carries.

    Args:
        module: the wrapped module; held weakly.
        groups: its parameters.
        schedule: shared with the modules under the same root.
        policy: dtypes.
        reshard_after_forward: None: unless the module is the outermost of its forward, whose backward comes first.

    Attributes:
        is_root: no wrapped module contains it.
        reshards_after_backward, syncs_gradients, averages_replicas: as set by the user for micro-batches.
        is_touched: its backward began in the backward that runs.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: list[ShardedGroup],
        schedule: Schedule,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.module = weakref.ref(module)
        self.groups = groups
        self.schedule = schedule
        self.policy = policy
        self.reshard_after_forward = reshard_after_forward
        self.reshards_after_backward = True
        self.averages_replicas = True
        self.is_root = True
        self.is_touched = False
        self._syncs_gradients = True
        self._forwards: list[Call] = []
        self._backwards: set[Call] = set()
        self._ended: Counter[ForwardPass] = Counter()
        before, after = eager(ModuleState._before_forward), eager(ModuleState._after_forward)
        module.register_forward_pre_hook(partial(before, self), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(after, self), always_call=True)

    @property
    def syncs_gradients(self) -> bool:
        return self._syncs_gradients

    @syncs_gradients.setter
    def syncs_gradients(self, value: bool) -> None:
        self._syncs_gradients = value
        for group in self.groups:
            group.accumulates = not value

    def start_gather(self) -> None:
        for group in self.groups:
            group.start_gather()

    def gather(self) -> None:
        self.start_gather()
        for group in self.groups:
            group.finish_gather()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def drop_unused_gather(self) -> None:
        """Gathered for a module that did not come."""
        for group in self.groups:
            if group.form is Form.GATHERING:
                group.reshard()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        forward = self.schedule.enter_forward(self)
        call = Call(forward, forward.finished[-1] if forward.finished else None)
        self._forwards.append(call)
        self.gather()
        self.schedule.prefetch_following(call.forward)
        if self.policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), self.policy.param_dtype)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(call, args, kwargs)
        return args, kwargs

    def _watch_inputs(self, call: Call, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Notice when the gradients of all inputs are there: then the module's backward is through."""
        call.forward.calls[self] += 1
        inputs = {id(tensor): tensor for tensor in tensors_that_require_grad((args, kwargs))}
        if not inputs:
            return args, kwargs
        # Aliases: an input may be used outside of the module too. Plain views, so that the module may write into them.
        aliases = {key: tensor.view_as(tensor) for key, tensor in inputs.items()}
        call.num_inputs = call.num_missing = len(aliases)
        # Not torch's register_multi_grad_hook: nodes and hooks hold each other there, for ever (torch 2.13).
        hook = partial(eager(ModuleState._input_gradient_arrived), self, call)
        for alias in aliases.values():
            alias.register_hook(hook)
        return map_tensors(lambda tensor: aliases.get(id(tensor), tensor), (args, kwargs))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._forwards:  # the hook before was never reached
            return output
        call = self._forwards.pop()
        call.position = len(call.forward.finished)
        is_outermost = self.schedule.leave_forward(self, call.forward)
        watched = 0
        output = map_tensors(self._copy_of_parameter, output)
        if torch.is_grad_enabled():
            output, watched = self._watch_outputs(call, output)
        keeps = is_outermost and watched > 0 if self.reshard_after_forward is None else not self.reshard_after_forward
        # A recomputation's backward follows at once.
        if not keeps and not is_in_backward():
            self.reshard()
        return cast_floating(output, self.policy.output_dtype)

    def _copy_of_parameter(self, output: Tensor) -> Tensor:
        """A whole parameter, or a view of one, loses its memory when the module is resharded: its copy leaves instead."""
        is_lent = output.layout == torch.strided and any(group.is_over_whole(output) for group in self.groups)
        return output.clone() if is_lent else output

    def _watch_outputs(self, call: Call, output: Any) -> tuple[Any, int]:
        """Notice when the gradient of any output is there: then the module's backward begins."""
        hook = partial(eager(ModuleState._before_backward), self, call)
        count = 0

        def watch(tensor: Tensor) -> Tensor:
            nonlocal count
            if not tensor.requires_grad:
                return tensor
            count += 1
            if tensor._is_view():
                # Writing into a view would drop the hook, and backward would read freed memory; torch forbids to write
                # into the result of a custom function.
                tensor = _Unchanged.apply(tensor)
            tensor.register_hook(hook)
            return tensor

        return map_tensors(watch, output), count

    # -- backward ----------------------------------------------------------------------------------------------------

    def _before_backward(self, call: Call, grad: Tensor) -> None:
        self.schedule.enter_backward()
        self.is_touched = True
        if call in self._backwards:
            return
        self._backwards.add(call)
        if any(group.is_trained and group.has_large_gradient for group in self.groups):
            self.schedule.make_room_for_large_gradient()
        self.gather()
        if call.position > 0 and not self.schedule.saves_memory:
            call.forward.finished[call.position - 1].start_gather()

    def _input_gradient_arrived(self, call: Call, grad: Tensor) -> None:
        self.schedule.enter_backward()
        call.num_missing -= 1
        if call.num_missing == 0:
            call.num_missing = call.num_inputs
            self._after_backward(call)

    def _after_backward(self, call: Call) -> None:
        self._backwards.discard(call)
        self._ended[call.forward] += 1
        if not self._backwards and self.reshards_after_backward:
            self.reshard()
        if self.syncs_gradients and self._ended[call.forward] >= call.forward.calls[self]:
            for group in self.groups:
                if group.is_trained:
                    self.schedule.start_reduce(group)
        if call.preceding is not None and self.schedule.saves_memory:
            call.preceding.start_gather()

    def end_backward(self) -> None:
        """The whole backward is through."""
        if self.is_touched and self.reshards_after_backward:
            self.reshard()
        self.drop_unused_gather()
        self.is_touched = False
        self._backwards.clear()
        self._ended.clear()
        for group in self.groups:
            group.is_launched = False


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
