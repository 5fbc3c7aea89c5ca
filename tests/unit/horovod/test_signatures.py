"""Parameters and defaults of `horovod.ray` and `horovod.spark` are those of Horovod's published API."""

from __future__ import annotations

import importlib
import inspect

import pytest

#: Horovod 0.28, https://horovod.readthedocs.io/en/stable/api.html.
SIGNATURES = {
    "horovod.ray:RayExecutor": (
        "settings, num_workers=None, num_hosts=None, num_workers_per_host=1, cpus_per_worker=1, use_gpu=False, "
        "gpus_per_worker=None, use_current_placement_group=True, min_workers=None, max_workers=None, reset_limit=None, "
        "cooldown_range=None, elastic_timeout=600, override_discovery=True"
    ),
    "horovod.ray:RayExecutor.create_settings": (
        "timeout_s=30, ssh_identity_file=None, ssh_str=None, placement_group_timeout_s=100, nics=None"
    ),
    "horovod.ray:RayExecutor.start": (
        "self, executable_cls=None, executable_args=None, executable_kwargs=None, extra_env_vars=None"
    ),
    "horovod.ray:RayExecutor.run": "self, fn, args=None, kwargs=None, callbacks=None",
    "horovod.ray:RayExecutor.run_remote": "self, fn, args=None, kwargs=None",
    "horovod.ray:RayExecutor.execute": "self, fn, callbacks=None",
    "horovod.ray:RayExecutor.execute_single": "self, fn",
    "horovod.ray:RayExecutor.shutdown": "self",
    "horovod.ray:ElasticRayExecutor": (
        "settings, use_gpu=False, cpus_per_slot=1, gpus_per_slot=None, env_vars=None, override_discovery=True"
    ),
    "horovod.ray:ElasticRayExecutor.create_settings": (
        "min_num_proc=1, max_num_proc=None, reset_limit=None, elastic_timeout=600, timeout_s=30, ssh_identity_file=None, "
        "nics=None, min_np=None, max_np=None, **kwargs"
    ),
    "horovod.ray:ElasticRayExecutor.start": "self",
    "horovod.ray:ElasticRayExecutor.run": "self, worker_fn, callbacks=None",
    "horovod.spark:run": (
        "fn, args=(), kwargs=None, num_proc=None, start_timeout=None, use_mpi=None, use_gloo=None, extra_mpi_args=None, "
        "env=None, stdout=None, stderr=None, verbose=1, nics=None, prefix_output_with_timestamp=False, executable=None"
    ),
    "horovod.spark:run_elastic": (
        "fn, args=(), kwargs=None, num_proc=None, min_num_proc=None, max_num_proc=None, start_timeout=None, "
        "elastic_timeout=None, reset_limit=None, cooldown_range=None, env=None, stdout=None, stderr=None, verbose=1, "
        "nics=None, prefix_output_with_timestamp=False, min_np=None, max_np=None"
    ),
}
#: Parameters of every estimator.
COMMON = {
    *("num_proc", "model", "backend", "store", "loss", "metrics", "feature_cols", "label_cols", "validation"),
    *("callbacks", "batch_size", "val_batch_size", "epochs", "train_steps_per_epoch", "validation_steps_per_epoch"),
    *("shuffle_buffer_size", "shuffle", "verbose", "partitions_per_process", "run_id", "sample_weight_col"),
    *("compress_sparse_cols", "custom_objects", "gradient_compression", "transformation_fn", "use_gpu"),
    *("train_reader_num_workers", "val_reader_num_workers", "reader_pool_type", "inmemory_cache_all", "random_seed"),
    *("mp_start_method", "backward_passes_per_step", "transformation_edit_fields", "transformation_removed_fields"),
}
ESTIMATORS = {
    "horovod.spark.torch:TorchEstimator": {"optimizer", "loss_constructors", "train_minibatch_fn", "input_shapes"},
    "horovod.spark.keras:KerasEstimator": {"optimizer", "loss_weights", "checkpoint_callback"},
    "horovod.spark.lightning:TorchEstimator": {"loader_num_epochs", "terminate_on_nan", "profiler", "trainer_args"},
}


def find(name):
    module, path = name.split(":")
    pytest.importorskip({"horovod.ray": "ray"}.get(module, "pyspark"), reason="`make test-engines` installs it")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_and_defaults_are_the_published_ones(name):
    parameters = inspect.signature(find(name)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    assert ", ".join(map(str, bare)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_have_the_published_parameters(name):
    names = {each.name for each in find(name)().params}
    missing = (COMMON | ESTIMATORS[name]) - names
    assert not missing
