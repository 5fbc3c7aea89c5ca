"""``fit``, ``evaluate``, ``predict`` and their single-batch methods, with steps over microbatches inside.

Keras makes batches, calls callbacks and keeps metrics. ``train_step``, ``test_step`` and ``predict_step`` call a step,
and this module makes the functions around them.

- FIT-1: batches are those of the pipeline's first rank (``runtime/input_broadcast.py``).
- FIT-2: a function is traced for each number of rows of a batch, so a step knows its microbatches. There are as many as
  configured. Where they do not divide the batch, some have one row more. A batch with fewer rows has one microbatch for
  each row.
- FIT-3: gradients and losses are sums over the microbatches, each weighted by its share of the batch (``losses.py``).
  Metrics are updated after the step, with the outputs of all microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from smdistributed._common import keras3
from smdistributed.dataparallel.tensorflow.collectives import ops as core_ops
from smdistributed.modelparallel.tensorflow import losses
from smdistributed.modelparallel.tensorflow.output import StepOutput
from smdistributed.modelparallel.tensorflow.runtime import input_broadcast
from smdistributed.modelparallel.tensorflow.state import state
from smdistributed.modelparallel.tensorflow.step import StepFunction, translate_errors

#: Whether `tf.keras` is tf_keras, which converts the script's functions with AutoGraph.
_IS_OLDER = tf.keras.Model.__module__.startswith("tf_keras")


def _as_keras(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that AutoGraph does not convert it, as it does not convert Keras' own functions.

    AutoGraph still converts the script's functions that it calls, wherever it would convert them under Keras.
    """

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        converting = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED) if _IS_OLDER else contextlib.nullcontext()
        with converting:
            return function(*args, **kwargs)

    return called


class KerasLoops:
    """Keras' training loops for a distributed model; comes before Keras' model among the bases of a class."""

    # Attributes of Keras' model.
    optimizer: Any
    trainable_variables: Any
    compute_metrics: Callable[..., dict[str, Any]]
    run_eagerly: bool
    steps_per_execution: Any
    train_function: Any
    test_function: Any
    predict_function: Any

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train the model as Keras does. All ranks call it.

        Ranks of a pipeline pass data of the same length; the batches are those of the pipeline's first rank.

        Args:
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.

        Returns:
            Keras' history.

        Raises:
            SMPMismatchError: Ranks of the pipeline call another method, or have another number of batches.
            SMPUnsupportedError: The batch loss cannot be computed from the microbatch losses.
        """
        with self._smp_loop("fit"):
            return super().fit(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model as Keras does. All ranks call it, as :meth:`fit`.

        Args:
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.

        Returns:
            The result of Keras's method.
        """
        with self._smp_loop("evaluate"):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Compute predictions as Keras does. All ranks call it, as :meth:`fit`, and all get the outputs.

        Args:
            *args: Arguments of Keras' method.
            **kwargs: Keyword arguments of Keras' method.

        Returns:
            The result of Keras's method.
        """
        with self._smp_loop("predict"):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def reset_metrics(self) -> None:
        """Reset metrics; Keras calls it when an epoch or an evaluation begins."""
        super().reset_metrics()  # type: ignore[misc]
        self.__dict__["_smp_batches"] = 0

    # Methods that a subclass may override, as in Keras.

    @_as_keras
    def train_step(self, data: Any) -> dict[str, Any]:
        """Train on one batch ``(x, y, sample_weight)``, as Keras' method; return the metrics."""
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        steps = self._smp_steps
        found = steps.train(x, y, sample_weight, _rows(x))
        gradients, tracked = _of_batch(found)
        if gradients is None:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        else:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        steps.track(tracked, x, True)
        return self.compute_metrics(x, y, _merged(found), sample_weight)

    @_as_keras
    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluate one batch, as Keras' method; return losses and metrics."""
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        steps = self._smp_steps
        found = steps.test(x, y, sample_weight, _rows(x))
        _, tracked = _of_batch(found)
        steps.track(tracked, x, False)
        return self.compute_metrics(x, y, _merged(found), sample_weight)

    @_as_keras
    def predict_step(self, data: Any) -> Any:
        """Return the outputs for a batch, as Keras' method."""
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        return _merged(self._smp_steps.predict(x))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configure training, as Keras' method. ``jit_compile`` is ignored: a step has several functions."""
        if kwargs.get("jit_compile") not in (None, False, "auto"):
            warnings.warn("`jit_compile` is ignored: a step over microbatches is not one function", stacklevel=2)
        if "jit_compile" in kwargs and (_IS_OLDER or kwargs["jit_compile"] != "auto"):
            kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)  # type: ignore[misc]
        if not _IS_OLDER and self.jit_compile:  # type: ignore[attr-defined]
            keras3.note_without_xla("a step over microbatches is not one function")
        self.__dict__.pop("_smp_made_steps", None)

    @contextlib.contextmanager
    def _smp_loop(self, activity: str) -> Iterator[None]:
        try:
            with input_broadcast.batch_loop(activity):
                yield
        finally:
            self.__dict__["_smp_batches"] = 0

    @property
    def _smp_steps(self) -> _Steps:
        if "_smp_made_steps" not in self.__dict__:
            self.__dict__["_smp_made_steps"] = _Steps(self)
        return self.__dict__["_smp_made_steps"]

    # Methods that Keras calls to get the functions of its loops.

    def make_train_function(self, force: bool = False) -> Callable[..., Any]:
        """Create the function that trains on ``steps_per_execution`` batches of an iterator."""
        if self.train_function is None or force:
            self.train_function = self._smp_function("fit", self.train_step, "_train_counter")
        return self.train_function

    def make_test_function(self, force: bool = False) -> Callable[..., Any]:
        """Create the function that evaluates ``steps_per_execution`` batches of an iterator."""
        if self.test_function is None or force:
            self.test_function = self._smp_function("evaluate", self.test_step, "_test_counter")
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Callable[..., Any]:
        """Create the function that returns the outputs for ``steps_per_execution`` batches of an iterator or list."""
        if self.predict_function is None or force:
            predict = self._smp_function("predict", self.predict_step, "_predict_counter", _joined)
            self.predict_function = predict
        return self.predict_function

    def _smp_function(
        self, activity: str, step: Callable[[Any], Any], counter: str, joined: Callable[[list[Any]], Any] | None = None
    ) -> Callable[..., Any]:
        functions: dict[Any, Callable[[Any], Any]] = {}

        def compute(batch: Any) -> Any:
            rows = _rows(batch)
            if rows not in functions:
                # One `tf.function` for each number of rows, because TensorFlow warns of a function that is traced
                # often.
                functions[rows] = tf.function(functools.partial(step), autograph=_IS_OLDER, reduce_retracing=True)
            with translate_errors():
                return step(batch) if self.run_eagerly else functions[rows](batch)

        def execute(batches: Any) -> Any:
            count = len(batches) if isinstance(batches, list) else _number(self.steps_per_execution)
            found: list[Any] = []
            batches = iter(batches)
            while len(found) < count:
                try:
                    number = self.__dict__["_smp_batches"] = self.__dict__.get("_smp_batches", 0) + 1
                    batch = input_broadcast.next_batch(f"batch {number} of `{activity}`", lambda: next(batches))
                except (StopIteration, tf.errors.OutOfRangeError):
                    if found and not _IS_OLDER:
                        break
                    raise
                found.append(compute(batch))
                if hasattr(self, counter):
                    getattr(self, counter).assign_add(1)
            return found[-1] if joined is None else joined(found)

        return execute


