"""Trains the digits of `make demo` with two ranks under each engine, and compares with `smdrun -n 2` on one host.

    python benches/engines/digits.py                          # every engine that is installed
    python benches/engines/digits.py --only slurm sagemaker

Each engine starts `examples/torch_digits.py --double` by its own command, in an environment of HOME, LANG and PATH and
what the engine needs. The accuracy must be that of the demo, and the loss of each step that of `smdrun`, bit for bit.
The hosts are network namespaces of this machine where the table has two of them. There is no Kubernetes: processes of
this machine run the commands of the manifests with the variables that each operator sets (`tests/engines/pods.py`).

One text file for each engine goes to `--logs`. Ends with exit status 1 if an engine that ran differs or failed; an
engine that is not installed is a row with the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engines"), str(ROOT / "examples")]

import pods  # noqa: E402
import sagemaker  # noqa: E402
import slurm  # noqa: E402
from cluster import RayCluster  # noqa: E402
from demo import MIN_ACCURACY  # noqa: E402
from mpi import MPIS  # noqa: E402
from spark import SparkCluster  # noqa: E402

from support import hosts, launchers  # noqa: E402

TRAIN = "examples/torch_digits.py"
#: Variables of the caller that jobs keep. The operator library and the fonts of plots are cached below HOME.
KEPT = ("HOME", "LANG", "PATH")
#: The log has the line by which rank 0 says how many ranks and hosts there are.
OWN = {"OMP_NUM_THREADS": "1", "SMD_LOG": "info"}
#: Longest time of a job, in seconds. SageMaker's toolkit sleeps for 30 s at the end.
TIMEOUT = 280.0
_JOINED = re.compile(r"joined a job of (\d+) processes on (\d+) hosts")


@dataclass(frozen=True)
class Job:
    """A job that has ended: its command, the names of the variables that the engine had, and what the job printed."""

    command: list[str]
    variables: Iterable[str]
    output: str


@dataclass(frozen=True)
class Engine:
    """An engine. `train` writes the results of the script into a folder; a second folder is for temporary files."""

    name: str
    version: Callable[[], str]
    train: Callable[[Path, Path], Job]
    missing: Callable[[], str | None] = lambda: None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """The results of a job, and where it ran."""

    job: Job
    losses: list[float]
    accuracy: float
    ranks: int
    hosts: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*ENGINES], default=[*ENGINES], metavar="ENGINE")
    parser.add_argument("--logs", type=Path, default=HERE / "logs", help="folder for one text file of each engine")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    use_clean_environment()

    print("| engine | version | command | hosts | accuracy | losses equal |\n| -- | -- | -- | -- | -- | -- |")
    reference = run(REFERENCE)
    is_good = report("smdrun", REFERENCE, reference, None, arguments.logs)
    for name in arguments.only:
        engine = ENGINES[name]
        if reason := engine.missing():
            print(row(engine.name, "-", f"not run: {reason}", "-", "-", "-"), flush=True)
            continue
        try:
            result = run(engine)
        except Exception:
            traceback.print_exc()
            print(row(engine.name, engine.version(), "failed", "-", "-", "no"), flush=True)
            is_good = False
            continue
        is_good &= report(name, engine, result, reference, arguments.logs)
    if not is_good:
        sys.exit("an engine does not train as `smdrun` does on one host")


def use_clean_environment() -> None:
    """Removes all variables but those in `KEPT`, as the launchers of the tests start from those of this process."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    # Engines start `python` and tools of the environment by their names.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def run(engine: Engine) -> Result:
    """Trains under an engine."""
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        out, temporary = Path(folder) / "out", Path(folder) / "tmp"
        out.mkdir()
        temporary.mkdir()
        job = engine.train(out, temporary)
        results = json.loads((out / "results.json").read_text())
    places = {(int(ranks), int(count)) for ranks, count in _JOINED.findall(job.output)}
    assert len(places) == 1, f"no rank has said how many hosts there are:\n{job.output}"
    ((ranks, count),) = places
    words = [str(word).replace(str(out), "OUT") for word in job.command]
    return Result(replace(job, command=words), results["losses"], results["accuracy"], ranks, count)


