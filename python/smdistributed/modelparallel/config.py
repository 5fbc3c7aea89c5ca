"""The configuration of a model-parallel job: where it comes from, what it may hold, what follows from it.

Channels, the first of which wins key by key: the variable ``SM_HP_MP_PARAMETERS`` that launchers set, the variable
``SMP_CONFIG`` (JSON, or the path of a JSON file), the dictionary given to ``smp.init``, and the defaults here.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError

#: Schedules by the value of `pipeline`; the core has them under the same names.
PIPELINES = ("interleaved", "simple", "zero_bubble", "_only_forward")


@dataclass(frozen=True)
class Key:
    """What the configuration says of one thing."""

    default: Any
    #: Whether a value is acceptable, and what would be.
    accepts: Callable[[Any], bool]
    expected: str
    #: The only value that this version can work with, where it cannot work with all of them yet.
    only: Any = None
    #: The framework that has the others all the same.
    but_for: str | None = None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(default: Any, **more: Any) -> Key:
    return Key(default, lambda value: _is_int(value) and value >= 1, "a positive int", **more)


def _flag(default: bool | None = False, **more: Any) -> Key:
    return Key(default, lambda value: isinstance(value, bool), "a bool", **more)


def _one_of(default: str, *names: str) -> Key:
    return Key(default, lambda value: value in names, f"one of {', '.join(map(repr, names))}")


def _is_placement(value: Any) -> bool:
    return isinstance(value, str) and (value in ("cluster", "spread") or sorted(value.upper()) == ["D", "P", "T"])


KEYS: dict[str, Key] = {
    "pipeline_parallel_degree": _positive(1),
    "microbatches": _positive(1),
    "pipeline": _one_of("interleaved", *PIPELINES),
    "optimize": _one_of("memory", "memory", "speed"),
    "placement_strategy": Key(
        "cluster", _is_placement, "'cluster', 'spread' or a permutation of the letters D, P and T"
    ),
    "auto_partition": _flag(True),
    "default_partition": Key(None, lambda value: _is_int(value) and value >= 0, "an int from 0 on"),
    "contiguous": _flag(True),
    "horovod": _flag(only=False, but_for="tensorflow"),
    "ddp": _flag(),
    "memory_weight": Key(
        None,
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1,
        "a number from 0.0 to 1.0",
    ),
    "active_microbatches": _positive(None),
    # Ours: what a schedule may keep on a rank.
    "activation_memory_bytes": _positive(None, but_for="torch"),
    "deterministic_server": _flag(),
    "offload_activations": _flag(only=False, but_for="torch"),
    "activation_loading_horizon": _positive(4),
    "tensor_parallel_degree": _positive(1, only=1),
    "fp16": _flag(only=False),
    "fp16_params": _flag(only=False),
    "bf16": _flag(only=False),
    "shard_optimizer_state": _flag(only=False),
    "prescaled_batch": _flag(),
    "skip_tracing": _flag(),
    "sharded_data_parallel_degree": _positive(1, only=1),
    "sdp_reduce_bucket_size": _positive(int(5e8)),
    "sdp_param_persistence_threshold": _positive(int(1e6)),
    "sdp_max_live_parameters": _positive(int(1e9)),
    "sdp_hierarchical_allgather": _flag(True),
    "sdp_gradient_clipping": Key(1.0, lambda value: isinstance(value, int | float) and value > 0, "a positive number"),
    "ddp_dist_backend": _one_of("auto", "auto", "nccl"),
    "ddp_port": Key(None, lambda value: _is_int(value) and value >= 0, "an int from 0 on"),
    "load_partition": _flag(None),
    "partition_file": Key(None, lambda value: isinstance(value, str), "a str"),
    "delayed_parameter_initialization": _flag(only=False, but_for="torch"),
    "static_mode": _flag(),
    "fast_mode": _flag(),
}


class Config(Mapping[str, Any]):
    """The configuration in force: every key, with its default where nobody said otherwise; read only.

    Values are items and attributes, ``cfg["ddp"]`` and ``cfg.ddp``. ``partitions`` is the older name of
    ``pipeline_parallel_degree``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the configuration has no key `{name}`") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the configuration is read only: `{name}` is set before `smp.init()`")

    def __repr__(self) -> str:
        return f"Config({self._values!r})"


