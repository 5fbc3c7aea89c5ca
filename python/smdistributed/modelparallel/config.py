"""The configuration of a model-parallel job.

Sources, in order of precedence for each key: the variable ``SM_HP_MP_PARAMETERS``, which launchers set; the variable
``SMP_CONFIG`` (JSON, or the path of a JSON file); the dictionary given to ``smp.init``; the defaults.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel.exceptions import CLASSES, SMPConfigError, SMPUnsupportedError

#: Every key with its default; the core has the table, for launchers as well.
DEFAULTS: dict[str, Any] = json.loads(_core.parameter_defaults())

#: Keys that support one value only, and the framework that supports all values nevertheless.
LIMITS: dict[str, tuple[Any, str | None]] = {
    "horovod": (False, "tensorflow"),
    "activation_memory_bytes": (None, "torch"),
    "cuda_graphs": (False, "torch"),
    "offload_activations": (False, "torch"),
    "tensor_parallel_degree": (1, "torch"),
    "fp16": (False, "torch"),
    "fp16_params": (False, "torch"),
    "bf16": (False, "torch"),
    "shard_optimizer_state": (False, "torch"),
    "sharded_data_parallel_degree": (1, "torch"),
    "delayed_parameter_initialization": (False, "torch"),
}

#: Switches that change nothing, and why.
WITHOUT_EFFECT = {
    "deterministic_server": "all replicas always run the tasks of a step in the same order",
    "fast_mode": "tensors always go directly from the rank that computes them to the ranks that need them",
    "static_mode": "the schedule of a step is always computed before the step runs",
}

_CLASSES = {**CLASSES, "config": SMPConfigError}


class Config(Mapping[str, Any]):
    """The configuration in force, read only: every key, with its default where no source sets it.

    Values are items and attributes, ``cfg["ddp"]`` and ``cfg.ddp``. ``partitions`` is the older name of
    ``pipeline_parallel_degree``.
    """

    def __init__(self, values: Mapping[str, Any], given: Collection[str] = ()) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_given", frozenset(given))

    def is_given(self, key: str) -> bool:
        """Whether some source sets ``key``, so that its value is not the default."""
        return key in self._given

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        try:
            # Not by `self._values`: an object without it, which `copy` and `pickle` may ask for names, would come here
            # again.
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"the configuration has no key `{name}`") from None

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, Any], frozenset[str]]]:
        return Config, (dict(self._values), self._given)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the configuration is read only: `{name}` is set before `smp.init()`")

    def __repr__(self) -> str:
        return f"Config({self._values!r})"


def read(given: Mapping[str, Any] | None = None, framework: str = "torch") -> Config:
    """The configuration that the environment and the argument of ``smp.init`` describe.

    Args:
        given: The argument of ``smp.init``.
        framework: The framework of the calling ``smp``.

    Raises:
        SMPConfigError: a value is not acceptable.
        SMPUnsupportedError: A value requests a feature that is not supported yet.
    """
    channels = [("smp.init", dict(given or {})), *_from_environment()]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, channel in channels:
        found = _checked(channel, source)
        values.update(found)
        sources.update(dict.fromkeys(found, source))
    # Checked after the merge: a launcher's value may replace an unsupported one of the script.
    _refuse_what_is_not_there(values, sources, framework)
    return Config(_complete(values), values)


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
            raise SMPConfigError(f"`{name}` is not valid JSON: {error}") from error
        if not isinstance(channel, dict):
            raise SMPConfigError(f"`{name}` is {channel!r}: expected a dictionary")
        yield name, _parameters(channel)


def _parameters(channel: dict[str, Any]) -> dict[str, Any]:
    """Return the model-parallel parameters if a channel contains the launcher's whole dictionary."""
    for key in ("smdistributed", "modelparallel", "parameters"):
        if isinstance(channel.get(key), dict):
            channel = channel[key]
    return channel


def _in_json(name: str, value: Any, source: str) -> str:
    """Convert a value to JSON for the core, which validates only keys and values that it knows."""
    if name not in DEFAULTS and name != "partitions":
        return "null"
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise SMPConfigError(f"{source}: `{name}` is {value!r}: expected a value that JSON can represent") from None


def _checked(channel: dict[str, Any], source: str) -> dict[str, Any]:
    words = ", ".join(
        f"{json.dumps(str(name))}: {_in_json(str(name), value, source)}" for name, value in channel.items()
    )
    try:
        with errors.translated(_CLASSES):
            text, unknown = _core.check_parameters(f"{{{words}}}")
    except SMPConfigError as error:
        raise SMPConfigError(f"{source}: {error}") from None
    for warning in unknown:
        warnings.warn(f"{source}: {warning}", stacklevel=4)
    values = json.loads(text)
    if "partitions" in values:
        values["pipeline_parallel_degree"] = values.pop("partitions")
    return values


