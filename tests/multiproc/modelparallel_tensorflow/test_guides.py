"""The TensorFlow scripts of the original's guide to model parallelism run unchanged, and train as one process does.

The guide leaves out the layers and the body of `call`. The test fills them in and changes nothing else. scikit-learn's
digits replace MNIST.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from support import Forked, missing, more, run_ranks
from support.tf_env import ENV

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"),
    pytest.mark.timeout(200),
]

GOLDENS = Path(__file__).parents[2] / "goldens"
EPOCHS = 5
MICROBATCHES = 4

LAYERS = """
        self.layer0, self.layer1 = layers()
"""
CALL = """
        return self.layer1(self.layer0(x))
"""


def digits():
    """Returns scikit-learn's digits in the format of `mnist.load_data`."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images * (255 / 16)).astype("float32").reshape(-1, 8, 8)
    return (images[:1536], labels[:1536].astype("int64")), (images[1536:], labels[1536:].astype("int64"))


def layers():
    """Returns the two halves of the model, with the same initial weights on every rank and in one process."""
    import tensorflow as tf

    keras = tf.keras

    def start(seed):
        return keras.initializers.GlorotUniform(seed=seed)

    first = [
        keras.layers.Conv2D(8, 3, activation="relu", kernel_initializer=start(1)),
        keras.layers.Flatten(),
    ]
    second = [
        keras.layers.Dense(64, activation="relu", kernel_initializer=start(2)),
        keras.layers.Dense(10, kernel_initializer=start(3)),
    ]
    return keras.Sequential(first), keras.Sequential(second)


def filled(name, text):
    """Returns the script with its gaps filled."""
    if name == "manual":
        # Keras needs `super().__init__()` before layers are assigned; in this script the gap has to contain it.
        gap = "         # define layers\n"
        assert gap in text
        return text.replace(gap, "         super().__init__()\n         self.layer0, self.layer1 = layers()\n")
    text, first = re.subn(r"^ +# defin\w* layers\n", LAYERS.lstrip("\n"), text, flags=re.MULTILINE)
    text, second = re.subn(r"^ +# define forward pass .*\n", CALL.lstrip("\n"), text, flags=re.MULTILINE)
    assert (first, second) == (1, 1)
    return text