def read(given: Mapping[str, Any] | None = None, framework: str = "torch") -> Config:
    """The configuration that the environment and the argument of ``smp.init`` describe.

    Args:
        given: The argument of ``smp.init``.
        framework: Whose ``smp`` asks.

    Raises:
        SMPConfigError: a value is not acceptable.
        SMPUnsupportedError: a value asks for what is not there yet.
    """
    channels = [("smp.init", dict(given or {})), *_from_environment()]
    values: dict[str, Any] = {}
    for source, channel in channels:
        values.update(_checked(channel, source, framework))
    return Config(_complete(values))


def _from_environment() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("SMP_CONFIG", "SM_HP_MP_PARAMETERS"):
        text = os.environ.get(name, "").strip()
        if not text:
            continue
        if name == "SMP_CONFIG" and not text.startswith("{"):
            try:
                text = Path(text).read_text()
            except OSError as error:
                raise SMPConfigError(f"`{name}` names a file that cannot be read: {error}") from error
        try:
            channel = json.loads(text)
        except json.JSONDecodeError as error:
            raise SMPConfigError(f"`{name}` is no JSON: {error}") from error
        if not isinstance(channel, dict):
            raise SMPConfigError(f"`{name}` is {channel!r}: expected a dictionary")
        yield name, _parameters(channel)


def _parameters(channel: dict[str, Any]) -> dict[str, Any]:
    """Those of model parallelism, if `channel` is the launcher's whole dictionary."""
    for key in ("smdistributed", "modelparallel", "parameters"):
        if isinstance(channel.get(key), dict):
            channel = channel[key]
    return channel


def _checked(channel: dict[str, Any], source: str, framework: str) -> dict[str, Any]:
    channel = dict(channel)
    if "partitions" in channel:
        partitions = channel.pop("partitions")
        if channel.setdefault("pipeline_parallel_degree", partitions) != partitions:
            raise SMPConfigError(
                f"{source}: `partitions` is {partitions} and `pipeline_parallel_degree`, its other name, is "
                f"{channel['pipeline_parallel_degree']}"
            )
    values = {}
    for name, value in channel.items():
        key = KEYS.get(name)
        if key is None:
            if not name.startswith("_"):
                warnings.warn(f"{source}: there is no key `{name}`; it is ignored", stacklevel=4)
            continue
        if value is None and key.default is None:
            continue
        if not key.accepts(value):
            raise SMPConfigError(f"{source}: `{name}` is {value!r}: expected {key.expected}")
        limited = key.only is not None or key.but_for is not None
        if limited and value != key.only and framework != key.but_for:
            raise SMPUnsupportedError(
                f"{source}: `{name}` is {value!r}, and this version has {key.only!r} only: tensor parallelism, sharded data "
                "parallelism, 16-bit master weights, Horovod for torch, and delayed parameters, offloading and bounds of "
                "activations for TensorFlow are not there yet"
            )
        values[name] = value
    return values


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """With defaults, and with what follows from one key for another."""
    for name in ("ddp_port", "ddp_dist_backend"):
        if name in values and "ddp" not in values:
            raise SMPConfigError(f"`{name}` is given without `ddp`")
    if values.get("ddp") and values.get("horovod"):
        raise SMPConfigError("`ddp` and `horovod` are both true: one of them reduces the gradients of replicas")
    if values.get("load_partition") and not values.get("partition_file"):
        raise SMPConfigError("`load_partition` is true without `partition_file`, the file that holds the partition")
    if not values.get("contiguous", True):
        warnings.warn(
            "`contiguous` is false, and automatic partitions are connected all the same: others come of `smp.partition` or a "
            "`partition_file`",
            stacklevel=4,
        )
    degree = values.get("pipeline_parallel_degree", 1)
    default_partition = values.get("default_partition")
    if not values.get("auto_partition", True) and default_partition is None:
        raise SMPConfigError("`auto_partition` is false: expected `default_partition`, where unassigned modules go")
    if default_partition is not None and default_partition >= degree:
        raise SMPConfigError(f"`default_partition` is {default_partition}, and there are {degree} partitions")
    complete = {name: values.get(name, key.default) for name, key in KEYS.items()}
    complete["partitions"] = degree
    complete["default_partition"] = default_partition or 0
    if complete["memory_weight"] is None:
        complete["memory_weight"] = 0.2 if complete["optimize"] == "speed" else 0.8
    if complete["active_microbatches"] is None:
        complete["active_microbatches"] = degree + 2
    return complete
