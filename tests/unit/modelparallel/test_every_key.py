"""Every configuration key and every argument of models and checkpoints has an effect or warns once."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed import _core  # noqa: E402
from smdistributed._common import lifecycle  # noqa: E402
from smdistributed.modelparallel import config  # noqa: E402
from smdistributed.modelparallel.torch import compat  # noqa: E402

ROOT = Path(__file__).parents[3]
_TORCH = "multiproc/modelparallel_torch/"

#: For keys with an effect: a test file that compares the effect, and the text in it that sets the key.
EFFECTIVE = {
    "activation_loading_horizon": (_TORCH + "test_offloading.py", "activation_loading_horizon"),
    "activation_memory_bytes": (_TORCH + "test_features.py", "activation_memory_bytes"),
    "active_microbatches": (_TORCH + "test_features.py", "active_microbatches"),
    "auto_partition": (_TORCH + "test_features.py", "auto_partition"),
    "bf16": (_TORCH + "test_precision.py", "bf16"),
    "cuda_graphs": ("gpu/test_cuda_graphs.py", "cuda_graphs"),
    "ddp": (_TORCH + "test_replicas.py", '"ddp"'),
    "ddp_dist_backend": (_TORCH + "test_features.py", "ddp_dist_backend"),
    "ddp_port": (_TORCH + "test_features.py", "ddp_port"),
    "default_partition": (_TORCH + "test_features.py", "default_partition"),
    "delayed_parameter_initialization": (_TORCH + "test_features.py", "delayed_parameter_initialization"),
    "fp16": (_TORCH + "test_precision.py", "fp16"),
    "fp16_params": (_TORCH + "test_sharded_combinations.py", "fp16_params"),
    "horovod": ("unit/modelparallel/test_config.py", "horovod"),
    "load_partition": ("unit/modelparallel/test_partitioning.py", "load_partition"),
    "memory_weight": ("unit/modelparallel/test_partitioning.py", "memory_weight"),
    "microbatches": (_TORCH + "test_features.py", "microbatches"),
    "offload_activations": (_TORCH + "test_offloading.py", "offload_activations"),
    "optimize": (_TORCH + "test_tensor_parallelism.py", "speed"),
    "partition_file": (_TORCH + "test_features.py", "partition_file"),
    "pipeline": (_TORCH + "test_features.py", "zero_bubble"),
    "pipeline_parallel_degree": (_TORCH + "test_features.py", "partitions"),
    "placement_strategy": ("unit/modelparallel/test_config.py", "spread"),
    "prescaled_batch": (_TORCH + "test_tensor_parallelism.py", "prescaled"),
    "sdp_gradient_clipping": ("support/tensor_parallel.py", "sdp_gradient_clipping"),
    "sdp_max_live_parameters": (_TORCH + "test_sharded_data_parallelism.py", "sdp_max_live_parameters"),
    "sdp_param_persistence_threshold": (_TORCH + "test_sharded_data_parallelism.py", "sdp_param_persistence_threshold"),
    "sdp_reduce_bucket_size": (_TORCH + "test_sharded_data_parallelism.py", "sdp_reduce_bucket_size"),
    "shard_optimizer_state": (_TORCH + "test_optimizer_sharding.py", "shard_optimizer_state"),
    "sharded_data_parallel_degree": (_TORCH + "test_sharded_data_parallelism.py", "sharded_data_parallel_degree"),
    "skip_tracing": ("unit/modelparallel/test_partitioning.py", "skip_tracing"),
    "tensor_parallel_degree": ("support/tensor_parallel.py", "tensor_parallel_degree"),
}

#: For keys without an effect: the value that warns.
WITHOUT_EFFECT = {
    "contiguous": False,
    "deterministic_server": True,
    "fast_mode": True,
    "sdp_hierarchical_allgather": False,
    "static_mode": True,
}

#: For arguments of `smp.DistributedModel` with an effect: as in `EFFECTIVE`.
EFFECTIVE_ARGUMENTS = {
    "module": (_TORCH + "test_features.py", "DistributedModel"),
    "trace_execution_times": ("unit/modelparallel/test_every_key.py", "trace_execution_times"),
    "overlapping_allreduce": (_TORCH + "test_features.py", "overlapping_allreduce"),
    "backward_passes_per_step": (_TORCH + "test_replicas.py", "backward_passes_per_step"),
    "average_grads_across_microbatches": ("unit/modelparallel/test_every_key.py", "average_grads_across_microbatches"),
    "bucket_cap_mb": (_TORCH + "test_replicas.py", "bucket_cap_mb"),
    "broadcast_buffers": (_TORCH + "test_optimizer_sharding.py", "broadcast_buffers"),
}
ARGUMENTS_WITHOUT_EFFECT = {
    "trace_device": "cpu",
    "trace_memory_usage": True,
    "gradient_as_bucket_view": True,
    "find_unused_parameters": True,
}


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    monkeypatch.delenv("SMP_CONFIG", raising=False)
    config.warn_once.cache_clear()
    yield
    lifecycle.shutdown()


@pytest.fixture
def job():
    smp.init({"microbatches": 2})
    yield
    smp.shutdown()


def _warned(call, times=2):
    """Returns the messages of all warnings of repeated calls; no warning filter applies."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            call()
    return [str(each.message) for each in caught]


