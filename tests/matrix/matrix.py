"""The versions of the support window: `make matrix` runs a short suite with each and writes the table of the support matrix.

Each version gets an environment in `build/matrix`, in which the package of this checkout runs, and loses it afterwards. The next one
is installed meanwhile, so two need room at a time. With `uv` on PATH, or as a module of this Python, environments are made by it;
otherwise by `venv` and pip. Matrices of different frameworks or Pythons may run side by side.

Usage: matrix.py [--only torch==2.15 tensorflow==2.16 | --ends] [--python python3.11] [--prebuilt] [--wheel FILE]
                 [--parts collectives DDP] [--keep] [--keep-page]

With `--prebuilt`, each version's operator library is built for shipping, put into the package, and used by the suite, which then
finds no compiler. `make release` takes it from there. With `--wheel`, the suite runs with what is installed from that file, not
with the checkout, and without a compiler as well; libraries that are built for shipping are still put into the checkout.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from smdistributed._common.support import WINDOWS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/matrix"
PAGE = ROOT / "docs/reference/support-matrix.md"
BEGIN, END = "<!-- Written by `make matrix`. -->\n", "<!-- End of what `make matrix` writes. -->\n"
#: Packages that the suite needs besides a framework.
TOOLS = ["pytest", "pytest-timeout", "cloudpickle"]
NOT_RUN, NO_END = "not run", "no end"
#: Output of a test that ran into its time limit.
_OUT_OF_TIME = re.compile(r"Timeout \(>|the job was still running after|no rank could be forked:\s*$")
#: Seconds for one part of the suite, of which the first also builds the shim.
LIMIT = 1200

_MULTIPROC = "tests/multiproc/"
#: Parts of the suite: what it shows, and what pytest runs.
SUITES = {
    "torch": {
        "collectives": [
            "tests/unit/test_private_api.py",
            _MULTIPROC + "dataparallel/test_torch_collectives.py::test_reductions[2]",
            _MULTIPROC + "dataparallel/test_torch_collectives.py::test_movements[2]",
        ],
        "DDP": [_MULTIPROC + "dataparallel/test_ddp.py::test_gradients_equal_those_of_the_whole_batch[2]"],
        "smddp": [
            _MULTIPROC + "dataparallel/test_torch_backend.py::test_collectives_give_what_gloo_gives",
            _MULTIPROC + "dataparallel/test_torch_backend.py::test_works_futures_and_errors",
            _MULTIPROC + "dataparallel/test_torch_backend_groups.py::test_groups_split",
        ],
        "smp": [
            _MULTIPROC + "modelparallel_torch/test_features.py::test_features_of_steps_models_and_optimizers",
            _MULTIPROC
            + "modelparallel_torch/test_huggingface.py::test_hidden_states_attentions_and_gradient_checkpointing",
        ],
        "hvd": [_MULTIPROC + "horovod/test_torch.py::test_collectives[2]"],
    },
    "tensorflow": {
        "collectives": [
            "tests/unit/test_private_api.py",
            _MULTIPROC + "dataparallel/test_tensorflow_ops.py::test_every_operation[2]",
        ],
        "tape": [_MULTIPROC + "dataparallel/test_tensorflow_tape.py::test_gradients"],
        "fit": [_MULTIPROC + "dataparallel/test_tensorflow_keras.py"],
        "hvd": [_MULTIPROC + "horovod/test_keras.py::test_training"],
        "smp": [_MULTIPROC + "modelparallel_tensorflow/test_fit.py::test_the_shortest_training"],
    },
    # With the newest TensorFlow that takes it.
    "keras": {
        "fit": [_MULTIPROC + "dataparallel/test_tensorflow_keras.py::test_keras_3"],
        "hvd": [_MULTIPROC + "horovod/test_keras.py::test_training[keras3]"],
        "smp": [_MULTIPROC + "modelparallel_tensorflow/test_fit.py::test_the_shortest_training[keras]"],
    },
}
_DISTRIBUTIONS = {"torch": "torch", "tensorflow": "tensorflow-cpu", "keras": "keras"}
#: Columns of a row before those of the parts.
_HEAD = ["version", "with"]
_COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|cpp|c89|c99)(-[\d.]+)?")


@dataclass(frozen=True)
class Version:
    """A version of a framework, by major and minor number; the newest patch of it is taken."""

    framework: str
    number: str

    def __str__(self) -> str:
        return f"{self.framework}=={self.number}"

    @property
    def requirements(self) -> list[str]:
        """The packages that pip installs."""
        wanted = [f"{_DISTRIBUTIONS[self.framework]}=={self.number}.*", "numpy", *TOOLS]
        others = {
            "torch": ["transformers"],
            "tensorflow": [f"keras>={WINDOWS['keras'].oldest}"],
            "keras": [
                f"tensorflow-cpu>={WINDOWS['tensorflow'].oldest}",
                f"tensorflow-cpu<={WINDOWS['tensorflow'].newest}.99",
            ],
        }
        return wanted + others[self.framework]

    @property
    def shim(self) -> str:
        """The framework whose operator library it needs."""
        return "torch" if self.framework == "torch" else "tensorflow"

    def without_dependencies(self, python: Path) -> list[str]:
        """The same for packages whose dependencies are in the environment under another name."""
        if self.framework == "torch":
            return []
        code = "import importlib.metadata as m; print(m.version('tensorflow-cpu'))"
        found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
        return [f"tf-keras=={'.'.join(found.split('.')[:2])}.*"]


def environment(is_installed: bool, has_compiler: bool = True) -> dict[str, str]:
    """That of all commands: modules that are compiled once, and the checkout's package where none is installed."""
    left_out = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH"} | (set() if has_compiler else {"CC", "CXX"})
    given = {name: value for name, value in os.environ.items() if name not in left_out}
    given["OMP_NUM_THREADS"] = "1"
    if not is_installed:
        given["PYTHONPATH"] = str(ROOT / "python")
    if not has_compiler:
        # An empty cache: a shim from an earlier build would hide that none is prebuilt.
        given |= {"PATH": str(_programs()), "SMD_CACHE_DIR": str(_scratch() / "cache")}
    return given


