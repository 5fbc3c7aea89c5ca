"""``smp.DistributedModel``: a Keras model whose layers are partitioned over the ranks of a pipeline."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest

from smdistributed.dataparallel.tensorflow.collectives import call
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.exceptions import SMPPartitionError, SMPUnsupportedError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup, RankType
from smdistributed.modelparallel.tensorflow import communication
from smdistributed.modelparallel.tensorflow.fit import KerasLoops
from smdistributed.modelparallel.tensorflow.partitioning import (
    delayed_initialization,
    optimizer_variables,
    remote_variables,
)
from smdistributed.modelparallel.tensorflow.partitioning.delayed_initialization import handle_of
from smdistributed.modelparallel.tensorflow.partitioning.placement import PartitionAssignment
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.tensorflow.tracing import interception

# The Keras package behind `tf.keras`.
_Model: Any = tf.keras.Model
interception.install()


class DistributedModel(KerasLoops, _Model):
    """A Keras model to subclass. The first call in a ``smp.step`` function partitions its layers over the ranks.

    Before that, all variables exist on every rank, those of Keras' layers without memory until they are read.
    Afterwards ``variables``, ``trainable_variables`` and so on contain the variables of this rank's partition and
    those that every rank has. Inside of a step's body they contain all variables of the model.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> DistributedModel:
        """Raise if ``smp.init`` was not called."""
        state.groups  # noqa: B018 - raises before `init`
        return super().__new__(cls, *args, **kwargs)

    @property
    def is_partitioned(self) -> bool:
        """Whether the model is partitioned."""
        return self.__dict__.get("_smp_assignment") is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; allowed only in the body of a ``smp.step`` function."""
        if "training" in kwargs and not _takes(self.call, "training"):
            # For compatibility with the Keras version of the original library.
            kwargs.pop("training")
        trace = state.trace
        if trace is None or not trace.is_current():
            if self._smp_is_gathered:
                return super().__call__(*args, **kwargs)
            raise SMPUsageError(
                "a `smp.DistributedModel` is called in the body of a `smp.step` function only, also in a `train_step` "
                "of one's own"
            )
        if state.model is None:
            state.model = self
        elif state.model is not self:
            raise SMPUsageError("a script can have only one `smp.DistributedModel`, and this is a second one")
        # Not stored as attributes, because tensors would keep the graph of the trace alive.
        self.__dict__["_smp_example"] = tf.nest.map_structure(_described, (args, kwargs))
        with trace.in_model():
            results = super().__call__(*args, **kwargs)
        with trace.out_of_model():
            return tf.nest.map_structure(_handed_out, results, expand_composites=True)

    # Variables.

    def _smp_local(self, variables: list[Any]) -> list[Any]:
        assignment = self.__dict__.get("_smp_assignment")
        if assignment is None or state.trace is not None or self.__dict__.get("_smp_shows_all"):
            return variables
        rank = state.groups.rank_in("pp")
        found = [each for each in variables if assignment.variables.get(id(handle_of(each)), rank) == rank]
        return type(variables)(found)

    @property
    def variables(self) -> list[Any]:
        """All variables of this rank."""
        return self._smp_local(super().variables)

    @property
    def trainable_variables(self) -> list[Any]:
        """Variables of this rank with gradients; the steps' gradients are in their order."""
        return self._smp_local(super().trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Variables of this rank without gradients."""
        return self._smp_local(super().non_trainable_variables)

    @property
    def weights(self) -> list[Any]:
        """The variables of this rank, without the states of metrics and random generators."""
        return self._smp_local(super().weights)

    @property
    def trainable_weights(self) -> list[Any]:
        """The same as ``trainable_variables``."""
        return self._smp_local(super().trainable_weights)

    @property
    def non_trainable_weights(self) -> list[Any]:
        """``non_trainable_variables``, without the states of metrics and random generators."""
        return self._smp_local(super().non_trainable_weights)

    def count_params(self) -> int:
        """Return the number of elements in the weights of the whole model.

        Returns:
            The number.
        """
        with self._smp_all_variables():
            return super().count_params()

    def summary(self, *args: Any, **kwargs: Any) -> Any:
        """Print the summary of the whole model.

        Args:
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.

        Returns:
            The result of Keras's method.
        """
        with self._smp_all_variables():
            return super().summary(*args, **kwargs)

    @contextlib.contextmanager
    def _smp_all_variables(self) -> Iterator[None]:
        before = self.__dict__.get("_smp_shows_all", False)
        self.__dict__["_smp_shows_all"] = True
        try:
            yield
        finally:
            self.__dict__["_smp_shows_all"] = before

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the weights of the whole model, or those of this rank.

        Args:
            weights: Weights of the whole model, such as a plain Keras model's ``get_weights()``, of which this rank
                keeps its own; or those of this rank alone, as ``get_weights()`` of this model returns them.
        """
        with self._smp_all_variables():
            count = len(self.weights)
        with self._smp_all_variables() if len(weights) == count else contextlib.nullcontext():
            super().set_weights(weights)

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights as Keras does, from a file of the whole model. This rank keeps its own weights.

        Args:
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.
        """
        with self._smp_all_variables():
            return super().load_weights(*args, **kwargs)

    # Partitioning.

    def _smp_partition(self, assignment: PartitionAssignment) -> None:
        """Apply a partition and free the variables of other ranks. Hooks are called afterwards."""
        self.__dict__.update(_smp_assignment=assignment, _smp_slots=[], _smp_hooks_pending=True)
        optimizer_variables.partition_existing()
        rank, places = state.groups.rank_in("pp"), assignment.variables
        for variable in self._smp_remote_variables():
            remote_variables.make_remote(variable)
        delayed_initialization.initialize_local({handle for handle, home in places.items() if home != rank})
        if state.cfg.ddp and state.groups.dp_group is not None:
            self._smp_broadcast_weights()

    def _smp_call_hooks(self) -> None:
        """Call the hooks that have not succeeded yet, if any rank of the pipeline has some.

        A failure raises on all ranks, because the others would wait for this one. No step runs before all hooks have
        succeeded.
        """
        if not self.__dict__["_smp_hooks_pending"]:
            return
        failed: list[tuple[Callable[[], Any], Exception]] = []
        with tf.init_scope():
            for hook in state.hooks:
                try:
                    hook()
                except Exception as error:
                    failed.append((hook, error))
        state.hooks[:] = [hook for hook, _ in failed]
        own_failures = "; ".join(f"{type(error).__name__}: {error}" for _, error in failed)
        failures = communication.gather_for("has partitioned the model", own_failures, CommGroup.PP_GROUP)
        for _, failure in failed:
            vars(failure)["_smp_is_known"] = True
            raise failure
        for place, text in enumerate(failures):
            if text:
                raise SMPUsageError(f"a hook of `register_post_partition_hook` failed on partition {place}: {text}")
        self.__dict__["_smp_hooks_pending"] = False

    def _smp_broadcast_weights(self) -> None:
        """Broadcast the weights of the first replica, because replicas get equal gradients from now on."""
        with tf.init_scope(), tf.device("/device:CPU:0"):
            for variable in map(underlying, self.weights):
                value = call(core_ops.smd_broadcast, tensor=variable.read_value(), root=0, group=state.groups.dp_group)
                variable.assign(value)

    def _smp_remote_variables(self) -> list[Any]:
        """Return the variables of other partitions."""
        assignment, rank = self._smp_assignment, state.groups.rank_in("pp")
        with self._smp_all_variables():
            return [each for each in self.variables if assignment.variables.get(id(handle_of(each)), rank) != rank]

    # Saving: the first rank writes; a failure there raises on all ranks.

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Write the whole model with its latest weights as a SavedModel. All ranks call it; the first one writes.

        Args:
            save_path: The folder.

        Raises:
            SMPUsageError: The model has not been partitioned yet.
            SMPCheckpointError: The model could not be written; the same on all ranks.
        """
        if not self.is_partitioned:
            raise SMPUsageError("`save_model` needs a partitioned model: call it after the first step")
        self._smp_write(lambda: tf.saved_model.save(self, save_path, signatures=self._smp_signatures()), save_path)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save the weights of the whole model as Keras does. All ranks call it; the first one writes.

        Args:
            filepath: The file, the same on all ranks.
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.
        """
        self._smp_write(lambda: super(DistributedModel, self).save_weights(filepath, *args, **kwargs), filepath)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Save the whole model as Keras does. All ranks call it; the first one writes.

        Args:
            filepath: The file, the same on all ranks.
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.
        """
        self._smp_write(lambda: super(DistributedModel, self).save(filepath, *args, **kwargs), filepath)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Export the whole model as Keras does. All ranks call it; the first one writes.

        Args:
            filepath: The file, the same on all ranks.
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.
        """
        self._smp_write(lambda: super(DistributedModel, self).export(filepath, *args, **kwargs), filepath)

    def save_own_variables(self, store: Any) -> None:
        """Store this rank's variables; called by Keras' functions. Allowed only while the whole model is gathered."""
        self._smp_require_all_variables("keras.saving")
        super().save_own_variables(store)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel":
            self._smp_require_all_variables("tf.saved_model.save")
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == "savedmodel":
            # A call of Keras 3 uses the script's default for `training`, which may be true.
            children.pop("_default_save_signature", None)
        return children

    def _smp_require_all_variables(self, call: str) -> None:
        if self.is_partitioned and not self._smp_is_gathered and self._smp_remote_variables():
            raise SMPUnsupportedError(
                f"`{call}` would write the variables of one partition: take `save_model`, `save`, `save_weights` or "
                "`export` of the model, which all ranks call, or a `tf.train.Checkpoint`"
            )

    @property
    def _smp_is_gathered(self) -> bool:
        """Return whether this rank temporarily has all values, so that the model can be called normally."""
        return bool(self.__dict__.get("_smp_gathered"))

    def _smp_write(self, write: Callable[[], Any], path: Any) -> None:
        """Call ``write`` on the first rank while it has the values of all variables."""
        if self._smp_is_gathered:
            write()
            return
        groups = state.groups
        paths = communication.gather_for("saves or loads", str(path))
        if len(set(paths)) > 1:
            raise SMPUsageError(
                f"all ranks must pass the same path for the whole model, but they pass {sorted(set(paths))}"
            )
        try:
            failure = self._smp_gather() if self.is_partitioned and groups.rank_in("dp") == 0 else None

            def first() -> None:
                if failure is not None:
                    raise failure
                if groups.rank_in("dp") == groups.rank_in("pp") == 0:
                    self.__dict__["_smp_gathered"] = True
                    with self._smp_all_variables():
                        write()

            communication.raise_on_all_ranks(first, str(path))
        finally:
            self.__dict__["_smp_gathered"] = False
            if self.is_partitioned:
                for variable in (*self._smp_remote_variables(), *self._smp_slots):
                    remote_variables.clear_read_value(variable)

    def _smp_gather(self) -> Exception | None:
        """Send all variables to the host memory of the pipeline's first rank, one after the other.

        Returns the failure, if there is one.
        """
        assignment, rank = self._smp_assignment.variables, state.groups.rank_in("pp")
        failure: Exception | None = None
        with self._smp_all_variables():
            variables = [*self.variables, *optimizer_variables.variables_of(getattr(self, "optimizer", None))]
        for inner in map(underlying, variables):
            home = assignment.get(id(handle_of(inner)), 0)
            if rank == home != 0:
                communication.send(_value(inner), 0, RankType.PP_RANK)
            elif rank == 0 != home:
                value = communication.recv_from(home, RankType.PP_RANK)
                try:
                    if isinstance(value, Exception):
                        raise value
                    remote_variables.set_read_value(inner, value)
                except (RuntimeError, tf.errors.OpError) as error:
                    # The other ranks continue to send.
                    failure = error
        return failure

    def _smp_signatures(self) -> Any:
        """Return the serving signature: a call like that of the last step.

        Its tensors are named by parameter and key; a single tensor is ``inputs``.
        """
        args, kwargs = self.__dict__["_smp_example"]
        signature = inspect.signature(self.call)
        call = signature.bind(*args, **{name: each for name, each in kwargs.items() if name != "training"})
        # Not in training mode, whatever the step used.
        call.arguments.pop("training", None)
        mode = {"training": False} if "training" in signature.parameters else {}
        example = dict(call.arguments)
        places = nest.flatten_with_joined_string_paths(example)
        tensors = {path: value for path, value in places if isinstance(value, tf.TensorSpec)}
        if not tensors:
            raise SMPUnsupportedError("`save_model` needs a model that is called with tensors")
        names = {path: path.replace("/", "_") if len(tensors) > 1 else "inputs" for path in tensors}

        def serve(**given: tf.Tensor) -> Any:
            flat = [given[names[path]] if path in names else value for path, value in places]
            call.arguments.update(tf.nest.pack_sequence_as(example, flat))
            results = tf.nest.flatten(self(*call.args, **call.kwargs, **mode))
            return {f"output_{number}": each for number, each in enumerate(results)}

        specs = {
            names[path]: tf.TensorSpec([None, *value.shape[1:]] if value.shape.rank else [], value.dtype, names[path])
            for path, value in tensors.items()
        }
        return {"serving_default": tf.function(serve).get_concrete_function(**specs)}


def _described(value: Any) -> Any:
    return tf.TensorSpec(value.shape, value.dtype) if isinstance(value, tf.Tensor) else value


def _value(variable: tf.Variable) -> Any:
    try:
        return variable.numpy()
    except tf.errors.OpError as error:
        return RuntimeError(f"`{variable.name}` cannot be read: {error.message}")


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def _handed_out(value: Any) -> Any:
    if not isinstance(value, tf.Tensor):
        return value
    out = tf.identity(value)
    if hasattr(value, "_keras_mask"):
        out._keras_mask = value._keras_mask
    return out


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Return a context that assigns operations to a partition, in the model's ``call``.

    The innermost context wins. It has no effect under ``auto_partition``.

    Args:
        index: The partition, from 0.

    Yields:
        Nothing.
    """
    partitions = state.cfg.partitions
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < partitions:
        raise SMPPartitionError(f"partition {index!r} does not exist: there are {partitions}")
    trace = state.trace
    if trace is None or state.cfg.auto_partition:
        yield
        return
    with trace.in_partition(index):
        yield


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Call a function once, after the model has been partitioned and before its first forward.

    It is called at once if the model is partitioned. If it raises in the first step, the step fails, and the next step
    calls it again; no later hook runs before it has succeeded.

    Args:
        hook: The function.

    Returns:
        ``hook``, so that this is usable as a decorator.
    """
    if state.model is not None and state.model.is_partitioned:
        with tf.init_scope():
            hook()
    else:
        state.hooks.append(hook)
    return hook