def test_the_tables_are_complete():
    assert EFFECTIVE.keys() | WITHOUT_EFFECT.keys() == json.loads(_core.parameter_defaults()).keys()
    assert not EFFECTIVE.keys() & WITHOUT_EFFECT.keys()
    arguments = inspect.signature(smp.DistributedModel).parameters.keys()
    assert EFFECTIVE_ARGUMENTS.keys() | ARGUMENTS_WITHOUT_EFFECT.keys() == arguments
    assert ARGUMENTS_WITHOUT_EFFECT.keys() == compat.IGNORED_ARGUMENTS.keys()


@pytest.mark.parametrize("key", [*EFFECTIVE, *EFFECTIVE_ARGUMENTS])
def test_every_effective_key_has_a_test(key):
    file, text = (EFFECTIVE | EFFECTIVE_ARGUMENTS)[key]
    assert text in (ROOT / "tests" / file).read_text(), key


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_a_key_without_effect_warns_once(key):
    given = {key: WITHOUT_EFFECT[key], "ddp": True, "sharded_data_parallel_degree": 2}
    (text,) = _warned(lambda: config.read(given))
    assert re.search(rf"`{key}: (true|false)` (changes nothing|is ignored): \w+", text)
    page = (ROOT / "docs" / "reference" / "smp-config.md").read_text()
    assert re.search(rf"^\| `{key}` .*with a warning", page, re.MULTILINE)
    default = json.loads(_core.parameter_defaults())[key]
    assert not _warned(lambda: config.read({**given, key: default}))


@pytest.mark.parametrize("argument", ARGUMENTS_WITHOUT_EFFECT)
def test_an_argument_without_effect_warns_once(argument):
    def wrap():
        smp.init({})
        smp.DistributedModel(torch.nn.Linear(2, 2), **{argument: ARGUMENTS_WITHOUT_EFFECT[argument]})
        smp.shutdown()

    (text,) = _warned(wrap)
    assert f"`{argument}=" in text
    assert "is ignored: " in text
    described = (smp.DistributedModel.__doc__ or "").partition(f"{argument}: ")[2].partition("\n        ")[0]
    assert "gnored with a warning" in described


@pytest.mark.parametrize("average", [True, False])
def test_average_grads_across_microbatches(job, average):
    model = smp.DistributedModel(torch.nn.Linear(1, 1), average_grads_across_microbatches=average)

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    step(model, torch.tensor([[3.0], [5.0]]))
    assert model.module.weight.grad.item() == (4.0 if average else 8.0)


def test_trace_execution_times_need_the_device_of_the_training(job):
    with pytest.raises(ValueError, match="`trace_execution_times` needs the device"):
        smp.DistributedModel(torch.nn.Linear(1, 1), trace_execution_times=True, trace_device="cpu")


