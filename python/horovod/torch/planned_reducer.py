"""Planned reductions of an optimizer's dense gradients, in buckets that fill during backward.

Each reduction is a round, in which the ranks first vote whether all of them have the same plan
(``reducer/ballot.rs``). If not, gradients are reduced by name, and so are gradients that are in no plan.

A plan is for the gradients on one device. On a GPU, buckets are packed while the vote is open, their reductions wait
for its result, and :meth:`PlannedReducer.end` does not wait for the GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from horovod.common.basics import warn_once
from horovod.common.exceptions import at_execution, may_pass
from horovod.common.process_sets import ProcessSet
from horovod.torch import declined_rounds
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum
from smdistributed import _core
from smdistributed.dataparallel.bucket_size import bucket_bytes

# Numbers in the interface of the bridge: reductions of a bucket, votes of a rank without a reducer, results of a vote.
_REDUCTIONS = {Compression.none: 0, Compression.fp16: 1, Compression.bf16: 2}
_READY_BY_NAME, _NO_REDUCER, _CREATING = range(3)
UNKNOWN = -1
PLANNED, BY_NAME, CREATE_REDUCERS, DROP_REDUCERS = range(4)
_DEVICE_TYPES = ("cpu", "cuda")
#: After so many rounds in a row by name, the reason is reported. The first rounds of a plan are by name, too.
_ROUNDS_BY_NAME = 20
# Types that a compression leaves unchanged. It casts other half types, which planned reductions cannot do.
_KEPT = {Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


class PlannedReducer:
    """The rounds of one optimizer. A round begins with the first complete gradient, and ends in ``synchronize``.

    Args:
        names: Names of the optimizer's parameters.
        op: The reduction of gradients.
        factor: ``gradient_predivide_factor``.
        compression: Type in which gradients travel.
        process_set: The ranks that take part.
        submit_declined: Method of the optimizer that reduces the gradients of :meth:`take_declined` by name. The
            thread of `declined_rounds` calls it if the vote declines the plan after the last gradient.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        op: int,
        factor: float,
        compression: Any,
        process_set: ProcessSet,
        submit_declined: Callable[[], None],
    ) -> None:
        self._names, self._op, self._process_set = names, op, process_set
        self._compression = compression
        self._reduction = _REDUCTIONS.get(compression)
        # Equal on all ranks, because they agree on the arguments.
        self._votes = self._reduction is not None and op in (Average, Sum) and factor == 1.0
        #: Parameters whose gradients have turned out to be sparse; they are reduced by name.
        self.sparse: set[torch.Tensor] = set()
        #: Result of the last round's vote.
        self.vote_result = BY_NAME
        self._can_plan = True
        # Whether the plan has stayed the same since the last round. Only then is a reducer worth its cost.
        self._is_settled = False
        # The optimizer's parameters with names, those that are planned, and the others.
        self._parameters: list[torch.Tensor] = []
        self._planned: list[torch.Tensor] = []
        self._unplanned: list[torch.Tensor] = []
        # Parameters that could be planned, also on other devices.
        self._known: set[torch.Tensor] = set()
        self._device = torch.device("cpu")
        # Reducers that were dropped, whose last reductions may still run on a GPU.
        self._retired: list[Any] = []
        # A worker that saves its state in the middle of a step that fails would restore wrong values.
        self._is_elastic = os.environ.get("HOROVOD_ELASTIC") == "1"
        self._index: dict[torch.Tensor, int] = {}
        self._name = self._what = ""
        self._reducer: Any = None
        self._pending_reducer: Any = None
        #: Held while gradients join the round, leave it or are submitted, also by the thread of `declined_rounds`.
        self.lock = threading.Lock()
        self._submit_declined, self._is_watched = submit_declined, False
        self._rounds_by_name = 0
        self._has_factor = factor != 1.0
        self._reset()

    def _reset(self) -> None:
        #: Whether a round has begun.
        self.begun = False
        self._ballot: Any = None
        # Whether the plan is known to be allowed.
        self._is_allowed = False
        # The GPU's stream that was current when the round began.
        self._stream: Any = None
        # Whether the reducer has an open round, whose vote is in progress or has a result.
        self._is_open = False
        self._taken: dict[torch.Tensor, None] = {}
        # Whether a backward that has added gradients is running: autograd still uses the last one.
        self._in_backward = False
        # Without a reducer: indices of planned parameters, in the order in which their gradients arrived.
        self._order: list[int] = []

    def begin(self, parameters: Iterable[torch.Tensor], passes_left: Callable[[torch.Tensor], int]) -> None:
        """Begin a round with the first complete gradient of the optimizer; called once a round.

        Args:
            parameters: All parameters of the optimizer.
            passes_left: Returns how many more accumulations autograd reports for a parameter, until its gradient is
                complete.
        """
        self.begun = True
        if not self._votes:
            if self._op in (Average, Sum):
                what = "`gradient_predivide_factor`" if self._has_factor else "a compression of the script's own"
                _note_one_by_one("gradients", f"buckets do not support {what}")
            return
        # A parameter that was added later gets its name in `synchronize`.
        parameters = [each for each in parameters if each in self._names]
        if not any(each.device.type in _DEVICE_TYPES for each in parameters):
            return
        self._follow(parameters)
        capturing = False
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
            # The replays of a CUDA graph do not vote.
            capturing = torch.cuda.is_current_stream_capturing()
        try:
            number = self._process_set.process_set_id
            if capturing:
                self._ballot = torch.classes.smd.Ballot(number, self._name, self._what, _READY_BY_NAME)
            elif self._reducer is not None:
                self._ballot = self._reducer.open_by_vote(number, self._name, self._what)
                self._is_open = True
                self.expect(passes_left)
            else:
                self._ballot = torch.classes.smd.Ballot(number, self._name, self._what, self._readiness())
        except (RuntimeError, ValueError):
            # The following collectives report the error.
            self._ballot = None

    def expect(self, passes_left: Callable[[torch.Tensor], int]) -> None:
        """Count the accumulations until gradients of the round are complete, from now on.

        The reducer's hooks count them, because a call for each gradient takes longer.

        Args:
            passes_left: As for :meth:`begin`.
        """
        if self._is_open:
            self._reducer.expect([passes_left(each) for each in self._planned])

    def _readiness(self) -> int:
        if self._pending_reducer is not None:
            return _CREATING
        return _NO_REDUCER if self._planned and self._can_plan and self._is_settled else _READY_BY_NAME

    def _follow(self, parameters: list[torch.Tensor]) -> None:
        """Create the plans for these parameters."""
        if self._reducer is not None:
            fits = self._reducer.fits()
            is_same = fits and _are_same(parameters, self._parameters)
            if is_same and not any(map(self._may_be_planned, self._unplanned)) and self.sparse.isdisjoint(self._known):
                # The usual case, without a closer look at each parameter.
                self._is_settled = True
                return
            if not fits:
                self._retire()
                self._planned = []
        candidates = [each for each in parameters if self._may_be_planned(each)]
        device = _most_used_device(candidates)
        planned = [each for each in candidates if each.device == device]
        self._parameters = parameters
        # Without those on other devices, which may change without effect on the plan.
        self._known = set(candidates)
        self._unplanned = [each for each in parameters if each not in self._known]
        same = _are_same(planned, self._planned)
        self._is_settled = same or not self._planned
        if same and self._what:
            return
        self._retire()
        self._pending_reducer, self._planned, self._device = None, planned, device
        if len(planned) < len(candidates):
            others = ", ".join(sorted({str(each.device) for each in candidates if each.device != device}))
            _note_one_by_one(
                f"gradients of {len(candidates) - len(planned)} parameters on {others}",
                f"a plan is for one device: most of the optimizer's gradients are on {device}",
            )
        narrow = [each for each in self._unplanned if self._is_cast(each)]
        if narrow:
            dtypes = ", ".join(sorted({str(each.dtype) for each in narrow}))
            _note_one_by_one(
                f"gradients of {len(narrow)} parameters of type {dtypes}",
                "the compression casts them to another half type",
            )
        self._index = {parameter: index for index, parameter in enumerate(planned)}
        # Optimizers that run at the same time need different names for their votes, as for their parameters.
        self._name = min(map(self._names.__getitem__, parameters))
        described = [(self._names[each], tuple(each.shape), str(each.dtype)) for each in planned]
        what = (self._op, self._reduction, device.type, described)
        self._what = hashlib.sha256(repr(what).encode()).hexdigest()

    def _may_be_planned(self, parameter: torch.Tensor) -> bool:
        return (
            parameter.requires_grad
            and parameter.device.type in _DEVICE_TYPES
            and parameter.dtype.is_floating_point
            and parameter not in self.sparse
            and not self._is_cast(parameter)
        )

    def _is_cast(self, parameter: torch.Tensor) -> bool:
        """Return whether the compression casts a half type to another one."""
        dtype = parameter.dtype
        return dtype.is_floating_point and dtype.itemsize <= 2 and dtype is not _KEPT.get(self._compression, dtype)

    def _adopt_reducer(self) -> None:
        """Use the reducer that the core has created. Called between backward passes only, because it adds hooks."""
        if self._pending_reducer is None or not self._pending_reducer.is_done():
            return
        try:
            self._reducer = self._pending_reducer.take()
        except (RuntimeError, ValueError) as error:
            # If other ranks are gone, the next operation reports it.
            self._can_plan = may_pass(error)
            if not self._can_plan:
                _note_one_by_one("gradients", f"the buckets could not be created: {at_execution(error)}")
        self._pending_reducer = None
        if self._reducer is not None and not self._is_watched:
            self._is_watched = True
            declined_rounds.watch(self._submit_declined)

    def take(self, parameter: torch.Tensor, accumulating: bool) -> bool:
        """Add a complete gradient to the round, if its parameter is planned.

        Args:
            parameter: The parameter.
            accumulating: Whether autograd is about to release the gradient.

        Returns:
            Whether the gradient is part of the round. If the vote allows the plan, it is reduced in its bucket.
        """
        index = self._index.get(parameter)
        if index is None:
            return False
        if not self._is_open:
            self._order.append(index)
            return False
        self._taken[parameter] = None
        if not accumulating:
            self._reducer.ready([index])
        elif not self._in_backward:
            self._in_backward = True
            # If the backward fails, this is not called, and the gradients are held until the round ends.
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        return True

    def _after_backward(self) -> None:
        with self.lock:
            self._in_backward = False
        # The vote may have declined the plan since the last gradient.
        self._submit_declined()

    def take_declined(self, in_hook: bool) -> list[torch.Tensor]:
        """Remove the parameters from the round once the vote has declined the plan.

        Args:
            in_hook: Whether the caller is a hook of a gradient, so that autograd has finished all earlier ones.

        Returns:
            The parameters, whose gradients the caller reduces by name; none while the vote is open, or if it allowed
            the plan.
        """
        try:
            if not self._is_open or (self._in_backward and not in_hook):
                return []
            if self._is_allowed:
                return []
            result = self._ballot.result_so_far()
            self._is_allowed = result == PLANNED
            if result in (UNKNOWN, PLANNED):
                return []
        except RuntimeError:
            # `end` reports the error.
            return []
        self._is_open = False
        self._reducer.cancel()
        taken = list(self._taken)
        self._taken.clear()
        return taken

    def end(self, gradient_of: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """End the round, if there is one.

        Args:
            gradient_of: Returns a parameter's gradient; creates one if there is none.

        Returns:
            Parameters of the round whose gradients the caller reduces by name, because the vote declined the plan.

        Raises:
            HorovodInternalError: The reduction failed.
            TypeError: A gradient has another type, shape or device than its parameter had.
        """
        try:
            self.vote_result = BY_NAME if self._ballot is None else self._ballot.result()
            self._note_round()
            if self.vote_result == PLANNED:
                late = self._reducer.missing()
                for index in late:
                    gradient_of(self._planned[index])
                self._reducer.ready(late)
                self._reducer.close()
                self._is_open = False
                return []
            with self.lock:
                taken = list(self._taken)
                if self.vote_result == CREATE_REDUCERS:
                    self._create_reducer()
                else:
                    # With a reducer, gradients wait for the result of the vote. Without one they are reduced at once.
                    self._cancel()
                return taken
        except TypeError:
            # The script's mistake, which an elastic job must not repeat.
            self._cancel()
            raise
        except (RuntimeError, ValueError) as error:
            self._cancel()
            raise at_execution(error) from None
        finally:
            if self._is_open:
                self._reducer.cancel()
            self._adopt_reducer()
            self._reset()

    def _note_round(self) -> None:
        """Report that all rounds are by name: the plan never stays the same, or the ranks' plans differ."""
        is_expected = self._ballot is None or self._pending_reducer is not None or not self._can_plan
        if self.vote_result == PLANNED or is_expected:
            self._rounds_by_name = 0
            return
        self._rounds_by_name += 1
        if self._rounds_by_name >= _ROUNDS_BY_NAME:
            _note_one_by_one(
                "gradients",
                f"in {_ROUNDS_BY_NAME} steps in a row, the trainable parameters were not those of the step before, or "
                "differed between ranks, or a timeline or autotuning needed the gradients by name",
            )

    def _cancel(self) -> None:
        if self._is_open:
            self._reducer.cancel()
            self._is_open = False
        self._retire()

    def _retire(self) -> None:
        if self._reducer is not None and self._device.type == "cuda":
            self._retired.append(self._reducer)
        self._reducer = None

    def check(self) -> None:
        """Raise errors of reductions on a GPU that nothing else would report; called at the end of a step.

        Only the next round of a reducer reports what fails after the end of a round. So this waits for the GPU after
        the last round of a reducer, and after each round in an elastic job, which may save its state next.

        Raises:
            HorovodInternalError: Reductions have failed, so gradients had wrong values.
        """
        awaited, self._retired = self._retired, []
        if self._is_elastic and self._device.type == "cuda" and self._reducer is not None:
            awaited.append(self._reducer)
        try:
            for reducer in awaited:
                reducer.await_device()
        except (RuntimeError, ValueError) as error:
            self._reducer = None
            raise at_execution(error) from None

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Make the stream that computed the round's gradients current; for threads other than autograd's.

        Returns:
            A context.
        """
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _create_reducer(self) -> None:
        """Let a thread of the core create the reducer."""
        settings = {
            "rounds": 1,
            "sum": int(self._op == Sum),
            "reduction": self._reduction,
            "find_unused_parameters": 0,
            "static_graph": 0,
            "accumulation_steps": 1,
            "comm_hook": -1,
        }
        ranks = torch.ops.smd.process_set_members(self._process_set.process_set_id)
        names = [self._names[each] for each in self._planned]
        sizes = _core.bucket_sizes(bucket_bytes(None, self._device.type == "cuda"))
        self._pending_reducer = torch.classes.smd.PendingReducer(
            self._ballot.token(), self._planned, names, ranks, sizes, settings, self._order
        )


def _note_one_by_one(what: str, why: str) -> None:
    """Count gradients that are reduced by name, and warn once of each reason."""
    _core.note_fallback("gradients_one_by_one")
    warn_once(f"{what} are reduced one by one instead of in buckets, because {why}")


def _are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two lists have the same parameters in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _most_used_device(parameters: list[torch.Tensor]) -> torch.device:
    """Return the device with most bytes of the parameters; the first one of several."""
    sizes: Counter[torch.device] = Counter()
    for parameter in parameters:
        sizes[parameter.device] += parameter.nbytes
    return max(sizes, key=sizes.__getitem__, default=torch.device("cpu"))
