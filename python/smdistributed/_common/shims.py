"""Finds or builds, and loads, the shims: the libraries with the core's operations for PyTorch and TensorFlow.

A shim depends on the version of the framework. The package contains its sources, and possibly prebuilt shims. It loads

1. a prebuilt shim, if the package has one for the installed minor version, because patch releases keep the ABI. If it
   does not load, a warning gives the reason, and the next steps follow.
2. otherwise the shim in the user's cache.
3. otherwise a shim that it builds there, under a file lock, so that one rank of a job builds it for all. If it does not
   compile, ranks that have waited for it, or have started meanwhile, raise the same error without another attempt.

The cache is used only if it can be made, libraries can be loaded from it, and this user and root alone can write to it.
Otherwise an owner-only folder in the directory for temporary files replaces it (``rust-core/src/cache.rs``).

``python -m smdistributed._common.shims torch --into DIR`` builds a shim to be shipped as prebuilt.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from smdistributed import _core
from smdistributed._common import errors as _core_errors

PREBUILT = Path(__file__).resolve().parent.parent / "_prebuilt"

# Number of lines of a failed compilation to show: the first ones contain the cause.
_SHOWN_ERROR_LINES = 15

# A build takes about 25 s on a free core, and a minute on a busy machine.
_SILENT_WAIT_SECONDS = 10.0
_LONGEST_WAIT_SECONDS = 600.0

# The shims are C++17. Headers of a newer framework may need a later standard, which older compilers lack.
_STANDARD = "c++17"
_NEWER_STANDARD = "c++20"
# The message in a header that requires a later standard.
_WANTED_STANDARD = re.compile(r"#error C\+\+(\d\d) or later")

# Flags of GCC that save compile time (benches/NOTES.md). A shim describes tensors and calls the core or the framework,
# which have the loops over elements. What matters in a shim is that small functions are inlined.
_GCC_OPTIMIZATION = ("-Og", "-finline-small-functions", "-finline-functions-called-once")
# GCC does not collect garbage before it has allocated this much. A shim's largest unit needs 2 GB in total.
_COMPILER_HEAP_KIB = 1 << 20

# Messages of the compiler, the assembler and the linker about a full disk.
_NO_SPACE = os.strerror(errno.ENOSPC)

# File beside the shim with the reason of a failed build: the process id, and the error.
_FAILURE = "failure"
# Failures that are older than this are from an earlier job, so the build is tried again.
_STARTED = time.time()


#: Warnings that were shown: both shims may cause the same one, which is shown once.
_warnings: set[str] = set()


class ShimError(ImportError):
    """A framework's shim could not be built."""