class _Steps:
    """The steps of a compiled model.

    model: The distributed model.
        model: The distributed model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        options, rows = {"autograph": False}, ["rows"]
        self.train = StepFunction(_as_keras(self._train), rows, {}, options, uneven=True)
        self.test = StepFunction(_as_keras(self._test), rows, {}, options, uneven=True)
        self.predict = StepFunction(_as_keras(self._predict), [], {}, options, uneven=True)
        # For training and for evaluation: metrics that Keras updates where it computes losses, and whether each
        # weighs a batch by its number of rows.
        self._trackers: dict[bool, list[tuple[Any, bool]]] = {}

    def track(self, values: Sequence[tf.Tensor], x: Any, training: bool) -> None:
        """Update metrics with the losses of a batch."""
        rows = _rows(x)
        rows = tf.shape(_first(x))[0] if rows is None else rows
        for (metric, weighs), value in zip(self._trackers[training], values, strict=True):
            metric.update_state(value, sample_weight=rows if weighs else None)

    # Bodies of steps.

    def _train(self, x: Any, y: Any, sample_weight: Any, rows: int | None) -> dict[str, Any]:
        model = self._model
        with losses.of_microbatch(_share(x, rows)) as loss_terms:
            outputs = model(x, training=True)
            loss, found = self._losses(x, y, outputs, sample_weight, loss_terms, True)
        variables = model.trainable_variables
        gradients = model.optimizer.get_gradients(loss, variables) if variables else None
        return {"gradients": gradients, **found, **_with_masks(outputs)}

    def _test(self, x: Any, y: Any, sample_weight: Any, rows: int | None) -> dict[str, Any]:
        with losses.of_microbatch(_share(x, rows)) as loss_terms:
            outputs = self._model(x, training=False)
            _, found = self._losses(x, y, outputs, sample_weight, loss_terms, False)
        return {"gradients": None, **found, **_with_masks(outputs)}

    def _predict(self, x: Any) -> dict[str, Any]:
        return _with_masks(self._model(x, training=False))

    def _losses(
        self, x: Any, y: Any, outputs: Any, sample_weight: Any, loss_terms: losses.LossTerms, training: bool
    ) -> tuple[tf.Tensor | None, dict[str, Any]]:
        """Return a microbatch's part of the batch's loss and of each loss metric, and the divisors of their sums."""
        model = self._model
        if _IS_OLDER:
            loss, metric_updates = _loss_of_older(model, x, y, outputs, sample_weight)
            if training:
                model._validate_target_and_loss(y, loss)
        else:
            loss, metric_updates = _loss(model, x, y, outputs, sample_weight, training)
        weight, count = (1.0, None) if loss is None else loss_terms.weight(loss, model)
        self._trackers[training] = [(metric, weighs) for metric, _, weighs in metric_updates]
        tracked = [value * tf.cast(weight, value.dtype) for _, value, _ in metric_updates]
        whole = None if loss is None else loss * tf.cast(weight, loss.dtype)
        return whole, {"tracked": tracked, "count": count}


def _loss(model: Any, x: Any, y: Any, outputs: Any, sample_weight: Any, training: bool) -> tuple[Any, list[Any]]:
    """Compute the loss, and list the metrics that are updated with the batch and not with each microbatch.

    A metric is listed with its value and whether rows weigh it.
    """
    metric_updates: list[Any] = []
    mean = tf.keras.metrics.Mean
    plain = mean.update_state

    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> None:
        container = model._compile_loss
        if container is not None and any(metric is each for each in container.metrics):
            metric_updates.append((metric, values, True))
        else:
            plain(metric, values, sample_weight)

    mean.update_state = update_state
    try:
        loss = model._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=training)
    finally:
        mean.update_state = plain
    return loss, [(model._loss_tracker, loss, True), *metric_updates]


def _loss_of_older(model: Any, x: Any, y: Any, outputs: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
    """Compute the loss with an older Keras; metrics of single outputs are updated in each microbatch, by its rows."""
    metric_updates: list[Any] = []
    container = model.compiled_loss
    tracker = container._total_loss_mean

    class MetricListener:
        def update_state(self, value: Any, sample_weight: Any = None) -> None:
            metric_updates.append((tracker, value, sample_weight is not None))

    container._total_loss_mean = MetricListener()
    try:
        return model.compute_loss(x, y, outputs, sample_weight), metric_updates
    finally:
        container._total_loss_mean = tracker


def _first(values: Any) -> tf.Tensor | None:
    return next((each for each in tf.nest.flatten(values) if isinstance(each, tf.Tensor)), None)


def _rows(values: Any) -> int | None:
    """Return the number of rows of the first tensor among ``values``, if it is known."""
    first = _first(values)
    return first.shape[0] if first is not None and first.shape.rank else None


def _share(x: Any, rows: int | None) -> tf.Tensor:
    """Return a microbatch's share of the batch's rows; equal shares if the number of rows is unknown."""
    if rows is None:
        return tf.constant(1 / state.cfg.microbatches, tf.float64)
    here = tf.shape(_first(x))[0] if _rows(x) is None else _rows(x)
    return tf.cast(here, tf.float64) / rows


def _number(value: Any) -> int:
    """Return the number in a variable, as in tf_keras, or the number itself."""
    return 1 if value is None else int(value)


def _with_masks(outputs: Any) -> dict[str, Any]:
    """Return the model's outputs together with Keras' masks, which a step's output would not keep."""
    return {"outputs": outputs, "masks": [getattr(each, "_keras_mask", None) for each in tf.nest.flatten(outputs)]}


