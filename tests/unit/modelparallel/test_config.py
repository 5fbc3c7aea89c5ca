"""The configuration of model parallelism, its sources, and the coordinates of ranks."""

from __future__ import annotations

import json

import pytest

from smdistributed import _core
from smdistributed._common.errors import ConfigError, InvalidArgumentError
from smdistributed.modelparallel import config
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError


@pytest.fixture(autouse=True)
def _no_launcher_variables(monkeypatch):
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    monkeypatch.delenv("SMP_CONFIG", raising=False)
    config.warn_once.cache_clear()


def test_defaults_that_depend_on_other_keys():
    cfg = config.read({"partitions": 3, "optimize": "speed"})
    assert cfg.pipeline_parallel_degree == cfg.partitions == 3
    assert cfg.active_microbatches == 5
    assert config.read({"partitions": 3, "pipeline": "zero_bubble"}).active_microbatches is None
    assert cfg.memory_weight == 0.2
    assert config.read().memory_weight == 0.8
    assert (config.read().partitions, config.read().pipeline) == (1, "interleaved")
    with pytest.raises(AttributeError, match="read only"):
        cfg.ddp = True


def test_the_launchers_values_override_those_of_the_script(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"microbatches": 2, "ddp": True}))
    monkeypatch.setenv("SMP_CONFIG", str(tmp_path / "config.json"))
    cfg = config.read({"microbatches": 8, "partitions": 4})
    assert (cfg.microbatches, cfg.partitions, cfg.ddp) == (2, 4, True)
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches":16,"partitions":2}')
    cfg = config.read({"microbatches": 8, "partitions": 4})
    assert (cfg.microbatches, cfg.partitions, cfg.ddp) == (16, 2, True)
    whole = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"partitions": 5}}}}
    monkeypatch.delenv("SM_HP_MP_PARAMETERS")
    monkeypatch.setenv("SMP_CONFIG", json.dumps(whole))
    assert config.read().partitions == 5


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"partitions": 0}, "smp.init: `partitions` is 0: expected a whole number of at least 1"),
        ({"microbatches": True}, "a whole number of at least 1"),
        ({"partitions": 2, "pipeline_parallel_degree": 3}, "two names of one parameter"),
        ({"pipeline": "fast"}, '"zero_bubble"'),
        ({"optimize": "size"}, '"memory", "speed"'),
        ({"placement_strategy": "DP"}, "D, P and T in any order"),
        ({"auto_partition": False}, "default_partition"),
        ({"load_partition": True}, "without `partition_file`"),
        ({"auto_partition": False, "default_partition": 2, "partitions": 2}, "less than `partitions`, which is 2"),
        ({"memory_weight": 1.5}, "from 0 to 1"),
        ({"ddp_port": 5}, "needs `ddp`"),
        ({"partition_file": 3}, "a text"),
        (
            {"partition_file": object()},
            "smp.init: `partition_file` is <object .* expected a value that JSON can represent",
        ),
        ({"memory_weight": float("nan")}, "smp.init: `memory_weight` is nan"),
    ],
)
def test_bad_values_are_named(given, text):
    with pytest.raises(SMPConfigError, match=text) as error:
        config.read(given)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    "given",
    [
        {"horovod": True},
    ],
)
def test_a_key_that_is_not_supported_yet_is_named(given):
    with pytest.raises(SMPUnsupportedError, match="not supported yet"):
        config.read(given)
    assert config.read({"fp16": False, "tensor_parallel_degree": 1}).fp16 is False


def test_keys_of_one_framework_are_refused_for_the_other():
    with pytest.warns(UserWarning, match="`tensor_parallel_degree` 2 implies `ddp: true`"):
        assert config.read({"tensor_parallel_degree": 2}).ddp
    with pytest.raises(SMPUnsupportedError, match="`tensor_parallel_degree` is 2, but only 1 is supported"):
        config.read({"tensor_parallel_degree": 2, "ddp": True}, "tensorflow")
    bound = {"activation_memory_bytes": 1 << 20}
    assert config.read(bound).activation_memory_bytes == 1 << 20
    with pytest.raises(SMPUnsupportedError, match="`activation_memory_bytes` is 1048576, but only None is supported"):
        config.read(bound, "tensorflow")
    assert config.read({"horovod": True}, "tensorflow").horovod
    assert config.read({"offload_activations": True}).activation_loading_horizon == 4
    assert config.read({"fp16": True}).fp16
    assert config.read({"bf16": True}).bf16
    with pytest.raises(SMPUnsupportedError, match="`fp16` is True, but only False is supported"):
        config.read({"fp16": True}, "tensorflow")
    with pytest.raises(SMPUnsupportedError, match="`cuda_graphs` is True, but only False is supported"):
        config.read({"cuda_graphs": True}, "tensorflow")
    with pytest.raises(SMPUnsupportedError, match="`offload_activations` is True, but only False is supported"):
        config.read({"offload_activations": True}, "tensorflow")


def test_a_value_without_effect_warns():
    with pytest.warns(UserWarning, match="`contiguous: false` is ignored"):
        config.read({"contiguous": False})


def test_values_may_be_spelled_as_for_the_launcher():
    cfg = config.read({"sdp_reduce_bucket_size": 5e8, "sdp_gradient_clipping": 0, "placement_strategy": "tpd"})
    assert (cfg.sdp_reduce_bucket_size, cfg.sdp_gradient_clipping, cfg.placement_strategy) == (500_000_000, 0, "TPD")
    assert type(cfg.sdp_reduce_bucket_size) is int
    assert config.read({"pipeline": "zero_bubble", "ddp_port": None}).pipeline == "zero_bubble"


def test_unknown_keys_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="`mikrobatches`"):
        config.read({"mikrobatches": object()})
    config.read({"_internal": object()})


def test_a_broken_configuration_file_is_named(monkeypatch):
    monkeypatch.setenv("SMP_CONFIG", "/nowhere/config.json")
    with pytest.raises(SMPConfigError, match="cannot be read"):
        config.read()
    monkeypatch.setenv("SMP_CONFIG", "{")
    with pytest.raises(SMPConfigError, match="is not valid JSON"):
        config.read()


def test_groups_equal_the_published_tables():
    cluster, spread = (_core.ParallelTopology(8, 2, 1, name) for name in ("cluster", "spread"))
    assert cluster.groups("mp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cluster.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert spread.groups("mp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert spread.groups("dp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _core.ParallelTopology(8, 4, 1, "spread").groups("pp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    both = _core.ParallelTopology(8, 2, 2, "DPT")
    coordinates = [both.coordinates(rank) for rank in range(8)]
    assert coordinates == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert [both.group("dp", rank).index(rank) for rank in range(8)] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert both.groups("rdp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ConfigError, match="6 processes"):
        _core.ParallelTopology(6, 4, 1, "cluster")
    with pytest.raises(InvalidArgumentError, match="not a kind of group"):
        both.group("zp", 0)
    with pytest.raises(InvalidArgumentError, match="rank 8 is not below 8"):
        both.coordinates(8)
    large = _core.ParallelTopology(4096, 8, 1, "cluster")
    assert [len(large.groups(kind)) for kind in ("pp", "dp", "rdp")] == [512, 8, 8]
