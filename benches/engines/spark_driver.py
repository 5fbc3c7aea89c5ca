"""Trains `examples/torch_digits.py` with two tasks of a Spark application.

spark-submit --master 'local-cluster[2,1,1024]' benches/engines/spark_driver.py --double --out FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import horovod.spark

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def train(examples: str, words: list[str]) -> None:
    """Runs in each task."""
    sys.path.insert(0, examples)
    import torch_digits

    torch_digits.main(words)


def main() -> None:
    session = SparkSession.builder.getOrCreate()
    horovod.spark.run(train, args=(str(EXAMPLES), sys.argv[1:]), num_proc=2)
    session.stop()


if __name__ == "__main__":
    main()