def expected(replicas):
    """Returns the losses of plain TensorFlow in one process at the end of each epoch, one for each replica's
    batches."""
    import tensorflow as tf

    (images, labels), _ = digits()
    images = (images / 255.0)[..., None]
    whole = tf.data.Dataset.from_tensor_slices((images, labels))
    datasets = [whole.shuffle(10000, seed=seed).batch(256, drop_remainder=True) for seed in range(replicas)]
    model = tf.keras.Sequential(layers())
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam()

    @tf.function
    def step(batches):
        losses, total = [], None
        for batch_images, batch_labels in batches:
            with tf.GradientTape() as tape:
                loss = loss_object(batch_labels, model(batch_images, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            losses.append(loss)
            total = gradients if total is None else [one + other for one, other in zip(total, gradients, strict=True)]
        mean = [gradient / replicas for gradient in total]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
        return losses

    ends = []
    for _ in range(EPOCHS):
        for batches in zip(*datasets, strict=True):
            losses = step(batches)
        ends.append([float(loss) for loss in losses])
    return ends


def guide(name, folder, replicas):
    """Runs the script; returns its losses at the end of each epoch, Keras' name, accuracy, replica, number of
    variables, and on rank 0 the losses of one process."""
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    # A file, because TensorFlow reads the source of a tf.function.
    script = Path(folder) / f"{name}.py"
    tf.keras.datasets.mnist.load_data = lambda path: digits()
    losses = []

    def epochs(count):
        assert count == EPOCHS
        yield from (_note(epoch) for epoch in range(count))
        losses.append(float(sys._getframe(1).f_globals["loss"]))

    def _note(epoch):
        if epoch:
            losses.append(float(sys._getframe(3).f_globals["loss"]))
        return epoch

    given = {"layers": layers, "range": epochs}
    script_globals = runpy.run_path(str(script), init_globals=given, run_name="__main__")
    kind = script_globals["optimizer"].__module__.split(".")[0]
    accuracy = float(script_globals["train_accuracy"].result())
    variables = len(script_globals["model"].trainable_variables)
    plain = expected(replicas) if smp.rank() == 0 else None
    return losses, kind, accuracy, smp.dp_rank(), variables, plain


_BY_HAND = {"auto_partition": False, "default_partition": 0}
#: Parameters of `smp.init` by script and number of processes.
PARAMETERS = {
    ("automatic", 2): {"partitions": 2},
    ("automatic", 4): {"partitions": 2, "ddp": True},
    ("manual", 2): {"partitions": 2, **_BY_HAND},
    ("manual", 4): {"partitions": 2, "ddp": True, **_BY_HAND},
    ("hybrid", 2): {"partitions": 1, "horovod": True},
    ("hybrid", 4): {"partitions": 2, "horovod": True},
}
#: Script, processes, launcher and Keras; `tests/e2e/modelparallel_tensorflow_guides.py` runs all combinations.
CASES = [
    ("manual", 4, Forked("tensorflow"), "keras"),
    ("hybrid", 2, Forked("tensorflow"), "keras"),
]


@pytest.mark.parametrize(
    ("name", "size", "launcher", "keras"),
    [
        *(pytest.param(*case, id="-".join(map(str, (*case[:2], case[3])))) for case in CASES),
        more("automatic", 4, "smdrun", "keras", id="automatic-4-keras"),
        more("manual", 4, "mpirun", "tf_keras", id="manual-4-tf_keras"),
    ],
)
def test_the_guides_scripts(name, size, launcher, keras, tmp_path):
    check(name, size, launcher, keras, tmp_path)


def check(name, size, launcher, keras, folder):
    """Runs one script under one launcher, and compares its losses with those of one process."""
    import numpy as np

    parameters = PARAMETERS[name, size]

    if importlib.util.find_spec(keras) is None:
        pytest.skip(f"{keras} is not installed")
    if isinstance(launcher, str) and (reason := missing(launcher)):
        pytest.skip(reason)
    text = (GOLDENS / f"modelparallel_guide_tensorflow_{name}.py.txt").read_text()
    (Path(folder) / f"{name}.py").write_text(filled(name, text))
    env = ENV | {"SM_HP_MP_PARAMETERS": json.dumps({"microbatches": MICROBATCHES, **parameters})}
    if keras == "tf_keras":
        env["TF_USE_LEGACY_KERAS"] = "1"
    replicas = size // parameters["partitions"]
    ranks = run_ranks(guide, size, name, str(folder), replicas, launcher=launcher, env=env, timeout=190)
    plain = np.array(ranks[0][5])
    assert plain[-1].mean() < plain[0].mean() - 0.3
    for losses, kind, accuracy, dp_rank, _, _ in ranks:
        assert kind == keras
        assert accuracy > 0.5
        np.testing.assert_allclose(losses, plain[:, dp_rank], rtol=0, atol=1e-4)
    # The partitions of each replica share the six variables, and each has at least one.
    by_replica = [sum(rank[4] for rank in ranks if rank[3] == replica) for replica in range(replicas)]
    assert by_replica == [6] * replicas
    assert all(rank[4] > 0 for rank in ranks)


def document():
    """Returns the path of the guide's document, if it is next to the checkout."""
    return sorted((Path(__file__).parents[4] / "shared" / "seeds").glob("000_*.txt"))


@pytest.mark.skipif(not document(), reason="the guide is not next to the checkout")
def test_the_scripts_are_those_of_the_guide():
    blocks = re.findall(r"^```\n(.*?)^```", document()[0].read_text(), re.DOTALL | re.MULTILINE)
    names = ("automatic", "hybrid", "manual")
    assert blocks == [(GOLDENS / f"modelparallel_guide_tensorflow_{name}.py.txt").read_text() for name in names]