@cache
def _scratch() -> Path:
    """A folder of this run alone."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=FOLDER))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _programs() -> Path:
    """Makes a folder with links to all programs on PATH except compilers, and returns it."""
    folder = _scratch() / "programs"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if not _COMPILER.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


def ends() -> list[Version]:
    """Of each framework, the newest and the oldest version that the tests of every change do not run with."""
    pinned = dict(
        re.findall(r"^(torch|tensorflow|keras)(?:_cpu)?==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    others = [version for version in versions() if version.number != pinned[version.framework]]
    grouped = [[version for version in others if version.framework == framework] for framework in SUITES]
    return [version for group in grouped for version in (group[0], group[-1])]


def versions() -> Iterator[Version]:
    """All of the window, the newest first."""
    for framework in SUITES:
        window = WINDOWS[framework]
        major, newest = map(int, window.newest.split("."))
        for minor in range(newest, int(window.oldest.split(".")[1]) - 1, -1):
            yield Version(framework, f"{major}.{minor}")


def with_parts(known: Iterable[Version], parts: list[str]) -> list[Version]:
    """Those of `known` whose suite has one of these parts; all without parts."""
    return [version for version in known if not parts or set(parts) & set(SUITES[version.framework])]


def make(version: Version, python: str, wheel: Path | None) -> Path:
    """An environment with `version`, and with the wheel if there is one; returns its Python."""
    folder = FOLDER / f"{version.framework}-{version.number}-{Path(python).name}"
    shutil.rmtree(folder, ignore_errors=True)
    uv = _uv()
    if uv:
        subprocess.run([*uv, "venv", "--quiet", "--python", python, str(folder)], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
    else:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*install, *version.requirements], check=True)
    alone = [*version.without_dependencies(folder / "bin/python"), *([str(wheel)] if wheel else [])]
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True)
    return folder / "bin/python"


def _uv() -> list[str]:
    # Without its cache, which would keep several GB for each version.
    known = subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False)
    if known.returncode == 0:
        return [sys.executable, "-m", "uv", "--no-cache"]
    return ["uv", "--no-cache"] if shutil.which("uv") else []


def build(python: Path, framework: str, is_shipped: bool, is_installed: bool) -> None:
    """Builds the framework's operator library, so that no test's time limit pays for it."""
    if is_shipped:
        command = [str(python), "-m", "smdistributed._common.shims", framework]
        shipping = {"CXX": f"c++ -include {ROOT / 'release/old_glibc.h'}"}
    else:
        command = [str(python), "-c", f"from smdistributed._common import shims; shims.load_{framework}()"]
        shipping = {}
    # In a folder without Python packages: `python -c` would import those of the current folder.
    subprocess.run(command, cwd=_scratch(), env=environment(is_installed) | shipping, check=True, timeout=LIMIT)
    if is_shipped and is_installed:
        for built in python.parents[1].glob(f"lib/*/site-packages/smdistributed/_prebuilt/{framework}-*"):
            shutil.copytree(built, ROOT / "python/smdistributed/_prebuilt" / built.name, dirs_exist_ok=True)


def verdict(report: Path) -> str:
    """The reason in pytest's report of a part that did not pass: time limits alone say nothing about a version."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    texts = [problem.text or "" for case in cases for kind in ("failure", "error") for problem in case.iter(kind)]
    return NO_END if texts and all(_OUT_OF_TIME.search(text) for text in texts) else "fails"