def _merged(found: Mapping[str, Any]) -> Any:
    """Merge the outputs of the microbatches to those of the batch."""
    masks = iter(found["masks"])

    def merged(value: Any) -> Any:
        if isinstance(value, dict):
            items = {key: merged(value[key]) for key in sorted(value)}
            return type(value)((key, items[key]) for key in value)
        if isinstance(value, tuple | list):
            parts = [merged(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        mask = next(masks)
        if not isinstance(value, StepOutput):
            return value
        whole = value.merge()
        if mask is not None:
            whole._keras_mask = mask.merge()
        return whole

    return merged(found["outputs"])


def _of_batch(found: Mapping[str, Any]) -> tuple[list[Any] | None, list[tf.Tensor]]:
    """Return gradients and tracked losses of a batch."""
    tracked = [each.reduce_sum() for each in found["tracked"]]
    gradients, count = found["gradients"], found["count"]
    if gradients is not None:
        gradients = [None if each is None else each.reduce_sum() for each in gradients]
    if count is None:
        return gradients, tracked
    whole = count.reduce_sum()
    if gradients is not None:
        groups, by = state.groups, whole
        if state.cfg.ddp and groups.dp_group is not None:
            # Gradients are averaged over replicas with equal weight, but replicas may have unmasked parts of
            # different size.
            everywhere = core_ops.smd_all_reduce(tensor=whole, op="sum", group=groups.dp_group)
            by = everywhere / len(groups.members["dp"])
        gradients = [None if each is None else _quotient(each, by) for each in gradients]
    return gradients, [_quotient(each, whole) for each in tracked]


def _quotient(value: Any, by: tf.Tensor) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_quotient(value.values, by), value.indices, value.dense_shape)
    return tf.math.divide_no_nan(value, tf.cast(by, value.dtype))


def _joined(outputs: list[Any]) -> Any:
    """Concatenate the outputs of several batches."""
    if len(outputs) == 1:
        return outputs[0]
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
