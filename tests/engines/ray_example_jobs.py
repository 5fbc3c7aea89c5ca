"""Commands of the guide, and the examples of Horovod that Ray's wheel carries, as they are: ``make test-engines``.

Of those examples the data loading alone is replaced: digits of scikit-learn take the place of torchvision's MNIST.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines` installs it")
pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from cluster import ROOT, RayCluster

from support import hosts, launchers

pytestmark = pytest.mark.timeout(900)

EXAMPLES = "ray.train.examples.horovod"

#: The names of torchvision that the examples use.
TORCHVISION = """
import types
import numpy as np
import torch
from sklearn.datasets import load_digits

class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train, download, transform):
        digits = load_digits()
        self.images = np.pad(digits.images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2))) / 16
        self.labels, self.transform = digits.target, transform
    def __len__(self):
        return 3 * len(self.labels)
    def __getitem__(self, number):
        number %= len(self.labels)
        return self.transform(self.images[number]), int(self.labels[number])

def compose(steps):
    def transform(image):
        for step in steps:
            image = step(image)
        return image
    return transform

datasets = types.SimpleNamespace(MNIST=MNIST)
transforms = types.SimpleNamespace(
    Compose=compose,
    ToTensor=lambda: lambda image: torch.tensor(image, dtype=torch.float32)[None],
    Normalize=lambda mean, deviation: lambda image: (image - mean[0]) / deviation[0],
)
"""


def cluster_of(cpus, folder):
    """A cluster where torchvision is replaced."""
    (folder / "torchvision.py").write_text(TORCHVISION)
    cluster = RayCluster(cpus)
    # The trainer of Horovod belongs to the first version of Ray Train.
    cluster.environment["RAY_TRAIN_V2_ENABLED"] = "0"
    cluster.environment["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    # Results go below the home folder.
    cluster.environment["HOME"] = str(cluster.folder)
    # Ray lets all users write to the cluster's folder, so the library builds nothing below it.
    del cluster.environment["TMPDIR"]
    return cluster


def losses(output):
    """First and last loss of each worker, by the id of its process."""
    found = {}
    for pid, loss in re.findall(r"RayTrainWorker pid=(\d+).*Train Epoch: .*Loss: ([0-9.]+)", output):
        found.setdefault(pid, []).append(float(loss))
    return {pid: (each[0], each[-1]) for pid, each in found.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with cluster_of([2, 1], tmp_path_factory.mktemp("torchvision")) as running:
        yield running


@pytest.mark.parametrize("name", ["horovod_example", "horovod_pytorch_example"])
def test_digits_are_learned(cluster, name):
    output = cluster.run("-m", f"{EXAMPLES}.{name}", "--num-workers", "2", "--num-epochs", "3")
    found = losses(output)
    assert len(found) == 2, output
    assert all(last < 0.7 * first for first, last in found.values()), output
    assert not re.search("Traceback|Error", output), output


def test_tune_runs_jobs(tmp_path):
    """With `--smoke-test` the example starts Ray itself."""
    with cluster_of([], tmp_path) as running:
        running.environment["RAY_TMPDIR"] = str(running.folder)
        output = running.run("-m", f"{EXAMPLES}.horovod_tune_example", "--num-workers", "2", "--smoke-test")
    assert "Trial status: 2 TERMINATED" in output, output
    assert "Best hyperparameters found were:" in output
    # Each of the four workers prints the number of ranks.
    assert len(set(re.findall(r"RayTrainWorker pid=(\d+).*\)\S* 2$", output, re.MULTILINE))) == 4, output


class Shell:
    """A shell on a host that has a network, processes, and temporary files of its own. `ray stop` finds no others."""

    def __init__(self, network, host):
        # Users need no network beyond that of the hosts; Ray would send statistics.
        environment = {**launchers.clean_environment(), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "bash"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen([*network.on(host), *apart], env=environment, cwd=ROOT, text=True, **pipes)
        for folder in ("/tmp", "/dev/shm"):
            self.run(f"mount -t tmpfs tmpfs {folder}")

    def run(self, command):
        """Waits until a command has ended, and returns its output; its exit status must be 0."""
        self.process.stdin.write(f"{command}\necho; echo END $?\n")
        self.process.stdin.flush()
        lines = []
        while not (line := self.process.stdout.readline()).startswith("END "):
            assert line, lines
            lines.append(line)
        output = "".join(lines)
        assert line == "END 0\n", f"{command}: {line}{output}"
        return output

    def processes(self):
        """Commands of the host's processes but those of the shell."""
        return [
            each
            for each in self.run("ps -eo args=").splitlines()
            if each.split() not in ([], ["bash"], ["ps", "-eo", "args="])
        ]

    def close(self):
        """Ends the shell and all processes of the host."""
        self.process.kill()
        self.process.wait()


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
def test_the_commands_of_the_guide():
    """On two hosts, up to `ray stop`. Ray itself leaves its logs."""
    guide = (ROOT / "docs" / "guides" / "ray.md").read_text()
    block = re.search(r"```sh\n(.*?)```", guide, re.DOTALL)[1]
    commands = [shlex.join(shlex.split(line, comments=True)) for line in block.splitlines()]
    assert [each.split()[:2] for each in commands] == [
        ["ray", "start"], ["ray", "start"], ["python", "examples/ray/horovod_digits.py"],
        ["python", "examples/ray/elastic_digits.py"], ["ray", "stop"],
    ]  # fmt: skip
    head, other, fixed, elastic, stop = commands
    with contextlib.ExitStack() as stack:
        two = stack.enter_context(hosts.Hosts(2))
        two.name_each_other()
        shells = [Shell(two, host) for host in range(2)]
        for shell in shells:
            stack.callback(shell.close)
        assert "Ray runtime started" in shells[0].run(head)
        assert "Ray runtime started" in shells[1].run(other.replace("HEAD", hosts.address(0)))
        assert re.search(r"accuracy 0.* on 2 workers", shells[0].run(fixed))
        output = shells[0].run(elastic)
        assert re.search(r"a session of 2 in epoch", output), output
        for shell in reversed(shells):
            shell.run(stop)
            assert shell.processes() == []
            assert shell.run("find /tmp /dev/shm -type f -not -path '/tmp/ray/*'").split() == []
