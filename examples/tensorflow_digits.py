"""Trains a small convolutional network on scikit-learn's handwritten digits, data-parallel.

    smdrun -n 2 examples/tensorflow_digits.py

Lines marked "data parallel" are all that differs from a script for one process. TF_USE_LEGACY_KERAS=1 runs it with tf_keras
instead of Keras 3.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

# Data parallel: the library.
import smdistributed.dataparallel.tensorflow as sdp


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,437 images to learn from and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    split = train_test_split(images, labels, test_size=360, random_state=0, stratify=labels)
    return (split[0], split[2]), (split[1], split[3])


def batches(data: tuple[np.ndarray, np.ndarray], batch_size: int, epoch: int) -> tf.data.Dataset:
    """This rank's share of each batch of an epoch, shuffled as on all ranks."""
    order = np.random.default_rng(epoch).permutation(len(data[0]))
    whole = len(order) // batch_size * batch_size
    # Data parallel: each rank takes every size-th image of each batch, so that all ranks have the same number of batches.
    mine = order[:whole][sdp.rank() :: sdp.size()]
    images, labels = data
    return tf.data.Dataset.from_tensor_slices((images[mine], labels[mine])).batch(batch_size // sdp.size())


def replicas_are_equal(model: tf.keras.Model) -> bool:
    """Whether the variables are the same on all ranks, bit for bit."""
    mine = tf.concat([tf.reshape(tf.convert_to_tensor(variable), [-1]) for variable in model.variables], 0)
    lowest = sdp.oob_allreduce(mine, op=sdp.ReduceOp.MIN)
    highest = sdp.oob_allreduce(mine, op=sdp.ReduceOp.MAX)
    return bool(tf.reduce_all(lowest == highest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes; a multiple of their number")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--out", type=Path, default=Path("digits-out"), help="folder for the results")
    arguments = parser.parse_args()

    # Data parallel: join the job, and take one GPU if there are any.
    sdp.init()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[sdp.local_rank()], "GPU")
    if arguments.batch_size % sdp.size():
        parser.error(f"--batch-size {arguments.batch_size} is not a multiple of the {sdp.size()} processes")

    train_set, test_set = digits()
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            tf.keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(arguments.lr)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor, first_batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        # Data parallel: gradients are averaged over the ranks.
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        # Data parallel: each rank has initialized its own weights; replace them by those of rank 0.
        if first_batch:
            sdp.broadcast_variables(model.variables, root_rank=0)
            sdp.broadcast_variables(optimizer.variables, root_rank=0)
        # Data parallel: average the loss, which is computed from this rank's share of the batch.
        return sdp.oob_allreduce(loss)

    losses: list[float] = []
    accuracy = 0.0
    for epoch in range(1, arguments.epochs + 1):
        for images, labels in batches(train_set, arguments.batch_size, epoch):
            losses.append(float(training_step(images, labels, tf.constant(not losses))))
        # Data parallel: rank 0 evaluates; a forward does not communicate.
        if sdp.rank() == 0:
            guesses = tf.argmax(model(test_set[0], training=False), 1)
            accuracy = float(np.mean(guesses.numpy() == test_set[1]))
            print(f"epoch {epoch:2}: loss {losses[-1]:.4f}, test accuracy {accuracy:.1%}", flush=True)

    equal = replicas_are_equal(model)
    # Data parallel: one rank saves.
    if sdp.rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        model.save(arguments.out / "model.keras")
        results = {"losses": losses, "accuracy": accuracy, "replicas_are_equal": equal}
        (arguments.out / "results.json").write_text(json.dumps(results))
        print(f"saved model.keras and results.json in {arguments.out}")


if __name__ == "__main__":
    main()
