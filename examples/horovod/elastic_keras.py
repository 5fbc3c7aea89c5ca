"""Trains on scikit-learn's handwritten digits with Keras while hosts come and go, or workers die.

    horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./discover.sh python examples/horovod/elastic_keras.py

where `discover.sh` prints a line such as `localhost:2` for each host. It also runs under `horovodrun -np 2`, mpirun and torchrun.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.keras as hvd

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--steps", type=int, default=30, help="batches of an epoch on one worker; several share them")
parser.add_argument("--batch-size", type=int, default=32)
arguments = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images.astype(np.float32) / 16
data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(2000, seed=hvd.rank())
data = data.batch(arguments.batch_size)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])


@hvd.elastic.run
def train(state):
    model.fit(
        data,
        steps_per_epoch=max(1, arguments.steps // hvd.size()),
        # After a reset, all steps of the interrupted epoch are repeated, with the model of the last commit.
        epochs=arguments.epochs - state.epoch,
        callbacks=[
            # In this order, so that the commit contains the updated epoch and batch.
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )


train(hvd.elastic.KerasState(model, batch=0, epoch=0))
if hvd.rank() == 0:
    _, right = model.evaluate(images, labels, verbose=0)
    print(f"{right:.1%} of the digits are right", flush=True)