def run(python: Path, framework: str, given: dict[str, str], parts: list[str]) -> tuple[dict[str, str], list[str]]:
    """Runs these parts of the suite, or all; returns the outcome of each, and what the environment holds."""
    outcomes = {}
    for part, tests in SUITES[framework].items():
        if parts and part not in parts:
            outcomes[part] = NOT_RUN
            continue
        start = time.monotonic()
        report = _scratch() / "report.xml"
        report.unlink(missing_ok=True)
        # The first test of a version compiles the modules that it imports.
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={LIMIT}", "--patience=4", f"--junit-xml={report}"]
        command = [str(python), "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=given, check=False, timeout=LIMIT)
            outcomes[part] = "yes" if done.returncode == 0 else verdict(report)
        except subprocess.TimeoutExpired:
            outcomes[part] = NO_END
        print(f"{framework} {part}: {outcomes[part]} ({time.monotonic() - start:.0f} s)", flush=True)
    others = ("keras", "tf_keras", "transformers", "tensorflow-cpu")
    names = (_DISTRIBUTIONS[framework], *(name for name in others if name != _DISTRIBUTIONS[framework]))
    listing = (
        "import importlib.metadata as m, platform\n"
        "found = {d.name.replace('-', '_').lower(): d.version for d in m.distributions()}\n"
        f"print('Python', platform.python_version())\n"
        f"[print(n, found[n.replace('-', '_')]) for n in {names!r} if n.replace('-', '_') in found]"
    )
    held = subprocess.run([str(python), "-c", listing], capture_output=True, text=True, check=True)
    return outcomes, held.stdout.splitlines()


def row(framework: str, outcomes: dict[str, str], held: list[str]) -> str:
    """A line of the table."""
    python, version, *others = held
    name = f"{WINDOWS[framework].title} {version.split()[1]}"
    return f"| {name} | {', '.join([python, *others])} | {' | '.join(outcomes.values())} |"


def write(framework: str, line: str) -> None:
    """Puts a row into the page, and keeps the rows of other versions and other Pythons.

    Parts that did not run keep what an earlier run with the same packages found.
    """
    with open(_scratch().parent / "page.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        table, _, after = rest.partition(END)
        tables = []
        for name, suite in SUITES.items():
            known = {_key(row): row for row in table.splitlines() if row.startswith(f"| {WINDOWS[name].title} ")}
            if name == framework:
                known[_key(line)] = _merged(known.get(_key(line)), line)
            if known:
                head = [*_HEAD, *suite]
                rows = [known[key] for key in sorted(known, reverse=True)]
                tables.append([f"| {' | '.join(head)} |", f"| {' | '.join('--' for _ in head)} |", *rows])
        PAGE.write_text(before + BEGIN + "\n" + "\n\n".join(map("\n".join, tables)) + "\n\n" + END + after)


def _cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def _merged(known: str | None, line: str) -> str:
    """A row, with what is known of parts that did not run this time."""
    old, new = _cells(known or ""), _cells(line)
    if old[: len(_HEAD)] == new[: len(_HEAD)]:
        new = [before if now == NOT_RUN else now for before, now in zip(old, new, strict=True)]
    return f"| {' | '.join(new)} |"


def _key(line: str) -> tuple[int, ...]:
    """The version and the Python of a row: `| PyTorch 2.9.1+cpu | Python 3.11.7 |` is (2, 9, 3, 11)."""
    version, others = _cells(line)[: len(_HEAD)]
    return tuple(int(number) for text in (version, others) for number in re.findall(r"\d+", text)[:2])


def main() -> int:
    """Runs the matrix; the exit code is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME==VERSION", help="these versions, in this order (default: all)"
    )
    parser.add_argument(
        "--ends", action="store_true", help="of each framework the newest and the oldest, but pinned ones"
    )
    parser.add_argument("--parts", nargs="+", default=[], help="of the suites, such as `DDP` (default: all)")
    parser.add_argument("--prebuilt", action="store_true", help="build libraries for shipping, and test those")
    parser.add_argument("--wheel", type=Path, help="test what is installed from this file")
    parser.add_argument("--python", default=sys.executable, help="of the environments (default: this one)")
    parser.add_argument("--keep", action="store_true", help="keep the environments, of up to 8 GB each")
    parser.add_argument("--keep-page", action="store_true", help="do not write the outcomes into the support matrix")
    options = parser.parse_args()
    known = with_parts(ends() if options.ends else versions(), options.parts)
    by_name = {str(version): version for version in known}
    chosen = [by_name[name] for name in options.only or by_name if name in by_name]
    if not chosen or (options.only and len(chosen) < len(options.only)):
        parser.error(f"versions of the window are {', '.join(map(str, versions()))}")
    wheel = options.wheel and options.wheel.resolve()
    failed = []
    with ThreadPoolExecutor(1) as installer:
        following = installer.submit(make, chosen[0], options.python, wheel)
        for version, successor in zip(chosen, [*chosen[1:], None], strict=True):
            python = following.result()
            if successor:
                following = installer.submit(make, successor, options.python, wheel)
            print(f"== {version}", flush=True)
            if options.prebuilt or not wheel:
                build(python, version.shim, options.prebuilt, wheel is not None)
            given = environment(wheel is not None, has_compiler=not options.prebuilt and not wheel)
            outcomes, held = run(python, version.framework, given, options.parts)
            if not options.keep_page:
                write(version.framework, row(version.framework, outcomes, held))
            failed += [
                f"{version}: {part} {outcome}" for part, outcome in outcomes.items() if outcome not in ("yes", NOT_RUN)
            ]
            if not options.keep:
                shutil.rmtree(python.parents[1])
    print("\n".join(failed) or f"{len(chosen)} versions passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
