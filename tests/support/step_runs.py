"""Runs a program of ``step_bodies.py`` in plain PyTorch and on partitions, and compares the results."""

from __future__ import annotations

import contextlib
import os
import random
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

MICROBATCHES, ROWS, STEPS = 4, 3, 3
#: Largest difference that is allowed, relative to the largest element of a tensor. Programs with autocast use float32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-2}
#: Largest magnitude of a valid program's tensors: beyond it, rounding hides errors.
_LARGEST = 1e8
#: How often checkpoints may call their functions in one step of a valid program, recomputations included.
_MOST_CHECKPOINTED_CALLS = 2000


class InvalidProgramError(Exception):
    """Plain PyTorch fails to run the program."""


@contextlib.contextmanager
def _checkpoints_limited() -> Iterator[None]:
    """Return a context in which checkpoints raise after a number of calls of their functions.

    A re-entrant checkpoint whose function reads a tensor that depends on the checkpoint's own result recomputes itself
    without end in the backward: the recomputed graph contains the checkpoint.
    """
    original, count = torch.utils.checkpoint.checkpoint, 0

    def limited(function: Any, *args: Any, **kwargs: Any) -> Any:
        def counted(*inputs: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > _MOST_CHECKPOINTED_CALLS:
                raise InvalidProgramError(f"more than {_MOST_CHECKPOINTED_CALLS} calls by checkpoints in one step")
            return function(*inputs, **options)

        return original(counted, *args, **kwargs)

    torch.utils.checkpoint.checkpoint = limited
    try:
        yield
    finally:
        torch.utils.checkpoint.checkpoint = original


class _Plain(nn.Module):
    """The model that a body gets in the run with plain PyTorch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        """``torch.autograd.backward`` with gradients divided by the number of microbatches."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        gradients = [torch.ones_like(each) for each in tensors] if gradients is None else [gradients]
        torch.autograd.backward(tensors, [each / MICROBATCHES for each in gradients])


class StepResults:
    """All values that a run of a program leaves, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor | None] = {}
        self.others: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Records a value; structures are recorded leaf by leaf."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.add(f"{name}[{key!r}]", item)
        elif isinstance(value, tuple | list):
            for place, item in enumerate(value):
                self.add(f"{name}[{place}]", item)
        elif isinstance(value, torch.Tensor):
            self.tensors[name] = value.detach().clone()
        else:
            self.others[name] = value


def _begin(program: Mapping[str, Any]) -> tuple[nn.Module, types.SimpleNamespace]:
    torch.set_default_dtype(program["DTYPE"])
    torch.manual_seed(program["SEED"])
    return program["Model"](), types.SimpleNamespace()


def _batch(program: Mapping[str, Any], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(program["SEED"] * 100 + step)
    x, y = torch.randn(2, MICROBATCHES * ROWS, 4, generator=generator, dtype=program["DTYPE"])
    random.seed(step)
    torch.manual_seed(step)
    return x, y


def _note_module(outcome: StepResults, step: int, parameters: Any, buffers: Any) -> None:
    for path, parameter in parameters:
        outcome.tensors[f"gradient of {path} in step {step}"] = (
            None if parameter.grad is None else parameter.grad.clone()
        )
        if parameter.grad is not None:
            parameter.data.sub_(0.05 * parameter.grad)
            parameter.grad = None
        outcome.tensors[f"{path} after step {step}"] = parameter.detach().clone()
    for path, buffer in buffers:
        outcome.tensors[f"buffer {path} after step {step}"] = buffer.detach().clone()


def plain(program: Mapping[str, Any], noise: float = 0.0) -> StepResults:
    """Runs a program in one process.

    Args:
        program: The namespace of the program.
        noise: Relative size of a random change of the initial parameters.

    Raises:
        InvalidProgramError: The program fails, or its numbers grow too large.
    """
    module, keep = _begin(program)
    generator = torch.Generator().manual_seed(program["SEED"])
    for parameter in module.parameters() if noise else ():
        parameter.data.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    outcome = StepResults()
    try:
        program["prepare"](module, keep)
        model = _Plain(module)
        for step in range(STEPS):
            program["between"](module, keep, step)
            x, y = _batch(program, step)
            pieces = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
            with _checkpoints_limited():
                results = [program["body"](model, keep, *piece) for piece in pieces]
            for place, result in enumerate(results):
                outcome.add(f"result of microbatch {place} of step {step}", result)
            _note_module(outcome, step, module.named_parameters(), module.named_buffers())
    except Exception as error:
        raise InvalidProgramError(f"{type(error).__name__}: {error}") from None
    for name, tensor in outcome.tensors.items():
        # Written as `not <` so that NaN is rejected too.
        if tensor is not None and tensor.numel() and not tensor.abs().max() < _LARGEST:
            raise InvalidProgramError(f"{name} grows to {tensor.abs().max()}")
    return outcome


def _piece(result: Any, microbatch: int) -> Any:
    """Returns a step's result as the body returned it for one microbatch."""
    if isinstance(result, dict):
        return {key: _piece(item, microbatch) for key, item in result.items()}
    if isinstance(result, tuple):
        return tuple(_piece(item, microbatch) for item in result)
    if result is None:
        return None
    if isinstance(result, list) and not (len(result) == MICROBATCHES and not hasattr(result[0], "outputs")):
        return [_piece(item, microbatch) for item in result]
    return result[microbatch]


def pipelined(program: Mapping[str, Any]) -> StepResults:
    """Runs a program on the partitions of the job; returns the values that this rank holds."""
    import smdistributed.modelparallel.torch as smp

    config = {"partitions": program["PARTITIONS"], "microbatches": MICROBATCHES, "pipeline": program["SCHEDULE"]}
    places = program["PLACES"]
    smp.init({**config, "auto_partition": places is None, "default_partition": 0})
    try:
        module, keep = _begin(program)
        outcome = StepResults()
        for path, place in (places or {}).items():
            smp.set_partition(module.get_submodule(path), place)
        program["prepare"](module, keep)
        model = smp.DistributedModel(module)
        step_function = smp.step(program["body"])
        for step in range(STEPS):
            program["between"](module, keep, step)
            x, y = _batch(program, step)
            result = step_function(model, keep, x, y)
            for place in range(MICROBATCHES):
                outcome.add(f"result of microbatch {place} of step {step}", _piece(result, place))
            _note_module(outcome, step, model.local_named_parameters(), model.local_named_buffers())
        return outcome
    finally:
        smp.shutdown()


def differences(ours: StepResults, expected: StepResults, tolerance: float) -> list[str]:
    """Lists the differences in program order."""
    found = []
    gradients = [
        each.abs().max().item() for name, each in expected.tensors.items() if "gradient" in name and each is not None
    ]
    # A gradient that is zero except for rounding, such as that of a bias before a batch normalization, has errors on
    # the scale of the other gradients.
    noise = max(1e-3, 1e-2 * max(gradients, default=0.0)) if tolerance > TOLERANCES[torch.float64] else 1e-3
    for name, value in ours.others.items():
        if name not in expected.others or expected.others[name] != value:
            found.append(f"{name} is {value!r} instead of {expected.others.get(name, 'nothing')!r}")
    for name, theirs in expected.tensors.items():
        if name not in ours.tensors:
            if name.startswith("result"):
                found.append(f"{name} is not there")
            continue
        mine = ours.tensors[name]
        if mine is None or theirs is None:
            if mine is not theirs:
                found.append(f"{name} is {_size(mine)} instead of {_size(theirs)}")
        elif mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found.append(f"{name} is {mine.dtype}{list(mine.shape)} instead of {theirs.dtype}{list(theirs.shape)}")
        elif theirs.numel():
            difference = (mine.double() - theirs.double()).abs().max() / max(
                theirs.abs().max().item(), noise if "gradient" in name else 1e-3
            )
            if not difference <= tolerance:
                found.append(f"{name} is off by {difference:.1e}")
    return found


def _size(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"of size {tensor.abs().max():.1e}"


def compare(program: Mapping[str, Any]) -> tuple[str, str]:
    """Runs a program both ways, on every rank of the job.

    Returns:
        A kind and a text. The kind is ``equal``, ``DIFFERENT``, ``rounding`` (different, but plain PyTorch also differs
        after a change of the parameters in the last places), ``raises`` (an error of the library), ``crash`` (another
        error) or ``invalid``.
    """
    from smdistributed.modelparallel.exceptions import SMPError

    try:
        expected = plain(program)
    except InvalidProgramError as error:
        return "invalid", str(error)
    try:
        ours = pipelined(program)
    except SMPError as error:
        return "raises", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    tolerance = TOLERANCES[program["DTYPE"]]
    found = differences(ours, expected, tolerance)
    if not found:
        return "equal", ""
    is_unstable = bool(differences(plain(program, 4 * torch.finfo(program["DTYPE"]).eps), expected, tolerance))
    return "rounding" if is_unstable else "DIFFERENT", "; ".join(found[:3])


def namespace(text: str) -> dict[str, Any]:
    """Executes a program's text; returns its namespace."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "<program>", "exec"), names)
    return names


def is_valid(text: str) -> bool:
    """Whether plain PyTorch runs the program, and the program does not combine checkpoints with forward hooks.

    In one process, the recomputation calls the hooks again. In a step, a checkpoint in the body does not recompute.
    """
    if "utils.checkpoint.checkpoint(" in text and "register_forward_hook" in text:
        return False
    try:
        plain(namespace(text))
    except InvalidProgramError:
        return False
    return True


def run_programs(folder: str, texts: Mapping[int, str], seconds: float) -> None:
    """The body of a job: runs programs one after another, and writes a file ``NUMBER.RANK`` for each. It ends early
    after a program from which the ranks cannot continue.

    Args:
        folder: Folder for the results.
        texts: Programs by number.
        seconds: How long a rank waits for the others after a program; after an error, it waits 2 s.
    """
    import smdistributed.modelparallel.torch as smp

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, text in texts.items():
        kind, detail = compare(namespace(text))
        _leave(Path(folder) / f"{number}.{rank}", f"{kind}\n{detail}")
        files = [Path(folder) / f"{number}.{peer}" for peer in range(size)]
        has_failed = kind in ("raises", "crash")
        if not all(_appears(file, 2.0 if has_failed else seconds) for file in files):
            # The other ranks still run the program and wait for this rank; its exit ends their wait.
            os._exit(1)
        kinds = {file.read_text().split("\n")[0] for file in files}
        if kinds & {"raises", "crash"}:
            try:
                smp.init({"partitions": size})
                smp.barrier()
                smp.shutdown()
            except Exception:
                # The failure has ended the job of these processes; the remaining programs need new ones.
                os._exit(1)
            _leave(Path(folder) / f"{number}.{rank}.on", "")
            if not all(_appears(file.with_name(f"{file.name}.on"), 2.0) for file in files):
                os._exit(1)


def _leave(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True
