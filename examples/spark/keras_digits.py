"""Trains a Keras model on a Spark data frame of handwritten digits by an estimator of ``pyspark.ml``.

    python examples/spark/keras_digits.py --master 'local-cluster[2,1,1024]' --num-proc 2

``--package tf_keras`` trains a model of tf_keras; without it ``KERAS_BACKEND`` says what Keras 3 runs on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import DoubleType
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.keras import KerasEstimator


def main() -> None:
    """Starts the Spark application, trains and predicts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--work-dir", help="folder for intermediate data and checkpoints, which all hosts share")
    parser.add_argument("--package", default="keras", choices=["keras", "tf_keras"])
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.package == "tf_keras":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    keras = importlib.import_module(options.package)

    session = SparkSession.builder.master(options.master).getOrCreate()
    digits = load_digits()
    rows = [
        (Vectors.dense(image / 16), Vectors.dense(np.eye(10)[digit]), float(digit))
        for image, digit in zip(digits.data, digits.target, strict=True)
    ]
    frame = session.createDataFrame(rows, ["features", "label_vector", "label"])
    train, test = frame.randomSplit([0.8, 0.2], seed=1)

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        estimator = KerasEstimator(
            num_proc=options.num_proc,
            store=Store.create(options.work_dir or folder),
            model=model,
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss="categorical_crossentropy",
            metrics=["accuracy"],
            feature_cols=["features"],
            label_cols=["label_vector"],
            input_shapes=[[-1, 8, 8, 1]],
            validation=0.1,
            batch_size=options.batch_size,
            epochs=options.epochs,
        )
        trained = estimator.fit(train).setOutputCols(["probabilities"])
    digit_of = udf(lambda probabilities: float(np.argmax(probabilities)), DoubleType())
    predicted = trained.transform(test).withColumn("digit", digit_of("probabilities"))
    accuracy = predicted.filter("digit = label").count() / predicted.count()
    print(f"accuracy {accuracy:.3f}")
    if options.out:
        options.out.write_text(json.dumps({"history": trained.getHistory(), "accuracy": accuracy}))
    session.stop()


if __name__ == "__main__":
    main()
