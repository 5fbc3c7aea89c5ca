"""Trains a PyTorch model on a Spark data frame of handwritten digits by an estimator of ``pyspark.ml``.

python examples/spark/pytorch_digits.py --master 'local-cluster[2,1,1024]' --num-proc 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
from pyspark.sql.types import LongType
from sklearn.datasets import load_digits
from torch import nn

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator


def accuracy_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The fraction of right answers."""
    return (output.argmax(1) == label).float().mean()


def main() -> None:
    """Starts the Spark application, trains and predicts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--master", default="local-cluster[2,1,1024]")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--work-dir", help="folder for intermediate data and checkpoints, which all hosts share")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()

    session = SparkSession.builder.master(options.master).getOrCreate()
    digits = load_digits()
    rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(digits.data, digits.target, strict=True)]
    train, test = session.createDataFrame(rows, ["features", "label"]).randomSplit([0.8, 0.2], seed=1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            num_proc=options.num_proc,
            store=Store.create(options.work_dir or folder),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=nn.CrossEntropyLoss(),
            metrics=[accuracy_of],
            feature_cols=["features"],
            label_cols=["label"],
            input_shapes=[[-1, 1, 8, 8]],
            validation=0.1,
            batch_size=options.batch_size,
            epochs=options.epochs,
        )
        trained = estimator.fit(train).setOutputCols(["scores"])
    digit_of = udf(lambda scores: int(np.argmax(scores)), LongType())
    predicted = trained.transform(test).withColumn("digit", digit_of("scores"))
    accuracy = predicted.filter("digit = label").count() / predicted.count()
    print(f"accuracy {accuracy:.3f}")
    if options.out:
        options.out.write_text(json.dumps({"history": trained.getHistory(), "accuracy": accuracy}))
    session.stop()


if __name__ == "__main__":
    main()