@dataclass(frozen=True)
class Framework:
    """The framework that a shim is compiled against.

    Attributes:
        name: ``torch`` or ``tensorflow``.
        title: The spelling for messages.
        version: The installed version.
        folder: The folder of the shim's sources.
        compile_flags: Include paths and ABI switches.
        link_flags: The framework's libraries.
        standard: The C++ standard that its headers require.
        narrow_flags: Flags with which its headers include less. A newer version may not compile with them.
    """

    name: str
    title: str
    version: str
    folder: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    standard: str = _STANDARD
    narrow_flags: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the shim's folder in the cache: changes with everything that the shim depends on.

        Builds of one version for CPUs and for CUDA (``2.11.0+cpu``, ``2.11.0+cu130``) share a shim: it includes no
        header of CUDA and links to none of its libraries, and the other headers are the same.
        """
        return self._key_of(self.release)

    @property
    def prebuilt_key(self) -> str:
        """Name of the folder of a prebuilt shim, which serves all patch releases of a minor version.

        A version that is not a release, such as ``2.11.0a0+git1234``, has a key of its own.
        """
        return self._key_of(self.minor if self.is_release else self.release)

    @property
    def release(self) -> str:
        """The version without the device that it was built for."""
        # Builds of one release for different devices have the same headers; other local builds may not.
        return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", self.version)

    @property
    def is_release(self) -> bool:
        """Whether the version is a final one, whose patch releases keep the ABI."""
        return re.fullmatch(r"\d+\.\d+(\.\d+)?(\.post\d+)?", self.release) is not None

    @property
    def minor(self) -> str:
        """Major and minor number."""
        return ".".join(self.release.split(".")[:2])

    def _key_of(self, release: str) -> str:
        digest = hashlib.sha256()
        # The key depends on compile flags, but not on the folder in which the framework is installed.
        switches = [flag for flag in self.compile_flags if not flag.startswith(("-I", "-isystem", "/"))]
        sources = [part for item in self.sources().items() for part in item]
        for part in (platform.machine(), *switches, *sources):
            digest.update(part.encode())
            digest.update(b"\0")
        return f"{self.name}-{release}-core-{_core.__version__}-{digest.hexdigest()[:12]}"

    def sources(self) -> dict[str, str]:
        """Collect the files that the shim is built from.

        Returns:
            Text of each file by its name.
        """
        return _sources(self.folder)

    @property
    def library(self) -> str:
        """File name of the shim."""
        return f"libsmd_{self.name}.so"


def _sources(folder: str) -> dict[str, str]:
    parts = ("include", "bridge", folder)
    return {name: text for name, text in sorted(_core.shim_sources().items()) if name.split("/")[0] in parts}


def sources_digest(folder: str) -> str:
    """Return a digest of a shim's sources.

    Args:
        folder: ``torch_ext`` or ``tf_ops``.

    Returns:
        The digest, as hexadecimal digits.
    """
    return hashlib.sha256(repr(_sources(folder)).encode()).hexdigest()[:16]


def torch_framework() -> Framework:
    """Describe the installed PyTorch, which is imported.

    Returns:
        The description.

    Raises:
        ModuleNotFoundError: PyTorch is not installed.
    """
    import torch

    root = Path(torch.__file__).parent
    include = root / "include"
    return Framework(
        name="torch",
        title="PyTorch",
        version=torch.__version__,
        folder="torch_ext",
        compile_flags=(
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            # Classes in PyTorch's headers have members that depend on it.
            "-UNDEBUG" if torch.version.debug else "-DNDEBUG",
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch/csrc/api/include"),
        ),
        # `dlsym` is in a library of its own before glibc 2.34.
        link_flags=(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"),
        standard=_wanted_standard(include / "ATen/ATen.h"),
        # PyTorch's own switch, and our `ATen/ATen.h`.
        narrow_flags=("-DAT_PER_OPERATOR_HEADERS", "-Itorch_ext/narrow"),
    )


def _wanted_standard(header: Path) -> str:
    """Return the C++ standard that a header requires with an ``#error``."""
    wanted = _WANTED_STANDARD.search(header.read_text())
    return f"c++{wanted[1]}" if wanted else _STANDARD


def tensorflow_framework() -> Framework:
    """Describe the installed TensorFlow, which is imported.

    Returns:
        The description.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed.
    """
    import tensorflow

    flags: list[str] = []
    standard = _STANDARD
    for flag in tensorflow.sysconfig.get_compile_flags():
        name, _, value = flag.lstrip("-").partition("=")
        if name == "std":
            standard = value
        elif flag.startswith("-I"):
            # As system headers, whose warnings the compiler does not show.
            flags += ["-isystem", flag[2:]]
        else:
            flags.append(flag)
    return Framework(
        name="tensorflow",
        title="TensorFlow",
        version=tensorflow.__version__,
        folder="tf_ops",
        compile_flags=tuple(flags),
        link_flags=tuple(tensorflow.sysconfig.get_link_flags()),
        standard=standard,
    )


FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": torch_framework, "tensorflow": tensorflow_framework}


