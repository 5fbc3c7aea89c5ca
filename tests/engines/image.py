"""Executes a Containerfile without a container engine, in a new root directory, and trains in it.

    python tests/engines/image.py examples/kubernetes/Containerfile      # in the repository, after `make wheel`

debootstrap makes a root of the release that the base image has, once, and each run works in a copy of it. Every ``RUN``
line is executed by ``chroot`` with the instructions' environment; ``COPY``, ``ENV``, ``ARG`` and ``WORKDIR`` have the
meaning that the reference of the Containerfile gives them. What a base image adds to its release is stood in for, see
:data:`BASES`. Needs root and the package debootstrap.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "images"


@dataclass(frozen=True)
class Base:
    """A release that stands in for a base image."""

    #: As debootstrap names it.
    release: str
    mirror: str
    components: str = "main"
    #: Packages and commands that give the root what the image adds to its release.
    packages: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


BASES = {
    # The image has Python 3.12 in /usr/local, built from source. Debian 12 has 3.11.
    "docker.io/library/python:3.12-slim-bookworm": Base(
        "bookworm",
        "http://deb.debian.org/debian",
        packages=("python3", "python3-venv"),
        commands=("python3 -m venv /usr/local",),
    ),
    # The image adds NVIDIA's repository and three packages of CUDA, which PyTorch's wheel has, too.
    "docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04": Base(
        "noble", "http://archive.ubuntu.com/ubuntu", components="main,universe"
    ),
}
#: Variables that say how this machine reaches the package registries.
NETWORK = ("http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
FILES_OF_THE_NETWORK = ("etc/resolv.conf", "etc/hosts", CERTIFICATES)


@dataclass
class Image:
    """A root directory with the environment that instructions have set."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
        }
    )
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"

    def run(self, command: str) -> None:
        """Executes a command of the shell in the root.

        Raises:
            subprocess.CalledProcessError: It failed.
        """
        variables = {name: os.environ[name] for name in NETWORK if name in os.environ}
        variables |= {"DEBIAN_FRONTEND": "noninteractive", **self.environment, **self.arguments}
        words = ["chroot", self.root, "/bin/sh", "-c", f"cd {shlex.quote(self.directory)} && {command}"]
        print(f"+ {command}", flush=True)
        subprocess.run(words, env=variables, check=True)

    def copy(self, sources: Sequence[str], destination: str) -> None:
        """Copies files of the repository, and the contents of folders, to `destination` in the root."""
        found = [Path(path) for source in sources for path in glob.glob(str(ROOT / source))]
        if not found:
            raise SystemExit(f"image.py: {sources} is not in the repository; `make wheel` makes dist/*.whl")
        target = self.root / Path(self.directory, destination).relative_to("/")
        for source in found:
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                path = target / source.name if destination.endswith("/") else target
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, path)

    def substituted(self, text: str) -> str:
        """Replaces the variables ``$NAME`` of an instruction."""
        for name, value in (self.environment | self.arguments).items():
            text = text.replace(f"${name}", value)
        return text

    def execute(self, instruction: str, rest: str) -> None:
        """Executes one instruction other than ``FROM``.

        Raises:
            SystemExit: The instruction is none of those that the Containerfiles of this repository use.
        """
        match instruction:
            case "RUN":
                self.run(rest)
            case "COPY":
                *sources, destination = rest.split()
                self.copy(sources, destination)
            case "ARG":
                name, _, value = rest.partition("=")
                self.arguments[name] = value
            case "ENV":
                name, _, value = rest.partition("=")
                self.environment[name] = self.substituted(value)
            case "WORKDIR":
                self.directory = rest
                (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case _:
                raise SystemExit(f"image.py: no meaning of {instruction} is known")


def made_base(base: Base) -> Path:
    """Returns the root of a base, which debootstrap has made."""
    path = BUILD / base.release
    if not path.exists():
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        include = ",".join(["ca-certificates", *base.packages])
        words = ["debootstrap", "--variant=minbase", f"--components={base.components}", f"--include={include}"]
        # Its scripts for the releases of Debian and of Ubuntu are like those of the two names at the end.
        script = "sid" if "debian" in base.mirror else "gutsy"
        done = subprocess.run(
            [*words, base.release, part, base.mirror, script], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"image.py: debootstrap failed:\n{done.stdout[-2000:]}{done.stderr}")
        # As images do, so that installing a service does not start it.
        policy = part / "usr" / "sbin" / "policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        part.rename(path)
    return path


def mount(root: Path) -> None:
    """Shows the root this machine's devices and network. The mounts end with this process's namespace."""
    for name in ("proc", "sys"):
        (root / name).mkdir(exist_ok=True)
    subprocess.run(["mount", "--rbind", "/dev", root / "dev"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", root / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/sys", root / "sys"], check=True)
    for name in FILES_OF_THE_NETWORK:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
        subprocess.run(["mount", "--bind", f"/{name}", root / name], check=True)


def train(image: Image) -> None:
    """Trains on the digits with two ranks, started by ``smdrun`` and by ``mpirun``, and checks what ``ssh`` reads."""
    image.run("sshd -t && ssh -G worker-0 | grep -i '^stricthostkeychecking'")
    image.run("command -v c++ || echo 'no compiler: the wheel has the library of operators'")
    script = "examples/resumable_digits.py"
    image.run(f"OMP_NUM_THREADS=1 smdrun -n 2 {script} --checkpoints /tmp/smdrun")
    image.run(
        f"OMP_NUM_THREADS=1 mpirun --allow-run-as-root --oversubscribe -n 2 python {script} --checkpoints /tmp/mpirun"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("containerfile", type=Path)
    options = parser.parse_args()
    if "IMAGE_MOUNTS" not in os.environ:
        words = ["unshare", "--mount", sys.executable, __file__, str(options.containerfile)]
        raise SystemExit(subprocess.run(words, env=os.environ | {"IMAGE_MOUNTS": "own"}, check=False).returncode)

    lines = [line for line in options.containerfile.read_text().splitlines() if line and not line.startswith("#")]
    (_, name), *instructions = (line.split(maxsplit=1) for line in lines)
    base = made_base(BASES[name])
    root = BUILD / options.containerfile.name
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(["cp", "-a", base, root], check=True)
    mount(root)
    image = Image(root)
    for command in BASES[name].commands:
        image.run(command)
    for instruction, rest in instructions:
        image.execute(instruction, rest)
    train(image)
    print(json.dumps({"image": options.containerfile.name, "passed": True}))


if __name__ == "__main__":
    main()
