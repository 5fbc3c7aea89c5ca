"""Estimators on a Spark cluster of two executors: ``make test-engines``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: `make test-engines` installs it")
pytest.importorskip("pyarrow", reason="pyarrow is not installed: `make test-engines` installs it")
if shutil.which("java") is None:
    pytest.skip("there is no Java: `make test-engines` installs openjdk-17-jre-headless", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

from spark import SparkCluster

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster():
    with SparkCluster() as running:
        yield running


def test_the_example_of_pytorch(cluster):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    store = cluster.folder / "store"
    results = cluster.results("pytorch_digits.py", "--work-dir", store)
    history = results["history"]
    assert [each["epoch"] for each in history] == list(range(5))
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"] / 3
    assert history[-1]["validation"]["all_metrics"][0] > 0.85
    assert results["accuracy"] > 0.85
    # Intermediate data are deleted.
    assert [path.name for path in store.iterdir()] == ["runs"]


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_the_example_of_keras(cluster, package):
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    results = cluster.results("keras_digits.py", "--package", package)
    history = results["history"]
    assert sorted(history) == ["accuracy", "loss", "val_accuracy", "val_loss"]
    assert len(history["loss"]) == 5
    assert history["loss"][-1] < history["loss"][0] / 3
    assert history["val_accuracy"][-1] > 0.85
    assert results["accuracy"] > 0.85


def test_the_estimator_of_pytorch(cluster):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    body = """
        import numpy as np
        import torch
        from torch import nn
        from horovod.spark.common.backend import LocalBackend, SparkBackend
        from horovod.spark.common.store import FilesystemStore, Store
        from horovod.spark.torch import TorchEstimator, TorchModel

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Linear(2, 1), nn.Linear(1, 3)
            def forward(self, first, second):
                return self.left(first), self.right(second)

        folder = sys.argv[1]
        def seen(frame):
            with open(f"{folder}/seen", "a") as file:
                file.writelines(f"{value}\\n" for value in frame["number"])
            return frame

        session = spark()
        rows = [(number, [number / 50, 1.0], [number / 100], number / 25, [0.5, number / 50, 1.0], 1.0 + number % 2,
                 number % 4 == 0) for number in range(100)]
        frame = session.createDataFrame(rows, ["number", "first", "second", "one", "three", "weight", "held"])
        torch.manual_seed(0)
        model = Two()
        estimator = TorchEstimator(
            backend=SparkBackend(2, stdout=sys.stdout), store=FilesystemStore(f"file://{sys.argv[1]}"), model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05), loss=[nn.MSELoss(), nn.MSELoss()],
            loss_weights=[0.5, 2], feature_cols=["first", "second"], label_cols=["one", "three"],
            label_shapes=[[-1, 1], [-1, 3]], sample_weight_col="weight", validation="held", batch_size=10, epochs=3,
            run_id="run", random_seed=3)
        trained = estimator.fit(frame)
        again = estimator.fit(frame, {estimator.epochs: 30})
        losses = [each["train"]["loss"] for each in again.getHistory()]
        assert len(losses) == 30 and losses[:3] == [each["train"]["loss"] for each in trained.getHistory()]
        assert losses[-1] < losses[0] / 5, losses
        out = again.transform(frame)
        assert dict(out.dtypes)["one__output"] == "double" and dict(out.dtypes)["three__output"] == "array<double>"
        row = out.filter("number = 50").first()
        expected = again.getModel()(torch.tensor([row.first]), torch.tensor([row.second]))
        assert abs(row.one__output - expected[0].item()) < 1e-5
        assert np.allclose(row.three__output, expected[1][0].detach(), atol=1e-5)
        again.write().overwrite().save(f"file://{sys.argv[1]}/model")
        loaded = TorchModel.load(f"file://{sys.argv[1]}/model")
        assert loaded.uid == again.uid and loaded.getHistory() == again.getHistory()
        assert loaded.transform(frame).filter("number = 50").first() == row
        estimator.write().save(f"file://{sys.argv[1]}/estimator")
        assert TorchEstimator.load(f"file://{sys.argv[1]}/estimator").getLabelCols() == ["one", "three"]

        # Files that another application has written, of one row group: each rank reads a part of it.
        store = Store.create(sys.argv[1])
        frame.repartition(1).write.parquet(store.get_train_data_path())
        model = nn.Linear(2, 1)
        estimator = TorchEstimator(num_proc=2, store=store, model=model, feature_cols=["first"], label_cols=["one"],
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_constructors=nn.MSELoss, batch_size=7,
            label_shapes=[[-1, 1]], transformation_fn=seen)
        estimator.fit_on_parquet()
        with open(f"{folder}/seen") as file:
            assert sorted(map(int, file)) == list(range(100))

        # Numbers of dropout are those of the seed, on each rank.
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1))
        estimator = TorchEstimator(
            backend=LocalBackend(2), store=store, model=model, feature_cols=["first"], label_cols=["one"],
            label_shapes=[[-1, 1]], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.MSELoss())
        first, second = (estimator.fit_on_parquet({estimator.random_seed: 5}).getHistory() for _ in range(2))
        assert first == second, (first, second)
        for wrong in ({"label_cols": ["none"]}, {"validation": 1.5}, {"feature_cols": ["first", "second"]}):
            try:
                estimator.copy().setParams(backend=SparkBackend(2), **wrong).fit(frame)
            except (ValueError, RuntimeError) as error:
                print("REFUSED", error)
        try:
            TorchEstimator(stor=1)
        except TypeError as error:
            print("REFUSED", error)
        session.stop()
    """
    output = cluster.run(cluster.script("estimator", body), cluster.folder / "files")
    assert "REFUSED the data frame has no columns ['none']" in output
    assert "REFUSED `validation` is 1.5" in output
    assert "REFUSED rank" in output
    assert "REFUSED TorchEstimator has no parameters ['stor']" in output


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_settings_of_the_estimator_of_keras(cluster, backend):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    body = """
        import keras
        import numpy as np
        import pyarrow
        from pyarrow import parquet
        from horovod.spark.common.backend import LocalBackend
        from horovod.spark.common.store import Store
        from horovod.spark.keras import KerasEstimator

        class Doubled(keras.layers.Layer):
            def call(self, values):
                return 2 * keras.ops.sum(values, -1, keepdims=True)

        class Seen(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                device = getattr(self.model.weights[0].value, "device", "")
                print("DEVICE", keras.backend.backend(), os.environ.get("KERAS_TORCH_DEVICE"), device, flush=True)

        numbers = np.arange(100.0)
        table = {"features": [[number / 50, 1.0] for number in numbers], "one": numbers / 25, "two": numbers}
        store = Store.create(sys.argv[1])
        os.makedirs(f"{sys.argv[1]}/intermediate_train_data")
        parquet.write_table(pyarrow.table(table), f"{sys.argv[1]}/intermediate_train_data/0.parquet")
        values = keras.layers.Input((2,))
        hidden = keras.layers.GaussianNoise(0.1)(values)
        outputs = [Doubled(name="one")(keras.layers.Dense(4)(hidden)), keras.layers.Dense(1, name="two")(hidden)]
        model = keras.Model(values, outputs)

        estimator = KerasEstimator(
            backend=LocalBackend(2), store=store, model=model, optimizer=keras.optimizers.SGD(0.01),
            loss=[keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError()], loss_weights=[1.0, 0.0],
            metrics=[[keras.metrics.MeanAbsoluteError(name="error")], []], feature_cols=["features"],
            label_cols=["one", "two"], label_shapes=[[-1, 1], [-1, 1]], custom_objects={"Doubled": Doubled},
            callbacks=[Seen()], use_gpu=False, random_seed=5, batch_size=10, verbose=0)
        # The noise is that of the seed.
        first, second = (estimator.fit_on_parquet().getHistory() for _ in range(2))
        assert first == second, (first, second)
        assert abs(first["loss"][0] - first["one_loss"][0]) < 1e-4 < first["two_loss"][0], first
        assert any("error" in name for name in first), first
    """
    cluster.environment["KERAS_BACKEND"] = backend
    output = cluster.run(cluster.script("settings", body), cluster.folder / "files")
    devices = [line.partition("DEVICE ")[2].split() for line in output.splitlines() if "DEVICE" in line]
    assert len(devices) == 4, output
    for found, variable, device in devices:
        assert (found, variable) == (backend, "cpu")
        assert "cpu" in device.lower()


def test_the_estimator_of_lightning(cluster):
    pytest.importorskip("lightning", reason="Lightning is not installed: `make test-engines` installs it")
    body = """
        import lightning
        import numpy as np
        import torch
        from sklearn.datasets import load_digits
        from horovod.spark.common.store import Store
        from horovod.spark.lightning import TorchEstimator

        class Digits(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.Sequential(
                    torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
            def forward(self, images):
                return self.layers(images)
            def training_step(self, batch, number):
                assert batch["features"].shape[1:] == (1, 8, 8)
                loss = torch.nn.functional.cross_entropy(self(batch["features"]), batch["label"])
                self.log("loss", loss, on_step=False, on_epoch=True)
                return loss
            def validation_step(self, batch, number):
                right = self(batch["features"]).argmax(1) == batch["label"]
                self.log("accuracy", right.float().mean(), batch_size=len(right))
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        session = spark()
        digits = load_digits()
        rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(digits.data, digits.target)]
        frame = session.createDataFrame(rows, ["features", "label"])
        torch.manual_seed(0)
        estimator = TorchEstimator(
            num_proc=2, store=Store.create(sys.argv[1]), model=Digits(), feature_cols=["features"],
            label_cols=["label"], input_shapes=[[-1, 1, 8, 8]], validation=0.2, batch_size=32, epochs=3, run_id="run")
        estimator.fit(frame)
        trained = estimator.fit(frame, {estimator.epochs: 4})
        history = trained.getHistory()
        print("HISTORY", history)
        assert [each["epoch"] for each in history] == list(range(4))
        assert history[-1]["loss"] < history[0]["loss"] / 3
        assert history[-1]["accuracy"] > 0.85
        found = trained.transform(frame).select("label", "label__output").collect()
        assert np.mean([np.argmax(row.label__output) == row.label for row in found]) > 0.85

        class Uneven(Digits):
            def training_step(self, batch, number):
                import horovod.torch as hvd
                self.log(f"of {hvd.rank()}", float(hvd.rank()), on_step=False, on_epoch=True)
                return super().training_step(batch, number)

        class Compared(lightning.Callback):
            def on_train_end(self, trainer, module):
                import horovod.torch as hvd
                every = hvd.allgather(module.layers[1].weight.detach().reshape(1, -1))
                assert torch.equal(every[0], every[1])
                print("COMPARED", len(every), flush=True)

        trained = TorchEstimator(
            num_proc=2, store=Store.create(sys.argv[1]), model=Uneven(), feature_cols=["features"],
            label_cols=["label"], input_shapes=[[-1, 1, 8, 8]], trainer_args={"callbacks": [Compared()]}, random_seed=1,
            metrics=[print], verbose=0).fit(frame)
        (figures,) = trained.getHistory()
        assert figures["of 0"] == 0 and figures["of 1"] == 1 and figures["loss"] > 0, figures
        try:
            TorchEstimator(num_proc=2, loss=1).copy().setParams(
                model=Digits(), store=Store.create(sys.argv[1]), feature_cols=["features"], label_cols=["label"]
            ).fit(frame)
        except ValueError as error:
            print("REFUSED", error)
        session.stop()
    """
    output = cluster.run(cluster.script("modules", body), cluster.folder / "files")
    assert "REFUSED loss cannot be set" in output
    assert output.count("COMPARED 2") == 2
    assert output.count("`metrics` of TorchEstimator has no effect: the history has what the module logs") == 1
