"""Calls of scripts for TensorFlow 2.3 and 2.4 that Keras has since changed: one adapter each.

===================================  ================================================================================
call of an old script                adapter
===================================  ================================================================================
``optimizer.variables()``            ``variables``, a list in Keras 3, is a list that returns itself when called
``optimizer.get_gradients(loss, p)`` added where it is missing: the gradients, in a ``tf.function`` or a graph of TF1
``optimizer.minimize(loss, v)``      added to Keras 3
``optimizer.lr``, ``Adam(lr=..)``    added to Keras 3: the learning rate
``apply_gradients(.., name=..)``     Keras 3 takes ``name`` and ``experimental_aggregate_gradients`` too
``metric.reset_states()``            added to Keras 3: ``reset_state()``
===================================  ================================================================================

Importing ``smdistributed.dataparallel.tensorflow`` puts them into Keras 3 and into tf_keras, once each of these is
imported: ``tf.keras`` imports one when it is first used. ``SMD_KERAS_COMPAT=0`` leaves them out. A script that uses
none of these calls behaves as without them: names are only added, arguments that Keras would refuse are taken, and the
list of variables equals, prints, copies and pickles as the list that it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from smdistributed import _core
from smdistributed._common import import_hooks, keras3
from smdistributed.dataparallel.tensorflow.keras_variable import underlying

_OFF = ("0", "false", "off", "no")


def install() -> None:
    """Install the adapters in the Keras packages that are imported, and in others when they are imported."""
    if _core.setting("SMD_KERAS_COMPAT").lower() in _OFF:
        return
    for package, adapt in _ADAPTED.items():
        if _imported(package):
            adapt()
        import_hooks.after_import(package, functools.partial(_adapt_imported, package))


def _adapt_imported(package: str) -> None:
    if _imported(package):
        _ADAPTED[package]()


def _imported(package: str) -> bool:
    # A package that is being imported has no optimizers yet.
    return hasattr(sys.modules.get(package), "optimizers")


@functools.cache
def _adapt_keras3() -> None:
    keras = sys.modules["keras"]
    base = _owner(keras.optimizers.Optimizer, "apply_gradients")
    keras.src.tree.register_tree_node_class(CallableList)
    for cls in _classes(base):
        if "variables" in vars(cls):
            cls.variables = _callable(vars(cls)["variables"])
    base.__init__ = _taking_lr(base.__init__)
    base.apply_gradients = _taking_old_arguments(base.apply_gradients)
    base.lr = property(_get_learning_rate, _set_learning_rate, doc="The learning rate; alias of ``learning_rate``.")
    base.minimize = minimize
    base.get_gradients = get_gradients
    keras.metrics.Metric.reset_states = reset_states


@functools.cache
def _adapt_tf_keras() -> None:
    # The other adapters apply to both packages.
    base = _owner(sys.modules["tf_keras"].optimizers.Optimizer, "compute_gradients")
    base.get_gradients = get_gradients


_ADAPTED = {"keras": _adapt_keras3, "tf_keras": _adapt_tf_keras}


def _owner(cls: type, name: str) -> Any:
    """Return the base class that defines the attribute."""
    return next(base for base in cls.__mro__ if name in vars(base))


def _classes(base: Any) -> list[Any]:
    children: list[Any] = base.__subclasses__()
    return [base, *(cls for child in children for cls in _classes(child))]


class CallableList(list):
    """A list that returns itself when called. Copies, slices and pickles of it are plain lists."""

    def __call__(self) -> CallableList:
        """Return the list; a call is how scripts used the former method."""
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[list[Any]]]:
        """A plain list, so that a file does not depend on this class."""
        return list, (list(self),)

    # Keras requires these methods of a class that its pytrees contain.

    def tree_flatten(self) -> tuple[list[Any], None]:
        """Return the elements, for Keras' trees.

        Returns:
            The elements, and no metadata.
        """
        return list(self), None

    @classmethod
    def tree_unflatten(cls, _metadata: None, children: Sequence[Any]) -> list[Any]:
        """Return a plain list, for Keras' trees.

        Args:
            _metadata: Ignored.
            children: The elements.

        Returns:
            The list.
        """
        return list(children)


def _callable(variables: property) -> property:
    getter = variables.fget
    assert getter is not None, "Keras' properties can be read"

    @functools.wraps(getter)
    def get(self: Any) -> CallableList:
        return CallableList(getter(self))

    return property(get, variables.fset, variables.fdel, variables.__doc__)


def _taking_lr(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, learning_rate: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # Keras rejects `lr`, because every optimizer passes unknown arguments on.
        init(self, kwargs.pop("lr", learning_rate), *args, **kwargs)

    return __init__


def _taking_old_arguments(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_gradients)
    def with_old_arguments(
        self: Any, grads_and_vars: Any, name: str | None = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        if experimental_aggregate_gradients:
            return apply_gradients(self, grads_and_vars)
        with keras3.reduced_by_caller():
            return apply_gradients(self, grads_and_vars)

    return with_old_arguments


def _get_learning_rate(self: Any) -> Any:
    return self.learning_rate


def _set_learning_rate(self: Any, value: Any) -> None:
    self.learning_rate = value


def reset_states(self: Any) -> None:
    """Reset the metric: ``reset_state`` under its old name."""
    self.reset_state()


def minimize(self: Any, loss: Any, var_list: Any, tape: tf.GradientTape | None = None) -> Any:
    """Compute the gradients of ``loss`` and apply them.

    Args:
        self: The optimizer.
        loss: A function without arguments, or a tensor that ``tape`` has recorded.
        var_list: Variables, or a function that returns them.
        tape: The tape that recorded ``loss``; needed if ``loss`` is a tensor.

    Returns:
        The result of ``apply_gradients``.

    Raises:
        ValueError: ``loss`` is a tensor, and there is no tape.
    """
    if not callable(loss) and tape is None:
        raise ValueError("`loss` is a tensor, but `tape` is None: pass the tf.GradientTape that recorded it")
    tape = tape or tf.GradientTape()
    if callable(loss):
        with tape:
            loss = loss()
    # After the loss was computed, because that may create the variables.
    variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
    gradients = tape.gradient(loss, [underlying(variable) for variable in variables])
    return self.apply_gradients(zip(gradients, variables, strict=True))


def get_gradients(self: Any, loss: tf.Tensor, params: Any) -> list[Any]:
    """Return this rank's gradients of ``loss`` with respect to ``params``; ``apply_gradients`` reduces them.

    Args:
        self: The optimizer.
        loss: A tensor of a ``tf.function`` or of a graph of TF1.
        params: Variables.

    Returns:
        One gradient for each variable.

    Raises:
        RuntimeError: In eager mode, where nothing has recorded how ``loss`` came to be.
        ValueError: ``loss`` does not depend on a variable.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "`get_gradients` works in a tf.function or a graph of TF1: in eager mode, use a GradientTape"
        )
    variables = [underlying(variable) for variable in tf.nest.flatten(params)]
    gradients = tf.gradients(loss, variables)
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None:
            raise ValueError(
                f"the loss does not depend on variable `{variable.name}` through operations that have a gradient"
            )
    return gradients
