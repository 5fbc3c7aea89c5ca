"""`smdrun doctor`: what OpenSMD finds on this machine, with a remedy for each gap.

It imports neither PyTorch nor TensorFlow, because a broken framework may be the reason to run it; `--build` does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smdistributed._common.support import WINDOWS

_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: The subject of the check.
        state: `ok`; `--` for something that is missing and not required; `!!` for what will cause trouble.
        text: The result of the check.
        remedy: The remedy, if there is one.
    """

    subject: str
    state: str
    text: str
    remedy: str = ""


def main(arguments: list[str]) -> int:
    """Print the report.

    Args:
        arguments: The command line after `doctor`.

    Returns:
        The exit code: 1 if something will cause trouble, else 0.
    """
    parser = argparse.ArgumentParser(prog="smdrun doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="import the frameworks and build their shims now")
    parser.add_argument(
        "--job",
        metavar="PID",
        type=int,
        nargs="?",
        const=0,
        help="instead of the machine, check the running job that this process started or is a rank of; without a "
        "number, all jobs of this user on this host",
    )
    options = parser.parse_args(arguments)
    findings = list(_findings(options.build) if options.job is None else _job_findings(options.job or None))
    try:
        _print(findings)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Prevents the error of Python's final flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any(finding.state == "!!" for finding in findings))


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.state}  {finding.subject:{width}}  {finding.text}")
        if finding.remedy:
            print(f"    {'':{width}}  -> {finding.remedy}")
    sys.stdout.flush()