def test_arguments_of_the_model_without_what_they_need(job):
    given = {"overlapping_allreduce": False, "bucket_cap_mb": 4, "trace_execution_times": True}
    texts = _warned(lambda: smp.DistributedModel(torch.nn.Linear(1, 1), **given), times=1)
    assert sorted(text.split("`")[1] for text in texts) == sorted(given)
    assert sum("without `ddp: true`" in text for text in texts) == 2
    assert sum("without `auto_partition` over several partitions" in text for text in texts) == 1


@pytest.mark.parametrize("key", ["shard_optimizer_state", "sharded_data_parallel_degree"])
def test_arguments_of_reductions_of_whole_gradients_with_shards(key):
    values = {"ddp": True, "shard_optimizer_state": True, "sharded_data_parallel_degree": 1, key: 2}
    cfg = config.Config({**json.loads(_core.parameter_defaults()), **values})
    given = {"overlapping_allreduce": False, "bucket_cap_mb": 4, "backward_passes_per_step": 2}
    texts = _warned(lambda: compat.warn_of_arguments(cfg, **given))
    assert [text.split("`")[1] for text in texts] == ["overlapping_allreduce", "bucket_cap_mb"]
    assert all(f"changes nothing with `{key}: " in text and "reduced to shards" in text for text in texts)
    assert not _warned(lambda: compat.warn_of_arguments(cfg, overlapping_allreduce=True, bucket_cap_mb=25))


def test_the_limit_of_gathered_parameters_with_several_partitions():
    from smdistributed.modelparallel.torch.sharding.pipeline_shards import PipelineShards

    def make(**values):
        cfg = config.Config({**json.loads(_core.parameter_defaults()), **values})
        PipelineShards(None, None, cfg)

    (text,) = _warned(lambda: make(sdp_max_live_parameters=10))
    assert text.startswith("`sdp_max_live_parameters` limits nothing with several partitions: ")
    assert not _warned(make)


def test_keys_of_a_default_group_that_the_script_has_made(tmp_path):
    def run():
        smp.init({"ddp": True, "ddp_port": 7001})
        smp.shutdown()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        (text,) = _warned(run)
    finally:
        torch.distributed.destroy_process_group()
    assert text == "`ddp_port` changes nothing, because the script has initialized `torch.distributed` itself"


def test_arguments_of_checkpoints(job, tmp_path):
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    (text,) = _warned(
        lambda: smp.save_checkpoint(tmp_path, "full", partial=False, model=model, num_kept_partial_checkpoints=1)
    )
    assert "`num_kept_partial_checkpoints` is ignored with `partial=False`" in text
    (text,) = _warned(lambda: smp.save_checkpoint(tmp_path, "s", partial=False, model=model, format="sharded"))
    assert "`partial=False` and `translate_if_full=False` are ignored with `format='sharded'`" in text
    (text,) = _warned(
        lambda: smp.resume_from_checkpoint(tmp_path, "full", partial=False, load_sharded_optimizer_state=False)
    )
    assert "`load_sharded_optimizer_state=False` is ignored without" in text


def test_names_of_earlier_versions(job, tmp_path):
    file = str(tmp_path / "part")
    torch.save({"one": 1}, f"{file}_0_0")
    assert smp.load(file) == smp.load(file, back_compat=True) == {"one": 1}
    with pytest.raises(smp.exceptions.SMPCheckpointError, match="part_0` is missing"):
        smp.load(file, back_compat=False)
    smp.save({"two": 2}, file)
    assert smp.load(file, back_compat=False) == {"two": 2}


def test_the_limit_of_outstanding_calls_is_ignored(monkeypatch):
    def run():
        smp.init({})
        smp.shutdown()

    monkeypatch.setenv("SMP_NCCL_THROTTLE_LIMIT", "8")
    (text,) = _warned(run)
    assert "`SMP_NCCL_THROTTLE_LIMIT` is ignored: " in text
