"""A SageMaker training container on this machine, for the toolkit that runs in Amazon's own images.

The container is a set of namespaces: it has its own host name, network, `/opt/ml` and `/etc/hosts`. In it, the `train` command of the
toolkit `sagemaker-training` reads the files that SageMaker writes, and starts the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from support import launchers

ROOT = Path(__file__).resolve().parents[2]
#: Where `make test-engines` puts the toolkit, with packages of its own.
TOOLKIT = ROOT / "build" / "sagemaker"
HOST = "algo-1"

#: An entry point like that of SageMaker's PyTorch and TensorFlow containers, which selects the runner for
#: `distribution={"smdistributed": {"dataparallel": ..}}`.
FRAMEWORK = """
from sagemaker_training import entry_point, environment, runner

def main():
    env = environment.Environment()
    kind = runner.MPIRunnerType
    if env.additional_framework_parameters.get("sagemaker_distributed_dataparallel_enabled"):
        kind = runner.SMDataParallelRunnerType
    entry_point.run(env.module_dir, env.user_entry_point, env.to_cmd_args(), env.to_env_vars(), runner_type=kind)
"""

#: The toolkit starts `sshd`, which no host of a job with one host contacts.
ENTER = """
set -e
mount -t tmpfs none /opt
mkdir /opt/ml
mount --bind "$FOLDER/ml" /opt/ml
mount --bind "$FOLDER/hosts" /etc/hosts
mount -t overlay none -o "lowerdir=$TOOLKIT/openssh/usr/sbin:/usr/sbin" /usr/sbin
hostname "$NAME"
ip link set lo up
exec "$TOOLKIT/bin/train"
"""


def missing() -> str | None:
    """Why no container can be started here; None if one can."""
    if not (TOOLKIT / "bin" / "train").exists():
        return "sagemaker-training is not installed: `make test-engines` installs it"
    if os.getuid() != 0:
        return "namespaces need root"
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (package openmpi-bin)"
    if not (TOOLKIT / "openssh" / "usr" / "sbin" / "sshd").exists():
        return "sshd is not there (package openssh-server)"
    return None


class Container:
    """The container of one training job; its folder is removed at the end of `with`."""

    def __init__(self, script: str, hyperparameters: dict[str, object], processes: int = 2) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="smd-sagemaker-"))
        code = self.folder / "ml" / "code"
        config = self.folder / "ml" / "input" / "config"
        data = self.folder / "ml" / "input" / "data" / "train"
        for each in (code, config, data, *(self.folder / name for name in ("ml/model", "ml/output", "tmp"))):
            each.mkdir(parents=True)
        (code / "train.py").write_text(textwrap.dedent(script))
        (self.folder / "framework.py").write_text(FRAMEWORK)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {HOST}\n")
        group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.xlarge", "hosts": [HOST]}
        resources = {
            "current_host": HOST,
            "hosts": [HOST],
            "network_interface_name": "lo",
            "current_instance_type": "ml.c5.xlarge",
            "current_group_name": "homogeneousCluster",
            "instance_groups": [group],
        }
        channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
        told = {
            "sagemaker_program": "train.py",
            "sagemaker_submit_directory": "/opt/ml/code",
            "sagemaker_container_log_level": 20,
            "sagemaker_region": "us-west-2",
            "sagemaker_instance_type": "ml.c5.xlarge",
            "sagemaker_distribution_instance_groups": ["homogeneousCluster"],
            "sagemaker_mpi_num_of_processes_per_host": processes,
            **hyperparameters,
        }
        # SageMaker writes each value as JSON in a string.
        texts = {name: json.dumps(value) for name, value in told.items()}
        files = {"resourceconfig": resources, "inputdataconfig": {"train": channel}, "hyperparameters": texts}
        for name, contents in files.items():
            (config / f"{name}.json").write_text(json.dumps(contents))

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def train(self, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        """Runs the toolkit's `train`; returns its output after it has ended."""
        with self.start() as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            finally:
                # Ends all processes of the container.
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def environment(self) -> dict[str, str]:
        """The variables of the container."""
        path = [str(self.folder), str(ROOT / "python"), str(ROOT / "tests")]
        return {
            **launchers.clean_environment(),
            "FOLDER": str(self.folder),
            "TOOLKIT": str(TOOLKIT),
            "NAME": HOST,
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([str(TOOLKIT / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SAGEMAKER_TRAINING_MODULE": "framework:main",
            "OMP_NUM_THREADS": "1",
            # Only the job writes here, so that the test sees which files it leaves.
            "TMPDIR": str(self.folder / "tmp"),
        }

    def start(self) -> subprocess.Popen[str]:
        """Starts the toolkit's `train`."""
        namespaces = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.Popen(
            [*namespaces, "sh", "-c", ENTER],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ranks(self) -> dict[int, int]:
        """Ids of the processes that run the script, by rank, as this host sees them."""
        found = {}
        for pid, words, variables in self.processes():
            rank = variables.get("OMPI_COMM_WORLD_RANK")
            # The command line of `smddprun` contains the same arguments, but does not begin with them.
            if rank is not None and "mpi4py" in words and "python" in Path(words[0]).name and words[1] == "-m":
                found[int(rank)] = pid
        return found

    def processes(self) -> list[tuple[int, list[str], dict[str, str]]]:
        """Id, command and variables of each process of the container."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                entries = (folder / "environ").read_text().split("\0") if folder.name.isdigit() else []
                if f"FOLDER={self.folder}" in entries:
                    words = (folder / "cmdline").read_text().split("\0")
                    found.append((int(folder.name), words, dict(each.partition("=")[::2] for each in entries)))
        return found

    def results(self) -> list[dict[str, object]]:
        """What the ranks have written to SM_MODEL_DIR, by rank."""
        files = sorted((self.folder / "ml" / "model").glob("rank*.json"))
        return [json.loads(path.read_text()) for path in files]

    def failure(self) -> str | None:
        """What the toolkit has told SageMaker of a failure; None after a success."""
        path = self.folder / "ml" / "output" / "failure"
        return path.read_text() if path.exists() else None