def report(key: str, engine: Engine, result: Result, reference: Result | None, logs: Path) -> bool:
    """Prints the row of an engine and writes its log; returns whether the results are as they should be."""
    version = engine.version()
    is_accurate = result.accuracy >= MIN_ACCURACY
    difference = first_difference(result.losses, reference.losses) if reference else None
    if reference is None:
        comparison = "this is the reference"
    elif difference is None:
        comparison = f"equal to those of `smdrun -n 2` on one host, bit for bit, in {len(result.losses)} steps"
    else:
        comparison = f"not equal to those of `smdrun -n 2` on one host: {difference}"
    command = shown(result.job.command)
    lines = [
        f"engine: {engine.name} {version}".rstrip(),
        f"command: {command}",
        *([f"note: {engine.note}"] if engine.note else []),
        f"variables of the engine: {' '.join(sorted(set(result.job.variables)))}",
        f"ranks: {result.ranks}, hosts: {result.hosts}",
        f"versions: Python {platform.python_version()}, torch {importlib.metadata.version('torch')}",
        f"test accuracy: {result.accuracy!r}, at least {MIN_ACCURACY}",
        f"losses: {comparison}",
        "",
        "step loss",
        *(f"{step} {loss!r}" for step, loss in enumerate(result.losses, 1)),
    ]
    (logs / f"{key}.txt").write_text("\n".join(lines) + "\n")
    short = command.replace(f"{TRAIN} --double --out OUT", "SCRIPT").replace("--double --out OUT", "..")
    short = f"`{short if len(short) <= 100 else short[:98] + '..'}`" + (f" ({engine.note})" if engine.note else "")
    accuracy = f"{result.accuracy:.2%}" + ("" if is_accurate else f", less than {MIN_ACCURACY:.0%}")
    equal = "reference" if reference is None else "bitwise" if difference is None else f"no: {difference}"
    where = f"{result.hosts}" + ("" if result.ranks == 2 else f", {result.ranks} ranks instead of 2")
    print(row(engine.name, version, short, where, accuracy, equal), flush=True)
    return is_accurate and difference is None and result.ranks == 2


def first_difference(losses: list[float], expected: list[float]) -> str | None:
    """Describes the first step whose losses differ in a bit; None if there is none."""
    if len(losses) != len(expected):
        return f"{len(losses)} steps instead of {len(expected)}"
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True), 1):
        if loss.hex() != other.hex():
            return f"step {step}: {loss!r} instead of {other!r}"
    return None


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def shown(command: list[str]) -> str:
    """The command as text, without the folders of this machine and of this run."""
    text = shlex.join(command).replace(sys.executable, "python")
    text = text.replace(f"{Path(sys.executable).parent}/", "").replace(f"{ROOT}/", "")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^\s'\"/]*", "TMP", text)


def finish(command: list[str], variables: dict[str, str]) -> Job:
    """Runs a command to its end."""
    done = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT
    )
    assert done.returncode == 0, f"exit status {done.returncode}:\n{done.stdout}"
    return Job(command, variables, done.stdout)


def options(out: Path) -> list[str]:
    return ["--double", "--out", str(out)]


def train_with_smdrun(out: Path, folder: Path) -> Job:
    command = [str(Path(sys.executable).parent / "smdrun"), "-n", "2", TRAIN, *options(out)]
    return finish(command, {**os.environ, **OWN, "TMPDIR": str(folder)})


def train_with_mpi(family: str, out: Path, folder: Path) -> Job:
    mpi = MPIS[family]
    return finish([*mpi.command(2), TRAIN, *options(out)], {**mpi.environment(folder), **OWN})


def train_with_mpi_on_hosts(family: str, out: Path, folder: Path) -> Job:
    mpi = MPIS[family]
    with hosts.Hosts(2) as two:
        two.name_each_other()
        command = [*mpi.on_hosts(two, 2), TRAIN, *options(out)]
        job = finish(command, {**mpi.environment(folder), **OWN})
        return replace(job, command=command[len(two.on(0)) :])


