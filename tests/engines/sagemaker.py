"""SageMaker training containers on this machine, for the toolkit that runs in Amazon's own images.

A container is a set of namespaces: it has its own host name, network, `/opt/ml` and `/etc/hosts`. In it, the `train` command of the
toolkit `sagemaker-training` reads the files that SageMaker writes, and starts the job.

with Container(SCRIPT, parameters) as container:
    container.train()
with Cluster(SCRIPT, parameters) as cluster:         # two containers with a network and `sshd`
    outputs = cluster.train()
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
from collections.abc import Mapping
from pathlib import Path

from support import hosts, launchers

ROOT = Path(__file__).resolve().parents[2]
#: Where `make test-engines` puts the toolkit, with packages of its own.
TOOLKIT = ROOT / "build" / "sagemaker"
HOSTS = ("algo-1", "algo-2")
#: What the toolkit of the first host tells the others of the end of a job; /tmp is common to the containers.
FINISHED = Path(f"/tmp/done.{HOSTS[0]}")

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
for part in sbin $(cd "$TOOLKIT/openssh/usr" && echo lib/*-linux-gnu); do
    mount -t overlay none -o "lowerdir=$TOOLKIT/openssh/usr/$part:/usr/$part" /usr/$part
done
hostname "$NAME"
ip link set lo up
"""
OWN_NAMES = 'mount --bind "$FOLDER/hosts" /etc/hosts\n'
#: What the images of several hosts have: keys of `sshd` and of the user, and an `/etc` that the toolkit writes to.
WITH_SSHD = """
mkdir "$FOLDER/etc" "$FOLDER/work"
mount -t overlay none -o "lowerdir=/etc,upperdir=$FOLDER/etc,workdir=$FOLDER/work" /etc
mount -t tmpfs none /run
mkdir -p /run/sshd /etc/ssh /opt/home/.ssh
cp "$FOLDER/hosts" /etc/hosts
cp "$KEYS/id_ed25519" /etc/ssh/ssh_host_ed25519_key
cp "$KEYS/id_ed25519" /opt/home/.ssh
cp "$KEYS/id_ed25519.pub" /opt/home/.ssh/authorized_keys
chmod -R go= /opt/home /etc/ssh/ssh_host_ed25519_key
printf "PermitRootLogin yes\\nUsePAM yes\\nStrictModes no\\n" >/etc/ssh/sshd_config
# The toolkit writes the variables of the job to /etc/environment.
printf "account required pam_permit.so\\nsession required pam_env.so\\n" >/etc/pam.d/sshd
printf "Host *\\n StrictHostKeyChecking no\\n UserKnownHostsFile /dev/null\\n LogLevel ERROR\\n" >/etc/ssh/ssh_config
sed -i "s|^\\(root:.*\\):/root:|\\1:/opt/home:|" /etc/passwd
echo "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin" >>/etc/passwd
export HOME=/opt/home
"""
TRAIN = 'exec "$TOOLKIT/bin/train"\n'


def missing() -> str | None:
    """Why no container can be started here; None if one can."""
    if not (TOOLKIT / "bin" / "train").exists():
        return "sagemaker-training is not installed: `make test-engines` installs it"
    if os.getuid() != 0:
        return "namespaces need root"
    if shutil.which("mpirun") is None:
        return "mpirun is not installed (package openmpi-bin)"
    usr = TOOLKIT / "openssh" / "usr"
    if not (usr / "sbin" / "sshd").exists() or not list(usr.glob("lib/*/libwrap.so.0")):
        return "sshd is not there (packages openssh-server and libwrap0)"
    return None


