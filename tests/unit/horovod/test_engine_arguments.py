"""Arguments of `horovod.ray` and `horovod.spark` that have no effect are named in a warning, once. No cluster is needed."""

from __future__ import annotations

import importlib
import warnings

import pytest

from horovod.common import basics


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch):
    monkeypatch.setattr(basics, "_warned_texts", set())


def warned(function, *args, **kwargs):
    """The texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [str(each.message) for each in caught]


def find(module, name, package):
    pytest.importorskip(package, reason="`make test-engines` installs it")
    pytest.importorskip("ray" if "ray" in module else "pyarrow", reason="`make test-engines` installs it")
    return getattr(importlib.import_module(module), name)


ESTIMATORS = {
    "torch": ("horovod.spark.torch", "TorchEstimator", "torch"),
    "lightning": ("horovod.spark.lightning", "TorchEstimator", "lightning"),
    "keras": ("horovod.spark.keras", "KerasEstimator", "pyspark"),
}


def estimator_of(kind):
    pytest.importorskip("pyspark", reason="`make test-engines` installs it")
    return find(*ESTIMATORS[kind])


UNUSED = {
    "torch": {"custom_objects": {"a": 1}, "train_minibatch_fn": print, "reader_pool_type": "thread"},
    "lightning": {"metrics": [print], "loss_weights": [1.0], "custom_objects": {"a": 1}, "num_gpus": 2},
    "keras": {"checkpoint_callback": print, "inmemory_cache_all": True, "data_module": object()},
}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_estimators_name_each_parameter_without_effect_once(kind):
    estimator, unused = estimator_of(kind), UNUSED[kind]
    name = estimator.__name__
    texts = warned(lambda: estimator(**unused).setParams(**unused))
    assert len(texts) == len(unused)
    for text, parameter in zip(texts, unused, strict=True):
        # The reason follows.
        assert text.startswith(f"`{parameter}` of {name} has no effect: ")
        assert len(text) > len(f"`{parameter}` of {name} has no effect: ")


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_defaults_of_parameters_without_effect_are_not_named(kind):
    estimator = estimator_of(kind)
    defaults = {name: estimator().value(name) for name in UNUSED[kind]}
    assert warned(estimator, **defaults) == []


@pytest.mark.parametrize("kind", ["torch", "keras"])
def test_parameters_with_an_effect_may_be_arrays(kind):
    import numpy as np

    assert warned(estimator_of(kind), loss_weights=np.array([1.0, 2.0]), metrics=[print]) == []


def test_parameters_of_one_training_are_named_too(tmp_path):
    estimator = estimator_of("lightning")
    from horovod.spark.common.store import Store

    one = estimator(model=object(), store=Store.create(str(tmp_path)), feature_cols=["a"], label_cols=["b"])

    def train():
        with pytest.raises(ValueError, match="no Parquet data set"):
            one.fit_on_parquet({one.loss_weights: [1.0]})

    assert warned(train) == ["`loss_weights` of TorchEstimator has no effect: the module computes its loss"]


class StartedError(Exception):
    """A training was started, with these variables."""


class NoBackend:
    """A backend that starts no training."""

    def run(self, fn, args=(), kwargs=None, env=None):
        raise StartedError(env)

    def num_processes(self):
        return 1


def training_data(folder):
    import pyarrow
    from pyarrow import parquet

    from horovod.spark.common.store import Store

    (folder / "intermediate_train_data").mkdir()
    table = pyarrow.table({"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [1.0, 2.0]})
    parquet.write_table(table, folder / "intermediate_train_data" / "0.parquet")
    return Store.create(str(folder))


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"loss_weights": [1.0]}, "`loss_weights` has 1 weights for 2 label columns"),
        ({"metrics": [[print]]}, "`metrics` has 1 lists for 2 label columns"),
        ({"metrics": [[print], print]}, "`metrics` has 1 lists for 2 label columns"),
        ({"loss_constructors": [print, print]}, "`loss` and `loss_constructors` exclude each other"),
    ],
)
def test_parameters_for_each_label_are_for_all_labels(tmp_path, parameters, error):
    estimator = estimator_of("torch")
    common = {"feature_cols": ["a"], "label_cols": ["b", "c"], "backend": NoBackend(), "store": training_data(tmp_path)}
    one = estimator(model=object(), optimizer=object(), loss=[print, print], **common, **parameters)
    with pytest.raises(ValueError, match=error):
        one.fit_on_parquet()


def test_validation_without_files_is_named(tmp_path):
    estimator = estimator_of("torch")
    common = {"feature_cols": ["a"], "label_cols": ["b"], "backend": NoBackend(), "store": training_data(tmp_path)}
    one = estimator(model=object(), optimizer=object(), loss=print, validation=0.1, **common)

    def train():
        with pytest.raises(StartedError):
            one.fit_on_parquet()

    (text,) = warned(train)
    assert text.startswith("`validation` has no effect: there is no Parquet data set at `file://")


def test_options_of_a_store_without_effect_are_named(tmp_path):
    pytest.importorskip("pyspark", reason="`make test-engines` installs it")
    from horovod.spark.common.store import FilesystemStore, LocalStore

    options = {"storage_options": {"key": "a"}}
    assert warned(FilesystemStore, f"file://{tmp_path}", **options) == []
    assert warned(LocalStore, str(tmp_path)) == []
    expected = "`storage_options` of LocalStore has no effect: it does not use fsspec"
    assert warned(LocalStore, str(tmp_path), **options) == [expected]


def test_figures_of_lightning_are_averaged_by_name():
    averages = find("horovod.spark.lightning.training", "averages", "lightning")
    ranks = [{"loss": 1.0, "rate": 0.5}, {"accuracy": 0.25, "loss": 3.0}, {"loss": 5.0}]
    assert list(averages(ranks).items()) == [("accuracy", 0.25), ("loss", 3.0), ("rate", 0.5)]
    assert averages([{}, {}]) == {}


@pytest.mark.parametrize("use_gpu", [True, False])
def test_keras_on_pytorch_learns_whether_ranks_use_gpus(tmp_path, use_gpu):
    estimator, keras = estimator_of("keras"), pytest.importorskip("keras", reason="Keras is not installed")
    common = {"feature_cols": ["a"], "label_cols": ["b"], "backend": NoBackend(), "store": training_data(tmp_path)}
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(StartedError) as caught:
        estimator(model=model, optimizer="sgd", loss="mse", use_gpu=use_gpu, **common).fit_on_parquet()
    assert caught.value.args[0].get("KERAS_TORCH_DEVICE") == (None if use_gpu else "cpu")


@pytest.mark.parametrize(
    ("use_gpu", "count", "expected"),
    [(True, 2, ["GPU 1"]), (True, 1, ["GPU 0"]), (False, 2, []), (True, 0, None), (False, 0, None)],
)
def test_a_rank_of_tensorflow_sees_its_gpu_only(monkeypatch, use_gpu, count, expected):
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    pytest.importorskip("pyspark", reason="`make test-engines` installs it")
    choose_device = find("horovod.spark.keras.training", "choose_device", "pyspark")
    seen, grows = [], []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind} {index}" for index in range(count)])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: seen.append((devices, kind)))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda device, grow: grows.append((device, grow)))
    choose_device("tf_keras", use_gpu, local_rank=3)
    assert seen == ([] if expected is None else [(expected, "GPU")])
    assert grows == [(device, True) for device in expected or []]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"num_workers": 1, "max_workers": 2}, ["max_workers"]),
        ({"num_workers": 1, "reset_limit": 0, "cooldown_range": (1, 2)}, ["reset_limit", "cooldown_range"]),
        (
            {"num_hosts": 1, "elastic_timeout": 5, "override_discovery": False},
            ["elastic_timeout", "override_discovery"],
        ),
        ({"num_workers": 1, "num_workers_per_host": 2}, ["num_workers_per_host"]),
        ({"min_workers": 1, "num_workers_per_host": 2}, ["num_workers_per_host"]),
        ({"num_hosts": 1, "num_workers_per_host": 2}, []),
        ({"min_workers": 1, "max_workers": 2, "reset_limit": 1, "elastic_timeout": 5}, []),
        ({"num_workers": 1, "use_current_placement_group": False}, []),
    ],
)
def test_arguments_of_the_ray_executor_without_effect_are_named(arguments, names):
    executor = find("horovod.ray", "RayExecutor", "ray")
    texts = warned(lambda: [executor(executor.create_settings(), **arguments) for _ in range(2)])
    assert len(texts) == bool(names)
    for name in names:
        assert f"`{name}`" in texts[0]


def test_settings_of_the_ray_executor_without_effect_are_named():
    executor = find("horovod.ray", "RayExecutor", "ray")
    (text,) = warned(executor.create_settings, ssh_identity_file="key", ssh_str="text")
    assert text == "`ssh_identity_file` and `ssh_str` have no effect: Ray starts the workers"
    settings = executor.create_settings(placement_group_timeout_s=5)
    assert warned(executor, settings, num_workers=1) == []
    (text,) = warned(executor, settings, min_workers=1)
    assert text == "`placement_group_timeout_s` has no effect with `min_workers`: set `elastic_timeout`"
    (text,) = warned(executor(executor.create_settings(), min_workers=1).start, executable_args=[1])
    assert text == "`executable_args` and `executable_kwargs` have no effect without `executable_cls`"


def test_settings_of_the_elastic_ray_executor_without_effect_are_named():
    executor = find("horovod.ray", "ElasticRayExecutor", "ray")
    assert warned(executor.create_settings, cooldown_range=(1, 2), verbose=2, num_proc=1) == []
    (text,) = warned(executor.create_settings, ssh_identity_file="key", output_filename="folder", tcp_flag=False)
    assert text.startswith("without effect: `ssh_identity_file`, `output_filename`. ")


@pytest.mark.parametrize("name", ["RayExecutor", "ElasticRayExecutor"])
def test_a_discovery_that_is_not_used_is_named(name):
    executor = find("horovod.ray", name, "ray")
    from horovod.runner.elastic.discovery import FixedHosts

    options = {"min_workers": 1} if name == "RayExecutor" else {}
    settings = executor.create_settings()
    settings.discovery = FixedHosts({"host": 1})
    (text,) = warned(executor, settings, **options)
    assert text == "`discovery` of the settings has no effect without `override_discovery=False`"
    settings.discovery = FixedHosts({"host": 1})
    assert warned(executor, settings, override_discovery=False, **options) == []
    settings = executor.create_settings()
    # The first executor sets a discovery of its own.
    assert warned(lambda: [executor(settings, **options) for _ in range(2)]) == []


def test_gpus_of_slots_without_gpus_are_named():
    discovery = find("horovod.ray", "RayHostDiscovery", "ray")
    assert warned(discovery) == []
    assert warned(discovery, gpus_per_slot=2) == ["`gpus_per_slot` has no effect without `use_gpu`: slots have no GPUs"]
