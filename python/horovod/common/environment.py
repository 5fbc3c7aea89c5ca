"""Variables of the environment, and checks for libraries."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings

from smdistributed import _core

# Supported variables: settings, which the core reads, and variables of launchers.
_KNOWN = {
    "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "FUSION_THRESHOLD",
    "CACHE_CAPACITY", "DYNAMIC_PROCESS_SETS", "TIMELINE", "TIMELINE_MARK_CYCLES", "AUTOTUNE", "AUTOTUNE_LOG",
    "AUTOTUNE_STEPS_PER_SAMPLE", "AUTOTUNE_WARMUP_SAMPLES", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "STALL_CHECK_DISABLE", "ELASTIC_TIMEOUT", "STALL_CHECK_TIME_SECONDS",
    "STALL_SHUTDOWN_TIME_SECONDS", "LOG_LEVEL", "LOG_HIDE_TIME", "CONTROLLER", "CPU_OPERATIONS", "START_TIMEOUT",
    "ELASTIC", "GLOO_TIMEOUT_SECONDS", "GLOO_IFACE", "GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT",
    "DISABLE_GROUP_FUSION", "THREAD_AFFINITY",
    # Hints without effect: the core chooses algorithms itself, and operations on GPUs never block the host.
    "HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLGATHER", "TORUS_ALLREDUCE", "ENABLE_ASYNC_COMPLETION",
}  # fmt: skip
# Read only when the original is compiled.
_BUILD = ("WITH_", "WITHOUT_", "GPU_", "NCCL_", "CUDA_", "BUILD_", "CMAKE", "SPARK_")

_warned = False


def check() -> None:
    """Warn once of variables that have no effect here.

    Raises:
        ValueError: A variable has an unsupported value.
    """
    controller = os.environ.get("HOROVOD_CONTROLLER", "")
    if controller.lower() not in ("", "gloo", "mpi"):
        raise ValueError(f"Horovod initialization failed: `HOROVOD_CONTROLLER` is `{controller}`: expected gloo or mpi")
    operations = os.environ.get("HOROVOD_CPU_OPERATIONS", "")
    if operations.lower() not in ("", "gloo", "mpi"):
        raise ValueError(
            f"Horovod initialization failed: `HOROVOD_CPU_OPERATIONS` is `{operations}`: expected gloo or mpi; both "
            "mean the transports of OpenSMD"
        )
    chosen = {"HOROVOD_CONTROLLER": controller, "HOROVOD_CPU_OPERATIONS": operations}
    global _warned
    ignored = [name for name in sorted(os.environ) if name.startswith("HOROVOD_") and _is_ignored(name[8:])]
    # `mpirun` has started the job.
    ignored += [f"{name}={value}" for name, value in chosen.items() if value.lower() == "mpi"]
    if ignored and not _warned:
        _warned = True
        warnings.warn(f"these settings have no effect in OpenSMD: {', '.join(ignored)}", stacklevel=4)


def _is_ignored(name: str) -> bool:
    return name not in _KNOWN and not name.startswith(_BUILD)


@functools.cache
def has_mpi() -> bool:
    """Return whether there is a plug-in for this host's MPI, or one can be compiled.

    Returns:
        ``True`` if there is one.
    """
    try:
        return bool(_core.mpi_plugin())
    except RuntimeError:
        return False


@functools.cache
def nccl_version() -> int:
    """Return the version of the NCCL that can be loaded.

    Returns:
        The version, such as 22703; 0 if none can.
    """
    for name in ("libnccl.so.2", *_bundled("nvidia.nccl", "lib/libnccl.so.2")):
        try:
            version = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        return version.value
    return 0


def _bundled(package: str, file: str) -> list[str]:
    """Return possible paths of a library in a package of NVIDIA's wheels; an empty list if it is not installed."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return [os.path.join(folder, file) for folder in (spec.submodule_search_locations or [])] if spec else []


@functools.cache
def has_cuda() -> bool:
    """Return whether there is a CUDA driver with a device.

    Returns:
        ``True`` if there is one.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (OSError, AttributeError):
        return False