def _refuse_what_is_not_there(values: Mapping[str, Any], sources: Mapping[str, str], framework: str) -> None:
    for name, (only, but_for) in LIMITS.items():
        if values.get(name, only) != only and framework != but_for:
            raise SMPUnsupportedError(
                f"{sources[name]}: `{name}` is {values[name]!r}, but only {only!r} is supported: Horovod for "
                "PyTorch, and for TensorFlow tensor parallelism, sharded data parallelism, 16-bit training, delayed "
                "parameters, offloading and limits of activation memory, are not supported yet"
            )


@functools.cache
def warn_once(text: str) -> None:
    """Warn once in a process that a setting or an argument is ignored.

    Args:
        text: The ignored setting, and the reason.
    """
    warnings.warn(text, stacklevel=4)


def _check_cuda_graphs(values: Mapping[str, Any]) -> None:
    for key, reason in (
        ("offload_activations", "graphs have their activations at fixed addresses"),
        ("shard_optimizer_state", "it takes gradients during the step, and graphs have their addresses"),
    ):
        if values.get(key):
            raise SMPConfigError(f"`cuda_graphs` and `{key}` exclude each other: {reason}")
    for key in ("tensor_parallel_degree", "sharded_data_parallel_degree"):
        if values.get(key, 1) > 1:
            raise SMPConfigError(f"`cuda_graphs` and `{key}` exclude each other: stages contain collectives then")


def _check_sharded_data_parallelism(values: Mapping[str, Any]) -> None:
    if not values.get("ddp"):
        raise SMPConfigError("`sharded_data_parallel_degree` needs `ddp: true`: parameters are sharded over replicas")
    if not values.get("sdp_hierarchical_allgather", True):
        warn_once(
            "`sdp_hierarchical_allgather: false` is ignored: over several hosts, all-gathers always send each shard "
            "to a host once"
        )


def _warn_without_effect(values: Mapping[str, Any]) -> None:
    """Warn of keys that need another one."""
    sharding = [key for key in values if key.startswith("sdp_")]
    for keys, has_effect, need in (
        (sharding, values.get("sharded_data_parallel_degree", 1) > 1, "`sharded_data_parallel_degree` above 1"),
        (
            ["cuda_graphs", "activation_memory_bytes"],
            values.get("pipeline_parallel_degree", 1) > 1,
            "more than one partition",
        ),
        (["activation_loading_horizon"], values.get("offload_activations"), "`offload_activations: true`"),
    ):
        given = [f"`{key}`" for key in keys if values.get(key) not in (None, False, DEFAULTS[key])]
        if given and not has_effect:
            warn_once(f"{', '.join(given)} changes nothing without {need}")


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Add defaults, and values that follow from other keys."""
    if values.get("tensor_parallel_degree", 1) > 1 and not values.get("ddp"):
        # The gradients of tensor-parallel ranks are reduced over a group of their own in any case.
        warnings.warn(
            f"`tensor_parallel_degree` {values['tensor_parallel_degree']} implies `ddp: true`, which is not set",
            stacklevel=4,
        )
        values = {**values, "ddp": True}
    with errors.translated(_CLASSES):
        _core.check_parameter_rules(json.dumps(values))
    if values.get("shard_optimizer_state") and not values.get("ddp"):
        raise SMPConfigError("`shard_optimizer_state` needs `ddp: true`: states are sharded over replicas")
    if values.get("sharded_data_parallel_degree", 1) > 1:
        _check_sharded_data_parallelism(values)
    if values.get("cuda_graphs"):
        _check_cuda_graphs(values)
    # The launcher cannot check this, because it does not know the script's values.
    if values.get("load_partition") and not values.get("partition_file"):
        raise SMPConfigError("`load_partition` is true without `partition_file`, the file that holds the partition")
    if not values.get("contiguous", True):
        warn_once(
            "`contiguous: false` is ignored: automatic partitions are always contiguous; assign other ones by "
            "`smp.partition` or a `partition_file`"
        )
    for name, reason in WITHOUT_EFFECT.items():
        if values.get(name):
            warn_once(f"`{name}: true` changes nothing: {reason}")
    degree = values.get("pipeline_parallel_degree", 1)
    _warn_without_effect(values)
    complete = {**DEFAULTS, **values}
    complete["partitions"] = degree
    # Scripts, such as the Trainer of transformers, ask by this key which ranks save states of the optimizer.
    complete["shard_optimizer_state"] |= complete["sharded_data_parallel_degree"] > 1
    complete["default_partition"] = complete["default_partition"] or 0
    if complete["memory_weight"] is None:
        complete["memory_weight"] = 0.2 if complete["optimize"] == "speed" else 0.8
    # The default for zero bubble: as many as the first partition keeps in 1F1B.
    if complete["active_microbatches"] is None and complete["pipeline"] != "zero_bubble":
        complete["active_microbatches"] = degree + 2
    return complete