def cache_dir() -> Path:
    """Return the folder of built shims: ``SMD_CACHE_DIR``, by default ``~/.cache/opensmd``.

    Returns:
        The folder, which may not exist yet.

    Raises:
        ShimError: The variable is not set and this user has no home folder.
    """
    try:
        return Path(_core.setting("SMD_CACHE_DIR")).expanduser()
    except RuntimeError as error:
        raise ShimError(f"no folder for shims: {error}; set SMD_CACHE_DIR to a writable folder") from error


def ensure(framework: Framework) -> Path:
    """Return the shim for a framework, after building it if necessary.

    Args:
        framework: The framework.

    Returns:
        The library.

    Raises:
        ShimError: There is no compiler, the compiler fails, or the cache cannot be written.
    """
    prebuilt = PREBUILT / framework.prebuilt_key / framework.library
    return prebuilt if prebuilt.is_file() else _ensure_cached(framework)


def _ensure_cached(framework: Framework) -> Path:
    """Return the shim as :func:`ensure` does, ignoring prebuilt ones."""
    try:
        folder = _folder(framework.key)
    except _core_errors.UnsupportedError as error:
        raise ShimError(str(error)) from error
    try:
        path = folder / framework.library
        if _is_trusted(path):
            return path
        with _locked(framework, folder):
            # Another process may have built the shim while this one waited.
            if not _is_trusted(path):
                for leftover in folder.glob("build-*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                _build_once(framework, path)
    except OSError as error:
        raise ShimError(
            f"cannot build the {framework.title} shim in `{folder}`: {error}; set SMD_CACHE_DIR to a writable folder"
        ) from error
    return path


def _folder(key: str) -> Path:
    """Create a folder of the cache, if necessary, that only this user and root can write to."""
    folder, warning = _core.cache_folder(key)
    if warning is not None and warning not in _warnings:
        _warnings.add(warning)
        _log(warning)
    return folder


def _is_trusted(path: Path) -> bool:
    """Return whether only this user and root can have written a file, and warn about a file of others."""
    if not path.is_file():
        return False
    why = _core.untrusted(path)
    if why is not None:
        _log(f"a shim is built anew instead of being loaded: {why}")
    return why is None


@cache
def load_torch() -> Any:
    """Load the PyTorch shim, once.

    Returns:
        Its operations, ``torch.ops.smd``.

    Raises:
        ImportError: PyTorch is not installed.
        ShimError: The shim could not be built.
    """
    try:
        framework = torch_framework()
    except ModuleNotFoundError as error:
        raise _missing("torch", "PyTorch") from error
    import torch

    _load(framework, torch.ops.load_library)
    return torch.ops.smd


@cache
def load_tensorflow() -> Any:
    """Load the TensorFlow shim, once.

    Returns:
        The module of its operations.

    Raises:
        ImportError: TensorFlow is not installed.
        ShimError: The shim could not be built.
    """
    try:
        framework = tensorflow_framework()
    except ModuleNotFoundError as error:
        raise _missing("tensorflow", "TensorFlow") from error
    import tensorflow

    return _load(framework, tensorflow.load_op_library)


def _load(framework: Framework, load: Callable[[str], Any]) -> Any:
    path = ensure(framework)
    try:
        return load(str(path))
    except Exception as error:
        # Each framework has its own exception class for errors of the dynamic linker.
        if PREBUILT not in path.parents:
            raise
        # The shim was built on a newer system, or this patch release of the framework broke the ABI.
        _log(
            f"the prebuilt shim for {framework.title} {framework.minor} does not load with {framework.version} here, "
            f"so another one is built: {error}"
        )
        try:
            other = _ensure_cached(framework)
        except ShimError as failure:
            raise ShimError(
                f"the prebuilt shim for {framework.title} {framework.minor} does not load with {framework.version} "
                f"({error}), and no other can be built; another patch release of {framework.title} {framework.minor} "
                f"may load it: {failure}"
            ) from failure
        return load(str(other))


def _missing(module: str, title: str) -> ImportError:
    return ImportError(
        f"this part of smdistributed needs {title}, which is not installed: `pip install {module}`", name=module
    )


def _build_once(framework: Framework, path: Path) -> None:
    """Build as :func:`_build`, unless another process has failed to do so since this one started."""
    failure = path.parent / _FAILURE
    if failure.is_file() and failure.stat().st_mtime >= _STARTED and _core.untrusted(failure) is None:
        builder, _, text = failure.read_text().partition("\n")
        # This process failed before, but its user may have repaired the compiler.
        if builder != str(os.getpid()):
            raise ShimError(text)
    try:
        _build(framework, path)
    except ShimError as error:
        failure.write_text(f"{os.getpid()}\n{error}")
        raise
    failure.unlink(missing_ok=True)


def _build(framework: Framework, path: Path) -> None:
    """Compile the shim to ``path``, which appears complete or not at all."""
    compiler = _compiler(framework)
    _log(f"building the {framework.title} {framework.version} shim, once, in {path.parent}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as scratch:
        built = _compile(framework, compiler, Path(scratch))
        built.replace(path)
    _log(f"built the {framework.title} shim in {time.monotonic() - start:.1f} s")


def _compile(framework: Framework, compiler: list[str], scratch: Path) -> Path:
    for name, text in framework.sources().items():
        file = scratch / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    # The framework's headers are most of the work: read them once for all files of the shim. Schemas come first,
    # since static initialisers run in this order and kernels refer to what schemas declare.
    files = sorted((scratch / framework.folder).rglob("*.cc"), key=lambda file: (file.stem != "ops", file))
    sources = [file.relative_to(scratch) for file in files]
    (scratch / "shim.cc").write_text("".join(f'#include "{file}"\n' for file in sources))
    units = ["shim.cc", *sorted(str(file.relative_to(scratch)) for file in (scratch / "bridge").glob("*.cc"))]
    standard, narrow = framework.standard, framework.narrow_flags
    failure = _compile_units(framework, compiler, scratch, units, standard, narrow)
    # The header that requires C++20 may be one that `_wanted_standard` did not search.
    if failure is not None and "C++20" in str(failure) and standard != _NEWER_STANDARD:
        standard = _NEWER_STANDARD
        failure = _compile_units(framework, compiler, scratch, units, standard, narrow)
    if failure is not None and narrow:
        reason = str(failure).splitlines()[0]
        _log(f"the {framework.title} shim is compiled again with all headers, which takes longer: {reason}")
        failure = _compile_units(framework, compiler, scratch, units, standard, ())
    if failure is not None:
        raise failure
    # No symbol is exported, because two shims in a process must not share C++ symbols. Operations register themselves.
    (scratch / "exports.map").write_text("{ local: *; };\n")
    # Linked with the core, so that missing symbols are errors now. At load time, the core is loaded already.
    link = subprocess.run(
        [
            *compiler,
            "-shared",
            "-Wl,--no-undefined",
            "-Wl,--version-script=exports.map",
            *(f"{index}.o" for index in range(len(units))),
            "-o",
            framework.library,
            *framework.link_flags,
            _core.__file__,
        ],
        check=False,
        cwd=scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    failure = _failure(framework, link, link.stdout)
    if failure is not None:
        raise failure
    return scratch / framework.library


def _compile_units(
    framework: Framework,
    compiler: list[str],
    scratch: Path,
    units: list[str],
    standard: str,
    narrow_flags: tuple[str, ...],
) -> ShimError | None:
    """Compile unit i to ``i.o``, all in parallel; return the errors."""
    # Shims include their headers by the path within their own folder.
    includes = ["-I.", "-Iinclude", f"-I{framework.folder}"]
    flags = [f"-std={standard}", *_optimization_flags(compiler), "-g0", "-fPIC", "-fvisibility=hidden", *includes]
    flags += [*narrow_flags, *framework.compile_flags]
    compilations = [
        subprocess.Popen(
            [*compiler, *flags, "-c", unit, "-o", f"{index}.o"],
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, unit in enumerate(units)
    ]
    outputs = [process.communicate()[0] for process in compilations]
    failures = (_failure(framework, process, output) for process, output in zip(compilations, outputs, strict=True))
    return next((failure for failure in failures if failure is not None), None)


def _optimization_flags(compiler: list[str]) -> list[str]:
    """Return flags for optimization; with those for GCC it collects garbage less often, which needs more memory."""
    asked = subprocess.run([*compiler, "--version"], check=False, capture_output=True, text=True)
    if "Free Software Foundation" not in asked.stdout:
        return ["-O2"]
    return [*_GCC_OPTIMIZATION, "--param=ggc-min-expand=1000", f"--param=ggc-min-heapsize={_COMPILER_HEAP_KIB}"]


def _failure(
    framework: Framework, process: subprocess.Popen[str] | subprocess.CompletedProcess[str], output: str
) -> ShimError | None:
    if process.returncode == 0:
        return None
    if _NO_SPACE in output:
        raise OSError(errno.ENOSPC, _NO_SPACE)
    lines = output.splitlines()
    causes = [line for line in lines if "error" in line] or lines
    command = map(str, cast("list[object]", process.args))
    return ShimError(
        f"the {framework.title} {framework.version} shim does not compile (exit code {process.returncode}):\n"
        + "\n".join(f"  {line}" for line in causes[:_SHOWN_ERROR_LINES])
        + f"\ncommand: {shlex.join(command)}"
    )


def _compiler(framework: Framework) -> list[str]:
    """Return the command of the C++ compiler: ``CXX``, or else the first of the usual names."""
    configured = os.environ.get("CXX")
    if configured:
        return shlex.split(configured)
    for name in ("g++", "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise ShimError(
        f"no prebuilt shim for {framework.title} {framework.version}, and no C++ compiler to build one: install g++ "
        "(`apt-get install g++`, `dnf install gcc-c++`, `conda install gxx`) or set CXX to a compiler's path"
    )


@contextmanager
def _locked(framework: Framework, folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases if this process dies.

    Raises:
        ShimError: Another process holds it for longer than any build takes.
    """
    start = time.monotonic()
    silent = True
    with open(folder / ".lock", "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                waiting_for = f"process {file.read() or '?'}, which builds the {framework.title} shim in {folder}"
            waited = time.monotonic() - start
            if waited > _LONGEST_WAIT_SECONDS:
                raise ShimError(
                    f"no shim after waiting {waited:.0f} s for {waiting_for}: end that process and try again"
                )
            if silent and waited > _SILENT_WAIT_SECONDS:
                silent = False
                _log(f"waiting for {waiting_for}")
            time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _log(text: str) -> None:
    print(f"smdistributed: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Build shims for the installed frameworks, to be shipped with the package."""
    parser = argparse.ArgumentParser(prog="python -m smdistributed._common.shims", description=main.__doc__)
    parser.add_argument("frameworks", nargs="*", help=f"frameworks to build for: {', '.join(sorted(FRAMEWORKS))}")
    parser.add_argument("--sources", action="store_true", help="print the digests of the sources, and build nothing")
    parser.add_argument("--into", type=Path, default=PREBUILT, help="folder (default: the package's own)")
    arguments = parser.parse_args()
    if arguments.sources:
        print(*(sources_digest(folder) for folder in ("torch_ext", "tf_ops")))
        return
    unknown = set(arguments.frameworks) - set(FRAMEWORKS)
    if unknown or not arguments.frameworks:
        parser.error(f"frameworks are {', '.join(sorted(FRAMEWORKS))}")
    for name in arguments.frameworks:
        framework = FRAMEWORKS[name]()
        path = arguments.into / framework.prebuilt_key / framework.library
        path.parent.mkdir(parents=True, exist_ok=True)
        _build(framework, path)
        # For the release's check, which runs without the framework and so cannot compute the key.
        (path.parent / "sources").write_text(sources_digest(framework.folder))
        print(path)


if __name__ == "__main__":
    main()
