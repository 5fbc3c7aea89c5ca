"""The TensorFlow scripts of the original's guides run unchanged, and train as one process does.

The guides leave out three parts, written `...`: the data, the model and the training loop. The test fills them in, and
defines `checkpoint` and `checkpoint_dir`, which the scripts use. It changes nothing else.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from support import Forked, more, run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed"),
    pytest.mark.timeout(180),
]
_ENV = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
_ENV["CUDA_VISIBLE_DEVICES"] = ""

GOLDENS = Path(__file__).parents[2] / "goldens"
SCRIPTS = ("developer_guide_tensorflow.py.txt", "sdk_guide_tensorflow.py.txt")
GLOBAL_BATCH = 64
STEPS = 15
LEARNING_RATE = 0.000125

LOOP = """
for batch, (images, labels) in enumerate(dataset.batch({global_batch} // sdp.size())):
    # A Python bool in one of the scripts, a tensor in the other.
    loss_value = training_step(images, labels, {first_batch})
    losses.append(float(sdp.oob_allreduce(loss_value)))

checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)
"""


def digits():
    """Returns images and labels of scikit-learn's handwritten digits, a multiple of the global batch."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    count = GLOBAL_BATCH * STEPS
    return (images[:count] / 16).astype("float32").reshape(-1, 8, 8, 1), labels[:count].astype("int64")


def layers():
    """Returns new layers with the same initial weights on every rank and in one process."""
    import tensorflow as tf

    keras = tf.keras

    def start(seed):
        return keras.initializers.GlorotUniform(seed=seed)

    return [
        keras.layers.Conv2D(8, 3, activation="relu", kernel_initializer=start(1)),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu", kernel_initializer=start(2)),
        keras.layers.Dense(10, activation="softmax", kernel_initializer=start(3)),
    ]


def filled(text, first_batch):
    """Returns the script with its three gaps filled. One of the guides has no-break spaces, which Python rejects."""
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    assert code.count("...") == 3
    text = text.replace("from_tensor_slices(...)", "from_tensor_slices(my_share(sdp.rank(), sdp.size()))")
    text = text.replace("Sequential(...)", "Sequential(layers())")
    loop = LOOP.format(global_batch=GLOBAL_BATCH, first_batch=first_batch)
    return re.sub(r"^\.\.\.$", lambda _: loop, text, flags=re.MULTILINE)


def one_process(size):
    """Returns the losses of plain TensorFlow on whole batches, with the learning rate of `size` ranks."""
    import tensorflow as tf

    model = tf.keras.Sequential(layers())
    loss = tf.keras.losses.SparseCategoricalCrossentropy()
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE * size)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    return [float(step(*batch)) for batch in tf.data.Dataset.from_tensor_slices(digits()).batch(GLOBAL_BATCH)]


def guides(folder):
    """Runs each script; returns its losses and weights, and on rank 0 the losses of one process."""
    import numpy as np

    import smdistributed.dataparallel.tensorflow as sdp

    def my_share(rank, size):
        return tuple(part[rank::size] for part in digits())

    results = []
    for name, first_batch in zip(SCRIPTS, ("batch == 0", "tf.constant(batch == 0)"), strict=True):
        # Written to a file, because TensorFlow reads the source of a tf.function.
        script = Path(folder) / f"{name}.{np.random.default_rng().integers(2**60)}.py"
        script.write_text(filled((GOLDENS / name).read_text(), first_batch))
        losses: list[float] = []
        checkpoints = Path(folder) / name / "checkpoint"
        given = {"my_share": my_share, "layers": layers, "losses": losses, "checkpoint_dir": str(checkpoints)}
        script_globals = runpy.run_path(str(script), init_globals=given, run_name="__main__")
        kinds = script_globals["opt"].__module__.split(".")[0], script_globals["sdp"] is sdp
        weights = [variable.numpy() for variable in script_globals["mnist_model"].variables]
        results.append((kinds, losses, weights))
        rank, size = sdp.rank(), sdp.size()
        # The next script initializes a session of its own.
        sdp.shutdown()
    return results, one_process(size) if rank == 0 else None


@pytest.mark.parametrize(("keras", "size"), [("keras", 2), more("keras", 4), more("tf_keras", 2), more("tf_keras", 4)])
def test_the_guides_scripts(keras, size, tmp_path):
    import numpy as np

    if importlib.util.find_spec(keras) is None:
        pytest.skip(f"{keras} is not installed")
    env = _ENV | {"TF_USE_LEGACY_KERAS": str(int(keras == "tf_keras"))}
    ranks = run_ranks(guides, size, str(tmp_path), launcher=Forked("tensorflow"), env=env, timeout=170)
    expected = ranks[0][1]
    assert np.mean(expected[-5:]) < np.mean(expected[:5]) - 0.01 * size
    for index, name in enumerate(SCRIPTS):
        kinds, losses, weights = ranks[0][0][index]
        assert kinds == (keras, True)
        assert len(losses) == STEPS
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
        for other in ranks[1:]:
            for one, another in zip(weights, other[0][index][2], strict=True):
                np.testing.assert_array_equal(one, another)
        assert (tmp_path / name / "checkpoint-1.index").exists()


def documents():
    """Returns the paths of the guides' documents, if they are next to the checkout."""
    return sorted((Path(__file__).parents[4] / "shared" / "seeds").glob("00[12]_*.txt"))


@pytest.mark.skipif(not documents(), reason="the guides are not next to the checkout")
def test_the_scripts_are_those_of_the_guides():
    markdown, restructured = (path.read_text() for path in documents())
    fenced = re.findall(r"^```\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^\.\. code:: python\n\n((?:(?: {3}.*)?\n)+)", restructured, re.MULTILINE)
    for name, parts in zip(SCRIPTS, (fenced, blocks), strict=True):
        whole = [part for part in map(textwrap.dedent, parts) if "import tensorflow as tf" in part]
        assert [part.strip() for part in whole] == [(GOLDENS / name).read_text().strip()]