def _findings(build: bool) -> Iterator[Finding]:
    yield Finding("system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield _supported("python", platform.python_version(), f" at {sys.executable}")
    yield from _core_findings()
    needs_compiler = False
    for module, names in (("torch", ("torch",)), ("tensorflow", ("tensorflow-cpu", "tensorflow"))):
        for finding in _framework(module, names, build):
            needs_compiler |= finding.subject.endswith(" shim") and finding.state != "ok"
            yield finding
    for name in ("keras", "tf-keras"):
        version = _version(name)
        if version is not None:
            yield _supported(name, version)
    yield _compiler(needs_compiler)
    yield _cache()
    yield from _cuda()
    yield _nccl()
    yield _nvrtc()
    yield _mpi()
    yield _horovod()
    yield _cores()
    yield from _memory()
    yield _files()


#: What to do about the slower paths that the metrics count.
REMEDIES = {
    "synchronous_call": "a warning names the call and the reason; with `SMD_STRICT_PIPELINE=1` it is an error",
    "gradients_one_by_one": "a warning of `hvd.DistributedOptimizer` names the reason",
    "tcp_without_mpi": "for networks that are faster than TCP, start the job with `mpirun`",
    "nccl_without_peers": "a warning names the GPUs; let the processes of a host see all of its GPUs",
    "no_direct_reads": "permit `process_vm_readv`: `kernel.yama.ptrace_scope`, the seccomp profile of a container",
    "through_host_memory": "a warning names the operation; floating-point tensors are scaled on the GPU",
    "copied_tensor": "a warning shows the tensor; pass contiguous tensors, and separate inputs and outputs",
    "recorded_before_run": "a warning names what the body of the step does",
    "unlike_microbatches": "let all microbatches of a step make the same calls",
    "backward_not_split": "a warning names the autograd node; use `interleaved`, or layers that are not compiled",
    "without_cuda_graph": "a warning names what cannot be captured",
    "undivided_module": "a warning names the module and the error; `smp.set_partition` divides it by hand",
    "without_prefetch": "raise `sdp_max_live_parameters` to the value in the warning",
    "reduced_after_backward": "a warning names the setting because of which gradients wait for the end of the step",
    "dense_attention_bias": "a warning names the reason; pass no `attention_mask` for batches without padding",
    "without_xla": "a warning names the reason; layers can use `tf.function(.., jit_compile=True)` for their parts",
    "far_stores": "bind the ranks of a host to cores that share a cache, if there are any: `taskset`, `numactl`",
    "unaligned_tensor": "pass tensors that begin at a multiple of 16 bytes",
}


def _job_findings(pid: int | None) -> Iterator[Finding]:
    """Report the slower paths that ranks of running jobs took."""
    from smdistributed import _core

    jobs: dict[int, dict[int, list[tuple[str, int]]]] = {}
    for session, rank, fallbacks in _core.running_fallbacks(pid):
        jobs.setdefault(session, {})[rank] = fallbacks
    if not jobs:
        whose = "no job of this user" if pid is None else f"no rank of this user that process {pid} started or is"
        yield Finding("jobs", "!!", f"{whose} runs on this host")
    for session, ranks in jobs.items():
        yield Finding(f"job {session:x}", "ok", f"{len(ranks)} rank(s) on this host")
        for reason in dict.fromkeys(reason for fallbacks in ranks.values() for reason, _ in fallbacks):
            counts = {rank: dict(fallbacks)[reason] for rank, fallbacks in ranks.items() if dict(fallbacks)[reason]}
            if counts:
                who = ", ".join(map(str, counts))
                yield Finding(reason, "--", f"{sum(counts.values())} times, on rank(s) {who}", REMEDIES[reason])


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _core_findings() -> Iterator[Finding]:
    try:
        from smdistributed import _core
    except ImportError as error:
        yield Finding(
            "OpenSMD", "!!", f"the core cannot be loaded: {error}", "reinstall: `pip install .` in the source"
        )
        return
    yield Finding("OpenSMD", "ok", f"{_core.__version__} at {_core.__file__}")


def _supported(name: str, version: str, where: str = "") -> Finding:
    """Report an installed package, and whether OpenSMD was tested with its version."""
    window = WINDOWS[name]
    if window.is_older(version):
        remedy = f"OpenSMD needs {window.title} {window.oldest} or newer"
        if name != "python":
            remedy += f": `pip install '{name}>={window.oldest}'`"
        return Finding(window.title, "!!", f"{version}{where} is too old", remedy)
    if window.is_newer(version):
        remedy = f"OpenSMD was tested with {window.title} {window}"
        return Finding(window.title, "--", f"{version}{where} is newer than the tested versions", remedy)
    return Finding(window.title, "ok", f"{version}{where}")


def _framework(module: str, names: tuple[str, ...], build: bool) -> Iterator[Finding]:
    title = WINDOWS[module].title
    version = _version(*names)
    if version is None:
        yield Finding(title, "--", "not installed", f"`pip install {names[0]}` if you use it")
        return
    yield _supported(module, version)
    try:
        from smdistributed._common import shims
    except ImportError:
        # Reported as a broken core.
        return
    subject = f"{title} shim"
    if build:
        try:
            path = shims.ensure(shims.FRAMEWORKS[module]())
        except Exception as error:  # whatever a framework's import raises is what the user wants to see
            yield Finding(
                subject,
                "!!",
                str(error).splitlines()[0],
                "repair the framework or the compiler, then run this command again",
            )
            return
        yield Finding(subject, "ok", str(path))
        return
    # If several prebuilt shims may fit, only the framework itself can tell which.
    pattern = f"{module}-{version.partition('+')[0]}-core-{_version('opensmd') or '*'}-*"
    folders = [shims.PREBUILT]
    with contextlib.suppress(shims.ShimError):
        # There is no cache folder without a home folder; `_cache` reports that.
        folders.append(shims.cache_dir())
    built = [path.parent for folder in folders for path in folder.glob(f"{pattern}/libsmd_{module}.so")]
    if built:
        newest = max(built, key=lambda folder: folder.stat().st_mtime)
        yield Finding(subject, "ok", f"built: {newest}")
    else:
        yield Finding(subject, "--", "not built", "happens at first use, once; or now: `smdrun doctor --build`")


def _compiler(is_needed: bool) -> Finding:
    configured = os.environ.get("CXX")
    words = [configured] if configured else ["g++", "c++", "clang++"]
    for word in words:
        command = shlex.split(word)
        if command and shutil.which(command[0]):
            return Finding("C++ compiler", "ok", _first_line([*command, "--version"]) or word)
    missing = f"`{configured}` (CXX) was not found" if configured else "not found"
    if not is_needed:
        return Finding("C++ compiler", "--", f"{missing}; not needed for what is installed")
    return Finding(
        "C++ compiler", "!!", missing, "needed once per framework version: `apt-get install g++`, or set CXX"
    )


def _cache() -> Finding:
    from smdistributed import _core
    from smdistributed._common import shims

    try:
        folder = shims.cache_dir()
    except shims.ShimError as error:
        return Finding("shim cache", "!!", str(error).partition(";")[0], "set SMD_CACHE_DIR to a folder that you own")
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    why = _core.untrusted(nearest)
    if why is not None:
        return Finding("shim cache", "!!", why, "set SMD_CACHE_DIR to a folder that only you can write to")
    if os.statvfs(nearest).f_flag & os.ST_NOEXEC:
        why = f"{folder} is mounted `noexec`: no library is loaded from there"
        return Finding("shim cache", "!!", why, "set SMD_CACHE_DIR to a folder on another file system")
    if nearest.is_dir() and os.access(nearest, os.W_OK):
        return Finding("shim cache", "ok", str(folder))
    return Finding("shim cache", "!!", f"{folder} cannot be written", "set SMD_CACHE_DIR to a writable folder")


def _cuda() -> Iterator[Finding]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Finding("CUDA driver", "--", "none: tensors on CPUs only")
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0)
    if status == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
        text = f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} device(s)"
        yield Finding("CUDA driver", "ok", text)
        yield from _devices(driver, count.value)
    else:
        yield Finding("CUDA driver", "--", f"loads, but cuInit fails with {status}", "see `nvidia-smi`")


