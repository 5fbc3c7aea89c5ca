"""Delayed initialization: variables of Keras' layers take no memory until they are read or the model is partitioned.

Every rank builds the whole model, which may be larger than a device, and keeps one partition. So a variable whose
initial value can be computed at any time, as by Keras' own initializers, is made without a value. When the model is
partitioned, the variables of this rank are initialized one after the other; those of other ranks never are.

- DELAY-1: values are those of one process. An initializer is delayed only if its seed is a number, which is drawn when
  the variable is made. Other initializers run at once, in the order of the script.
- DELAY-2: graphs that are only descriptions (a step's trace, Keras' scratch graphs) capture a delayed variable as it
  is. Any other access to its handle initializes it first. So does a ``tf.function`` that is traced for such a graph,
  because it may be called again.
- DELAY-3: a variable is delayed until it has its value; an error during initialization leaves it delayed. One thread at
  a time initializes variables, and other threads that ask for a handle wait for it.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from smdistributed.dataparallel.tensorflow.keras_variable import underlying
from smdistributed.modelparallel.tensorflow.state import state

#: Names of Keras' graphs that are never run; `tf_keras` puts a layer's name before one of them.
_SCRATCH = re.compile(r"(.+_)?scratch_graph|scratch_graph_\d+|build_graph")
#: Initializers of Keras that may be delayed, by module.
_KERAS = ("keras.src.initializers.constant_initializers", "keras.src.initializers.random_initializers")
_OLDER = "tf_keras.src.initializers.initializers"
#: Variables without a value, by the id of their handles.
_delayed: weakref.WeakValueDictionary[int, DelayedVariable] = weakref.WeakValueDictionary()
#: The lock of DELAY-3, reentrant because computing a value may need another variable's.
_beginning = threading.RLock()


class DelayedVariable(resource_variable_ops.UninitializedVariable):
    """A variable that gets its initial value when it is read, and is an ordinary variable from then on.

    Args:
        make: Computes the initial value.
        options: Arguments of ``UninitializedVariable``.
    """

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        self._smp_make = make
        super().__init__(**options)
        _delayed[id(self._smp_handle)] = self

    @property
    def _handle(self) -> Any:
        if not _is_described():
            _begin(self)
        return handle_of(self)

    @_handle.setter
    def _handle(self, handle: Any) -> None:
        self._smp_handle = handle

    @property
    def device(self) -> str:
        """The future device of the variable; optimizers create their variables there."""
        return handle_of(self).device

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the initial value; the new one is kept in host memory until the variable is initialized."""
        if not tf.executing_eagerly():
            return super().assign(value, *args, **kwargs)
        with tf.device("/device:CPU:0"):
            kept = tf.identity(tf.convert_to_tensor(value, self.dtype))
        self.shape.assert_is_compatible_with(kept.shape)
        with _beginning:
            if isinstance(self, DelayedVariable):
                self._smp_make = lambda: kept
                return self
        # Another thread has initialized it meanwhile.
        return self.assign(kept, *args, **kwargs)


def become_plain(variable: Any) -> None:
    """End the delay of a variable without initializing it."""
    with _beginning:
        if not isinstance(variable, DelayedVariable):
            return
        handle = variable._smp_handle
        # The handle exists already.
        variable.__dict__["_handle"] = handle
        variable.__class__ = resource_variable_ops.ResourceVariable
        del variable._smp_handle, variable._smp_make, _delayed[id(handle)]


def _begin(variable: Any) -> None:
    """Initialize a variable that has no value yet (DELAY-3)."""
    with _beginning:
        if not isinstance(variable, DelayedVariable):
            return
        with tf.init_scope(), tf.device(variable.device):
            value = tf.convert_to_tensor(variable._smp_make(), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=handle_of(variable), value=value)
        become_plain(variable)


def handle_of(variable: Any) -> Any:
    """Return the handle of a variable without initializing it; ``None`` for other objects."""
    inner = underlying(variable)
    if not isinstance(inner, tf.Variable):
        return getattr(inner, "handle", None)
    handle = getattr(inner, "_smp_handle", None)
    return inner.handle if handle is None else handle


