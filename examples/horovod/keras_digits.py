"""Classifies handwritten digits with Keras's `fit`, Horovod's API and all of its callbacks.

horovodrun -np 2 python examples/horovod/keras_digits.py
mpirun -np 2 python examples/horovod/keras_digits.py
torchrun --nproc-per-node 2 examples/horovod/keras_digits.py
"""

from __future__ import annotations

import argparse
import os
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import horovod.keras as hvd


def main() -> None:
    """Trains, and prints the accuracy of the best model on what was held back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--checkpoint", help="the best model of all epochs; by default a file that is removed")
    options = parser.parse_args()

    hvd.init()
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    labels = digits.target
    # All ranks need the same number of batches.
    rows = 1500 // hvd.size()
    mine = np.arange(hvd.rank(), rows * hvd.size(), hvd.size())
    held_back = images[1500:], labels[1500:]

    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    # The learning rate is scaled by the number of ranks, because a step processes one batch of each rank.
    rate = options.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before the callbacks that read metrics.
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup_epochs, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(rate, multiplier=0.8, start_epoch=options.warmup_epochs),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = options.checkpoint or os.path.join(folder, "best.keras")
        if hvd.rank() == 0:
            best = hvd.callbacks.BestModelCheckpoint(monitor="val_accuracy")
            best.filepath = path
            callbacks.append(best)
        model.fit(
            images[mine],
            labels[mine],
            batch_size=options.batch_size,
            epochs=options.epochs,
            validation_data=held_back,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )
        if hvd.rank() == 0:
            model = hvd.load_model(path)
            _, accuracy = model.evaluate(*held_back, verbose=0)
            print(f"accuracy {accuracy:.3f} on {hvd.size()} ranks")


if __name__ == "__main__":
    main()
