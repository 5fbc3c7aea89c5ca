"""Execution of one task on its partition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch import pytree
from smdistributed.modelparallel.torch.runtime.call_plan import CallPlan
from smdistributed.modelparallel.torch.tracing.attributes import object_state
from smdistributed.modelparallel.torch.tracing.attributes.module_state import ModuleState
from smdistributed.modelparallel.torch.tracing.tasks import Context, Task


def check(task: Task, outputs: Sequence[torch.Tensor]) -> None:
    """Raise if the outputs of a task have other shapes or dtypes than its output spec."""
    metas = task.known_spec.metas
    same = len(outputs) == len(metas) and all(
        output.shape == meta.shape and output.dtype == meta.dtype for output, meta in zip(outputs, metas, strict=True)
    )
    if not same:
        found = ", ".join(f"{output.dtype}{list(output.shape)}" for output in outputs)
        raise _unexpected_output(task, f"came out as ({found})")


def _unexpected_output(task: Task, what: str) -> SMPError:
    text = (
        f"{task} {what}: the tensors that a module on one partition returns, or stores in its arguments, may depend "
        "only on the shapes and the types of its arguments"
    )
    if task.known_spec.observed:
        text += (
            f". With made-up values it was always the same. Let `{task.name}` return tensors whose shapes do not "
            "depend on values, or move what depends on values into the body of the step"
        )
    return SMPError(text)


def task_outputs(
    task: Task, result: Any, watch: object_state.Watch | None, given: Mapping[int, int]
) -> list[torch.Tensor]:
    """Return the tensors of a task's result, and those that it left in containers.

    Raises:
        SMPError: The result differs from the recorded output spec.
    """
    effects = None if watch is None else watch.effects(result)
    if effects is not None and watch is not None:
        expected = task.known_spec.template.states if task.known_spec.effects else {}
        if effects.states.keys() != expected.keys():
            raise _unexpected_output(task, "changed other lists or objects than it did when its outputs were found")
    if not task.known_spec.effects:
        outputs = pytree.tensors_of(result)
    else:
        outputs = []
        (effects or object_state.Effects(result, {})).template(
            [] if watch is None else watch.containers, lambda tensor: outputs.append(tensor), given
        )
    check(task, outputs)
    return outputs


def run_planned(
    task: Task, plan: CallPlan, env: dict[int, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Run a task with a plan for its arguments, and add its results to ``env``."""
    args, kwargs = plan.arguments(task, env, parameters)
    result = task.call(*args, **kwargs)
    if plan.is_single_output:
        meta = task.known_spec.metas[0]
        if not isinstance(result, torch.Tensor) or result.shape != meta.shape or result.dtype is not meta.dtype:
            check(task, pytree.tensors_of(result))
        env[task.outputs[0].index] = result
        return
    outputs = pytree.tensors_of(result)
    check(task, outputs)
    for value, tensor in zip(task.outputs, outputs, strict=True):
        env[value.index] = tensor


#: The type of the casts in autocast's cache, by device.
_cached_dtypes: dict[str, torch.dtype] = {}


class GradAutocastState:
    """PyTorch's grad and autocast state at the call of a task; it is kept while consecutive tasks share it."""

    def __init__(self, modules: ModuleState) -> None:
        self._modules = modules
        self._stack: contextlib.ExitStack | None = None
        self._entered: Context | None = None

    def __enter__(self) -> GradAutocastState:
        return self

    def __exit__(self, *problem: Any) -> None:
        if self._stack is not None:
            self._stack.close()

    def enter(self, task: Task) -> None:
        """Enter the state of a task."""
        entered, context = self._entered, task.context
        if entered is context or (entered is not None and entered.same(context)):
            if context.modules.values:
                # The task before may have changed an attribute that the body has set (MST-3).
                self._modules.apply(context.modules, task.module)
            return
        self._modules.apply(context.modules, task.module)
        if self._stack is not None:
            self._stack.close()
        self._entered, self._stack = context, contextlib.ExitStack()
        if context.grad is not torch.is_grad_enabled():
            self._stack.enter_context(torch.set_grad_enabled(context.grad))
        if not context.autocast:
            _leave_autocast(self._stack)
        for device, enabled, dtype, cache in context.autocast:
            # Tensors that were cast without gradients must not be reused where gradients are needed.
            cache = cache and context.grad
            self._stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            if enabled and _cached_dtypes.setdefault(device, dtype) is not dtype:
                forget_casts(device, dtype)


def forget_casts(device: str, dtype: torch.dtype) -> None:
    """Clear autocast's cache before casts to another type, because autocast finds a cast by its tensor alone."""
    torch.clear_autocast_cache()
    _cached_dtypes[device] = dtype


@contextlib.contextmanager
def modes_of_the_body_left() -> Iterator[None]:
    """Return a context for tasks that run while the body waits, with gradients enabled and autocast disabled.

    Each task then enters the modes of its own call.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(Context.casts_of_tasks_cached())
        _leave_autocast(stack)
        yield


def _leave_autocast(stack: contextlib.ExitStack) -> None:
    """Disable autocast until the stack is closed."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))


@contextlib.contextmanager
def casts_are_cached() -> Iterator[None]:
    """Return a context that keeps autocast's cache, because inner autocast contexts are not the outermost (EXE-4)."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def without_cached_casts(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of a stage's input, which is not a leaf.

    Autocast caches casts of leaves. A cached cast of an input would stay until the step ends, and all operations that
    take the input would add their gradients in the narrow type.
    """
    with torch.enable_grad():
        return leaf.view_as(leaf)