def mpi_version(family: str) -> str:
    text = subprocess.run([str(MPIS[family].tool("mpirun")), "--version"], capture_output=True, text=True).stdout
    return re.search(r"\d+\.\d+[.\w]*", text).group()


def train_with_slurm(out: Path, folder: Path) -> Job:
    command = ["srun", "-N2", "-n2", "python", TRAIN, *options(out)]
    with slurm.SlurmCluster() as cluster:
        cluster.environment |= {**OWN, "SMD_SECRET": secrets.token_hex(16), "TMPDIR": str(folder)}
        return Job(command, cluster.environment, cluster.run(*command, timeout=TIMEOUT))


def train_with_ray(kind: str, out: Path, folder: Path) -> Job:
    command = ["benches/engines/ray_driver.py", kind, *options(out)]
    has_job_server = ray_has_job_server()
    cluster = RayCluster(cpus=[1, 1], has_hosts=hosts.missing_network() is None, has_job_server=has_job_server)
    cluster.environment |= OWN
    with cluster:
        if has_job_server:
            # The driver of a job has a working folder of Ray's.
            output = cluster.submit(ROOT / command[0], *command[1:], timeout=TIMEOUT)
        else:
            output = cluster.run(*command, timeout=TIMEOUT)
    words = ["ray", "job", "submit", "--"] if has_job_server else []
    return Job([*words, "python", *command], cluster.environment, output)


def ray_has_job_server() -> bool:
    """Whether Ray was installed as `ray[default]`."""
    return all(importlib.util.find_spec(name) for name in ("aiohttp_cors", "opencensus"))


def train_with_spark(out: Path, folder: Path) -> Job:
    command = ["benches/engines/spark_driver.py", *options(out)]
    with SparkCluster() as cluster:
        cluster.environment |= {**OWN, "PYTHONPATH": str(ROOT / "python")}
        output = cluster.submit(*command, timeout=TIMEOUT)
        master = cluster.environment["ENGINE_TEST_MASTER"]
    return Job(["spark-submit", "--master", master, *command], cluster.environment, output)


def spark_missing() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed"
    return None if shutil.which("java") else "Java is not installed"


def train_with_operator(job: Callable[..., list[pods.Pod]], out: Path, folder: Path) -> Job:
    """Runs the pods of an operator that starts a process in each, on hosts of their own."""
    variables = {**OWN, "SMD_SECRET": secrets.token_hex(16)}
    with hosts.Hosts(2) as two:
        plain = [training(pod) for pod in job(shlex.join(options(out)), variables, 2, hosts.address(0))]
        output = output_of([pod.on(two.on(number)) for number, pod in enumerate(plain)], folder)
    return Job(plain[0].command, variables_of(plain[0]), output)


def train_with_mpi_operator(out: Path, folder: Path) -> Job:
    """Runs the launcher on a host of its own, from which `mpirun` reaches the workers by ssh."""
    with hosts.Hosts(3) as network:
        workers = pods.Workers(network, folder, OWN)
        variables = {**OWN, "SMD_SECRET": secrets.token_hex(16)}
        pod = training(workers.launcher(shlex.join(options(out)), variables, folder))
        output = output_of([pod], folder)
    return Job(pod.command[pod.command.index("sh") :], variables_of(pod), output)


def training(pod: pods.Pod) -> pods.Pod:
    """The pod with the script of the demo in place of that of the manifests."""
    assert any(pods.TRAIN in word for word in pod.command)
    return replace(pod, command=[word.replace(pods.TRAIN, TRAIN) for word in pod.command])


def variables_of(pod: pods.Pod) -> list[str]:
    return [*pod.environment(), "TMPDIR", "PYTHONUNBUFFERED"]


def output_of(started: list[pods.Pod], folder: Path) -> str:
    """Waits until all pods have succeeded; returns their output."""
    with pods.Pods(started, folder) as running:
        running.finish(0, TIMEOUT)
        for reader in running.readers:
            reader.join(10)
        return running.text()


