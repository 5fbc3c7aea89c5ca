"""The adapters for old scripts do not affect scripts that do not use them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from support import more

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")

# Prints everything that a current script sees of the objects that have adapters, without memory addresses.
CURRENT_SCRIPT = """
import copy, inspect, json, pickle, re, sys, zipfile
import numpy as np
import smdistributed.dataparallel.tensorflow as sdp
import tensorflow as tf
keras = tf.keras
folder = sys.argv[1]
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
optimizer = keras.optimizers.AdamW(0.5, name="o")
model.compile(optimizer, keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()])
history = model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
print(history.history)
variables = optimizer.variables
assert isinstance(variables, list)
print(len(variables), repr(variables), str(variables), variables == list(variables), [v.name for v in variables])
for derived in (variables[:2], variables + [], [*variables], copy.copy(variables), variables.copy(), variables * 1):
    print(type(derived).__name__ == "list" or type(variables).__name__, len(derived))
print(type(pickle.loads(pickle.dumps(variables[:0]))), type(pickle.loads(pickle.dumps(type(variables)([1, 2])))))
print(len(tf.nest.flatten([variables])), [str(s) for s in tf.nest.map_structure(lambda v: tuple(v.shape), variables)])
if hasattr(keras, "tree"):
    shapes = keras.tree.map_structure(lambda v: tuple(v.shape), {"a": variables})
    print(shapes, type(shapes["a"]), len(keras.tree.flatten(variables)))
variables.append(None)  # a copy, as ever
print(len(optimizer.variables))
print(json.dumps(optimizer.get_config(), default=str), keras.optimizers.serialize(optimizer)["class_name"])
for function in (type(optimizer).__init__, type(optimizer).apply_gradients, type(optimizer).build):
    print(inspect.signature(function), function.__name__, function.__doc__)
for wrong in (
    lambda: keras.optimizers.SGD(learning=0.1),
    lambda: keras.optimizers.SGD(),
    lambda: keras.optimizers.Adam(name="o", nesterov=1),
    lambda: optimizer.no_such_name,
    lambda: optimizer.apply_gradients(),
    lambda: keras.metrics.Mean().no_such_name,
):
    try:
        print(type(wrong()).__name__)
    except Exception as error:
        print(type(error).__name__, error)
model.save(folder + "/m.keras")
with zipfile.ZipFile(folder + "/m.keras") as saved:
    print(re.sub(r'"shared_object_id": [0-9]+', "", saved.read("config.json").decode()))  # an address
loaded = keras.models.load_model(folder + "/m.keras")
print(type(loaded.optimizer), [float(np.sum(v)) for v in loaded.optimizer.variables])
print(tf.train.list_variables(tf.train.Checkpoint(o=optimizer).save(folder + "/c")))
metric = keras.metrics.Mean()
metric.update_state(3.0)
print(float(metric.result()), metric.reset_state(), float(metric.result()))
"""

OLD_SCRIPT = """
import sys
import smdistributed.dataparallel.tensorflow as sdp
import keras
missing = []
optimizer = keras.optimizers.SGD(0.5)
for call in (
    lambda: optimizer.variables(),
    lambda: optimizer.lr,
    lambda: optimizer.get_gradients,
    lambda: optimizer.minimize,
    lambda: keras.optimizers.SGD(lr=0.25).learning_rate,
    lambda: keras.metrics.Mean().reset_states(),
):
    try:
        call()
    except (TypeError, ValueError, AttributeError):
        missing.append(call)
print(len(missing))
"""

LATE_IMPORT = """
import sys
import smdistributed.dataparallel.tensorflow
assert "tf_keras" not in sys.modules
import tf_keras
print(hasattr(tf_keras.optimizers.SGD(0.5), "get_gradients"))
"""


def _run(script, *arguments, **variables):
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("keras", ["keras", more("tf_keras")])
def test_a_current_script_sees_no_difference(keras, tmp_path):
    if importlib.util.find_spec(keras) is None:
        pytest.skip(f"{keras} is not installed")
    legacy = str(int(keras == "tf_keras"))
    with_adapters, without = (
        _run(CURRENT_SCRIPT, tmp_path, TF_USE_LEGACY_KERAS=legacy, SMD_KERAS_COMPAT=switch) for switch in "10"
    )
    assert with_adapters == without
    assert with_adapters.count("\n") > 20


@pytest.mark.more
def test_the_variable_switches_adapters_on_and_off():
    assert _run(OLD_SCRIPT, SMD_KERAS_COMPAT="1") == "0\n"
    assert _run(OLD_SCRIPT, SMD_KERAS_COMPAT="0") == "6\n"


@pytest.mark.more
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
def test_a_keras_that_is_imported_later_gets_adapters():
    assert _run(LATE_IMPORT) == "True\n"
