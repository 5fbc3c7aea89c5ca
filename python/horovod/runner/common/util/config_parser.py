"""Options of the launcher from a file, and as variables of the environment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any

HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
HOROVOD_CYCLE_TIME = "HOROVOD_CYCLE_TIME"
HOROVOD_CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
HOROVOD_HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HOROVOD_HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
HOROVOD_TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
HOROVOD_AUTOTUNE = "HOROVOD_AUTOTUNE"
HOROVOD_AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
HOROVOD_AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
HOROVOD_TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
HOROVOD_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
HOROVOD_STALL_CHECK_TIME_SECONDS = "HOROVOD_STALL_CHECK_TIME_SECONDS"
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
HOROVOD_MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"
HOROVOD_NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
HOROVOD_THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"
HOROVOD_GLOO_TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
HOROVOD_LOG_LEVEL = "HOROVOD_LOG_LEVEL"
HOROVOD_LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"

LOG_LEVELS = ["TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]

_MB = 1024 * 1024

#: Sections of the file; for each of their keys, the option.
_SECTIONS = {
    "params": {
        name: name
        for name in (
            "fusion_threshold_mb",
            "cycle_time_ms",
            "cache_capacity",
            "hierarchical_allreduce",
            "hierarchical_allgather",
            "torus_allreduce",
        )
    },
    "autotune": {
        "enabled": "autotune",
        "log_file": "autotune_log_file",
        "warmup_samples": "autotune_warmup_samples",
        "steps_per_sample": "autotune_steps_per_sample",
        "bayes_opt_max_samples": "autotune_bayes_opt_max_samples",
        "gaussian_process_noise": "autotune_gaussian_process_noise",
    },
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "no_stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
    "library_options": {
        name: name for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds")
    },
    "logging": {"level": "log_level", "with_timestamp": "log_with_timestamp"},
}


def set_args_from_config(args: argparse.Namespace, config: dict[str, Any], override_args: Collection[str]) -> None:
    """Set options from a file, except for options of the command line.

    Args:
        args: The options, changed in place.
        config: Contents of the file.
        override_args: Names of the options that the command line has set.

    Raises:
        ValueError: There is no such controller.
    """
    for section, values in config.items():
        if section == "controller":
            if str(values).lower() not in ("gloo", "mpi"):
                raise ValueError(f"No such controller supported: {values}")
            if not set(override_args) & {"use_gloo", "use_mpi", "use_jsrun"}:
                args.use_gloo, args.use_mpi = values.lower() == "gloo", values.lower() == "mpi"
            continue
        known = _SECTIONS.get(section)
        if known is None:
            # Options that have no section, such as `verbose`.
            if hasattr(args, section):
                known, values, section = {section: section}, {section: values}, ""
            else:
                known, values = {}, {section: values}
        for key, value in (values or {}).items():
            name = known.get(key)
            if name is None:
                print(f"horovodrun: warning: the configuration has an unknown key `{section}.{key}`", file=sys.stderr)
            elif name not in override_args:
                setattr(args, name, not value if name == "no_stall_check" else value)


def validate_config_args(args: argparse.Namespace) -> None:
    """Check the numbers among options.

    Args:
        args: The options.

    Raises:
        ValueError: A number is negative, or the noise is above 1.
    """
    names = [name for section in _SECTIONS.values() for name in section.values()]
    for name in names:
        value = getattr(args, name, None)
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{name}={value} must be >= 0")
    noise = getattr(args, "autotune_gaussian_process_noise", None)
    if noise is not None and noise > 1:
        raise ValueError(f"autotune_gaussian_process_noise={noise} must be in [0, 1]")


def set_env_from_args(env: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Set the variables that the options stand for; others are unchanged.

    Args:
        env: The variables, changed in place.
        args: The result of `parse_args`.

    Returns:
        `env`.
    """

    def option(name: str) -> Any:
        return getattr(args, name, None)

    fusion = option("fusion_threshold_mb")
    values = {
        HOROVOD_FUSION_THRESHOLD: None if fusion is None else int(fusion * _MB),
        HOROVOD_CYCLE_TIME: option("cycle_time_ms"),
        HOROVOD_CACHE_CAPACITY: option("cache_capacity"),
        HOROVOD_HIERARCHICAL_ALLREDUCE: option("hierarchical_allreduce"),
        HOROVOD_HIERARCHICAL_ALLGATHER: option("hierarchical_allgather"),
        HOROVOD_TORUS_ALLREDUCE: option("torus_allreduce"),
        HOROVOD_TIMELINE: option("timeline_filename"),
        HOROVOD_STALL_CHECK_DISABLE: option("no_stall_check"),
        HOROVOD_STALL_CHECK_TIME_SECONDS: option("stall_check_warning_time_seconds"),
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: option("stall_check_shutdown_time_seconds"),
        HOROVOD_MPI_THREADS_DISABLE: option("mpi_threads_disable"),
        HOROVOD_NUM_NCCL_STREAMS: option("num_nccl_streams"),
        HOROVOD_THREAD_AFFINITY: option("thread_affinity"),
        HOROVOD_GLOO_TIMEOUT_SECONDS: option("gloo_timeout_seconds"),
        HOROVOD_LOG_LEVEL: option("log_level"),
        HOROVOD_LOG_HIDE_TIME: None if option("log_with_timestamp") is None else not option("log_with_timestamp"),
        HOROVOD_AUTOTUNE: option("autotune"),
    }
    if option("autotune"):
        values |= {
            HOROVOD_AUTOTUNE_LOG: option("autotune_log_file"),
            HOROVOD_AUTOTUNE_WARMUP_SAMPLES: option("autotune_warmup_samples"),
            HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE: option("autotune_steps_per_sample"),
            HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES: option("autotune_bayes_opt_max_samples"),
            HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE: option("autotune_gaussian_process_noise"),
        }
    if option("timeline_filename"):
        values[HOROVOD_TIMELINE_MARK_CYCLES] = option("timeline_mark_cycles")
    for name, value in values.items():
        if value is not None:
            env[name] = str(int(value)) if isinstance(value, bool) else str(value)
    return env