def kubernetes_missing() -> str | None:
    return hosts.missing_network() or (None if importlib.util.find_spec("yaml") else "PyYAML is not installed")


#: What a user uploads beside the script of the demo: hyperparameters come in pairs, and `--double` has no value.
_ENTRY_POINT = """
import os, sys
os.environ["SMD_LOG"] = "info"
sys.path.insert(0, {examples!r})
import torch_digits
torch_digits.main(["--double", "--out", os.environ["SM_MODEL_DIR"]])
"""


def train_with_sagemaker(out: Path, folder: Path) -> Job:
    enabled = {"sagemaker_distributed_dataparallel_enabled": True}
    with sagemaker.Container(_ENTRY_POINT.format(examples=str(ROOT / "examples")), enabled) as container:
        done = container.train(TIMEOUT)
        assert done.returncode == 0, done.stdout
        shutil.copy(container.folder / "ml" / "model" / "results.json", out)
    called = re.search(r"^mpirun .*$", done.stdout, re.MULTILINE)
    assert called, done.stdout
    return Job(called.group().split(), container.environment(), done.stdout)


def sagemaker_version() -> str:
    (found,) = sagemaker.TOOLKIT.glob("lib/python*/site-packages/sagemaker_training-*.dist-info")
    return found.name.removeprefix("sagemaker_training-").removesuffix(".dist-info")


_NO_CLUSTER = "no cluster: the command of the manifest, with the variables of the operator"


def _manifest(kind: str, name: str, train: Callable[[Path, Path], Job], missing: Callable[[], str | None]) -> Engine:
    return Engine(f"Kubernetes, {kind}", lambda: pods.load(name)[-1]["apiVersion"], train, missing, _NO_CLUSTER)


def _mpi(name: str, family: str) -> dict[str, Engine]:
    """An MPI on one host, and on two."""
    mpi, version = MPIS[family], partial(mpi_version, family)
    return {
        family: Engine(name, version, partial(train_with_mpi, family), mpi.missing),
        f"{family}-hosts": Engine(
            name, version, partial(train_with_mpi_on_hosts, family), lambda: mpi.missing() or hosts.missing_network()
        ),
    }


def _ray(name: str, kind: str) -> Engine:
    return Engine(
        name,
        lambda: importlib.metadata.version("ray"),
        partial(train_with_ray, kind),
        lambda: None if importlib.util.find_spec("ray") else "Ray is not installed",
        "" if ray_has_job_server() else "no job server: `ray[default]` is not installed",
    )


REFERENCE = Engine("smdrun", lambda: importlib.metadata.version("opensmd"), train_with_smdrun)
ENGINES = {
    **_mpi("Open MPI", "openmpi4"),
    **_mpi("Open MPI", "openmpi5"),
    **_mpi("MPICH", "mpich4"),
    **_mpi("MPICH", "mpich"),
    "slurm": Engine(
        "Slurm",
        lambda: subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.split()[-1],
        train_with_slurm,
        slurm.missing,
    ),
    "ray": _ray("Ray, RayExecutor", "executor"),
    "ray-train": _ray("Ray, TorchTrainer", "trainer"),
    "spark": Engine("Spark", lambda: importlib.metadata.version("pyspark"), train_with_spark, spark_missing),
    "job": _manifest("Job", "job.yaml", partial(train_with_operator, pods.indexed_job), kubernetes_missing),
    "pytorchjob": _manifest(
        "PyTorchJob", "pytorchjob.yaml", partial(train_with_operator, pods.pytorch_job), kubernetes_missing
    ),
    "trainjob": _manifest(
        "TrainJob", "trainjob.yaml", partial(train_with_operator, pods.train_job), kubernetes_missing
    ),
    "mpijob": _manifest(
        "MPIJob", "mpijob.yaml", train_with_mpi_operator, lambda: launchers.missing("mpirun") or kubernetes_missing()
    ),
    "sagemaker": Engine("SageMaker's toolkit", sagemaker_version, train_with_sagemaker, sagemaker.missing),
}


if __name__ == "__main__":
    main()