def _devices(driver: ctypes.CDLL, count: int) -> Iterator[Finding]:
    """Report each device, and whether the devices can access each other's memory."""
    handles = []
    for index in range(count):
        handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        if driver.cuDeviceGet(ctypes.byref(handle), index) != 0:
            continue
        handles.append(handle)
        driver.cuDeviceGetName(name, len(name), handle)
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        text = f"{name.value.decode(errors='replace')}, {memory.value / _GIB:.0f} GiB"
        yield Finding(f"cuda:{index}", "ok", text)
    apart = []
    for one in handles:
        for other in handles:
            reachable = ctypes.c_int(1)
            if one.value != other.value:
                driver.cuDeviceCanAccessPeer(ctypes.byref(reachable), one, other)
            if not reachable.value and one.value < other.value:
                apart.append(f"{one.value} and {other.value}")
    if len(handles) > 1 and apart:
        yield Finding(
            "CUDA peers", "--", f"no direct access between devices {', '.join(apart)}: NCCL copies through host memory"
        )
    elif len(handles) > 1:
        yield Finding("CUDA peers", "ok", "all devices reach each other's memory")


def _nccl() -> Finding:
    remedy = "needed for CUDA tensors: it comes with PyTorch's CUDA build"
    return _library("NCCL", "nvidia-nccl", ("libnccl.so.2",), remedy)


def _nvrtc() -> Finding:
    remedy = "needed for gradients on devices and for small messages between GPUs: it comes with PyTorch's CUDA build"
    return _library("NVRTC", "nvidia-cuda-nvrtc", ("libnvrtc.so.13", "libnvrtc.so.12"), remedy)


def _library(subject: str, wheel: str, names: tuple[str, ...], remedy: str) -> Finding:
    """Report a library that a wheel or the system provides."""
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name.startswith(wheel):
            return Finding(subject, "ok", f"{distribution.version} ({name})")
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return Finding(subject, "ok", f"{name} of the system")
    return Finding(subject, "--", "not found", remedy)


def _mpi() -> Finding:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return Finding(
            "MPI",
            "--",
            "mpirun not found",
            "`apt-get install openmpi-bin libopenmpi-dev`, for jobs on hosts with a network that TCP cannot use fully",
        )
    if shutil.which(os.environ.get("MPICC") or "mpicc") is None:
        return Finding(
            "MPI",
            "--",
            "mpirun, but no mpicc",
            "`apt-get install libopenmpi-dev`, for jobs on hosts with a network that TCP cannot use fully",
        )
    return Finding("MPI", "ok", f"{_first_line([mpirun, '--version'])} at {mpirun}")


def _horovod() -> Finding:
    version = _version("horovod")
    if version is None:
        return Finding("Horovod", "ok", "not installed beside OpenSMD")
    return Finding("Horovod", "!!", f"{version} is installed: two packages with one name", "`pip uninstall horovod`")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} usable"
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        text += f", limited to {int(quota[0]) / int(quota[1]):.1f} by the cgroup"
    return Finding("cores", "ok", text)


def _memory() -> Iterator[Finding]:
    # The core's shared memory is anonymous (memfd): it counts as memory, not as space in /dev/shm.
    try:
        descriptor = os.memfd_create("smd-doctor")
        os.ftruncate(descriptor, 1 << 20)
        os.close(descriptor)
    except OSError as error:
        yield Finding(
            "shared memory", "!!", f"memfd_create fails: {error}", "allow it in the container's seccomp profile"
        )
    else:
        free = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable")), "")
        text = f"memfd works, {int(free.split()[1]) / (1 << 20):.1f} GiB available" if free else "memfd works"
        limit = _read("/sys/fs/cgroup/memory.max").strip()
        if limit.isdigit():
            text += f", {int(limit) / _GIB:.1f} GiB allowed by the cgroup"
        yield Finding("shared memory", "ok", text)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        return
    if shm.total < _GIB:
        remedy = "OpenSMD does not use it; torch's data loaders do: `docker run --shm-size=2g`"
        yield Finding("/dev/shm", "--", f"{shm.total / _GIB:.2f} GiB", remedy)
    else:
        yield Finding("/dev/shm", "ok", f"{shm.total / _GIB:.1f} GiB (for torch's data loaders)")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        return Finding("open files", "!!", f"limit {soft}", f"`ulimit -n {min(hard, 4096)}`")
    return Finding("open files", "ok", f"limit {soft}")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter((done.stdout or done.stderr).splitlines()), "")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