class Container:
    """A container of a training job; its folder is removed at the end of `with`."""

    def __init__(
        self,
        script: str,
        hyperparameters: dict[str, object],
        processes: int = 2,
        number: int = 0,
        network: hosts.Hosts | None = None,
        keys: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Takes the user's script and hyperparameters, the processes on each host, and the estimator's `environment`.

        A job with one host has one container. With a `network`, the job has all of its hosts, and this is host `number`; `keys` has
        `id_ed25519` and `id_ed25519.pub` of all of them.
        """
        self._host, self._network, self._keys = HOSTS[number], network, keys
        self._number, self._variables = number, variables or {}
        members = list(HOSTS[: network.count]) if network else [self._host]
        self.folder = Path(tempfile.mkdtemp(prefix="smd-sagemaker-"))
        code = self.folder / "ml" / "code"
        config = self.folder / "ml" / "input" / "config"
        data = self.folder / "ml" / "input" / "data" / "train"
        for each in (code, config, data, *(self.folder / name for name in ("ml/model", "ml/output", "tmp"))):
            each.mkdir(parents=True)
        (code / "train.py").write_text(textwrap.dedent(script))
        (self.folder / "framework.py").write_text(FRAMEWORK)
        places = [f"{hosts.address(each)} {name}" for each, name in enumerate(members)]
        names = ["127.0.0.1 localhost", *places] if network else [f"127.0.0.1 localhost {self._host}"]
        (self.folder / "hosts").write_text("\n".join(names) + "\n")
        group = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.c5.xlarge", "hosts": members}
        resources = {
            "current_host": self._host,
            "hosts": members,
            "network_interface_name": "eth0" if network else "lo",
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
            **self._variables,
            "FOLDER": str(self.folder),
            "TOOLKIT": str(TOOLKIT),
            "NAME": self._host,
            "KEYS": str(self._keys),
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([str(TOOLKIT / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SAGEMAKER_TRAINING_MODULE": "framework:main",
            "OMP_NUM_THREADS": "1",
            # Only the job writes here, so that the test sees which files it leaves.
            "TMPDIR": str(self.folder / "tmp"),
        }

    def start(self) -> subprocess.Popen[str]:
        """Starts the toolkit's `train`."""
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        network = self._network.on(self._number) if self._network else ["unshare", "--net"]
        enter = ENTER + (WITH_SSHD if self._network else OWN_NAMES) + TRAIN
        return subprocess.Popen(
            [*network, *namespaces, "sh", "-c", enter],
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

    def survivors(self) -> list[Path]:
        """Files in which ranks have written an error before they ended."""
        return sorted((self.folder / "ml" / "model").glob("survivor*"))

    def failure(self) -> str | None:
        """What the toolkit has told SageMaker of a failure; None after a success."""
        path = self.folder / "ml" / "output" / "failure"
        return path.read_text() if path.exists() else None


class Cluster:
    """The containers of a job with two hosts, from `with` on until its end."""

    def __init__(
        self,
        script: str,
        hyperparameters: dict[str, object],
        processes: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Takes the user's script and hyperparameters, the processes on each host, and the estimator's `environment`."""
        self._network = hosts.Hosts(len(HOSTS))
        self._stack = contextlib.ExitStack()
        self._job, self._variables = (script, hyperparameters, processes), variables
        #: By host.
        self.containers: list[Container] = []
        self.jobs: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:
        with self._stack:
            self._stack.enter_context(self._network)
            keys = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="smd-keys-")))
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id_ed25519"], check=True)
            self._stack.callback(FINISHED.unlink, missing_ok=True)
            for number in range(len(HOSTS)):
                place = {"number": number, "network": self._network, "keys": keys}
                container = Container(*self._job, **place, variables=self._variables)
                self.containers.append(self._stack.enter_context(container))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            # Ends all processes of the container.
            job.kill()
            job.communicate()
        self._stack.close()

    def start(self) -> None:
        """Starts the toolkit on each host."""
        self.jobs += [container.start() for container in self.containers]

    def train(self, timeout: float = 280.0) -> list[str]:
        """Runs the job; returns what the toolkit has printed on each host."""
        self.start()
        outputs = [job.communicate(timeout=timeout)[0] for job in self.jobs]
        assert [job.returncode for job in self.jobs] == [0] * len(self.jobs), "\n".join(outputs)
        return outputs

    def cut(self, number: int) -> None:
        """Cuts the link of a host."""
        self._network.cut(number)
