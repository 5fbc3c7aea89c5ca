"""Classifies handwritten digits with a gradient tape of TensorFlow and Horovod's API.

horovodrun -np 2 python examples/horovod/tensorflow_digits.py
mpirun -np 2 python examples/horovod/tensorflow_digits.py
torchrun --nproc-per-node 2 examples/horovod/tensorflow_digits.py
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd


def main() -> None:
    """Trains, and prints the accuracy on what was held back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="of one rank; several ranks share them")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.001)
    options = parser.parse_args()

    hvd.init()
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target
    share = slice(hvd.rank(), 1500, hvd.size())
    data = tf.data.Dataset.from_tensor_slices((images[share], labels[share]))
    data = data.shuffle(1500, seed=hvd.rank()).repeat().batch(options.batch_size)

    model = tf.keras.Sequential(
        [tf.keras.layers.Input((64,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # The learning rate is scaled by the number of ranks, because a step processes one batch of each rank.
    optimizer = tf.keras.optimizers.Adam(options.learning_rate * hvd.size())

    @tf.function
    def training_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss, name="loss")

    for step, (x, y) in enumerate(data.take(max(options.steps // hvd.size(), 1))):
        loss = training_step(x, y)
        if step == 0:
            # After the first step, because it creates the optimizer's variables.
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        if step % 20 == 0 and hvd.rank() == 0:
            print(f"step {step}: loss {float(loss):.3f}")

    mine = slice(1500 + hvd.rank(), None, hvd.size())
    hits = np.sum(np.argmax(model(images[mine]), 1) == labels[mine])
    counts = hvd.allreduce(tf.constant([hits, len(labels[mine])]), op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"accuracy {int(counts[0]) / int(counts[1]):.3f} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