def delay(variable: Any) -> None:
    """Free the memory of a new variable whose elements are all equal, as in optimizers, until it is needed."""
    inner = underlying(variable)
    if not _is_wanted() or type(inner) is not resource_variable_ops.ResourceVariable or not inner.shape.num_elements():
        return
    with tf.init_scope():
        value = inner.read_value()
        number = tf.reshape(value, [-1])[0]
        if not tf.reduce_all(value == number):
            return
        handle = inner.__dict__.pop("_handle")
        inner.__class__ = DelayedVariable
        inner._smp_make, inner._smp_handle = lambda: tf.fill(inner.shape, number), handle
        _delayed[id(handle)] = inner
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([0], inner.dtype))


def initialize_local(elsewhere: Collection[int]) -> None:
    """Initialize the delayed variables of this rank after the model is partitioned.

    ``elsewhere`` holds the ids of the other variables' handles.
    """
    for key, variable in list(_delayed.items()):
        if key in elsewhere:
            become_plain(variable)
        else:
            _begin(variable)


def install() -> None:
    """Delay variables of the Keras packages that this process has imported; do nothing on a second call."""
    if "keras" in sys.modules:
        _adapt_keras()
    if "tf_keras" in sys.modules:
        _adapt_older()


def _is_wanted() -> bool:
    """Return whether variables that are created now may belong to another rank."""
    if not state.initialized or len(state.groups.members["pp"]) == 1:
        return False
    return state.model is None or not state.model.is_partitioned


def _is_described() -> bool:
    """Return whether the current graph is only a description (DELAY-2)."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    if state.trace is not None and graph is state.trace.graph:
        return True
    # A function of the script may have the same name. While it is traced, its graph has an automatic control
    # dependencies manager.
    return graph.experimental_acd_manager is None and bool(_SCRATCH.fullmatch(getattr(graph, "name", "")))


def _may_wait(initializer: Any) -> bool:
    """Return whether an initializer gives the same values later (DELAY-1)."""
    if not isinstance(getattr(initializer, "value", 0), int | float | complex | np.generic):
        # The value of a constant initializer: an array might change until then.
        return False
    module = type(initializer).__module__
    if module == _OLDER:
        generator = getattr(initializer, "_random_generator", None)
        if generator is None:
            return True
        if generator._rng_type != generator.RNG_STATELESS:
            return False
        # Draws the seed now, if the initializer has none.
        generator._maybe_init()
        return True
    return module in _KERAS and isinstance(getattr(initializer, "seed", 0), int)


@functools.cache
def _adapt_keras() -> None:
    base = sys.modules["keras"].Variable
    plain = base._initialize_with_initializer

    @functools.wraps(plain)
    def initialize(self: Any, initializer: Any) -> None:
        if not _is_wanted() or not _may_wait(initializer):
            plain(self, initializer)
            return
        shape, dtype = self._shape, self._dtype
        # Keras passes the first option to TensorFlow from 3.7 on, the second from 3.10 on.
        options = {
            each: getattr(self, f"_map_{each}")(getattr(self, each))
            for each in ("aggregation", "synchronization")
            if hasattr(self, f"_map_{each}")
        }
        self._value = DelayedVariable(
            lambda: initializer(shape, dtype=dtype),
            shape=shape,
            dtype=tf.as_dtype(dtype),
            name=self.name,
            trainable=self.trainable,
            **options,
        )

    base._initialize_with_initializer = initialize


@functools.cache
def _adapt_older() -> None:
    from tf_keras.src.engine import base_layer_utils

    plain = base_layer_utils.make_variable

    @functools.wraps(plain)
    def make_variable(
        name: str, shape: Any = None, dtype: Any = tf.float32, initializer: Any = None, **options: Any
    ) -> Any:
        if not _is_wanted() or options.get("layout") is not None or not _may_wait(initializer):
            return plain(name, shape, dtype, initializer, **options)
        return DelayedVariable(
            lambda: initializer(shape, dtype=dtype),
            shape=shape,
            dtype=dtype.base_dtype,
            name=name,
            **{
                each: options[each]
                for each in ("trainable", "constraint", "synchronization", "aggregation")
                if each in options
            },
        )

    base_layer_utils.make_variable = make_variable


def with_its_value(create: Callable[..., Any], **options: Any) -> Any:
    """Create a variable with its initial value.

    The surrounding ``tf.function`` would initialize it only before its first run, after the model is partitioned, and
    would trace the whole step again.
    """
    value = options.get("initial_value")
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        return create(**options)  # a variable of the graph, which only a run of the graph creates
    with tf.init_scope():
        return resource_variable_ops.default_variable_creator_v2(None, **options)
