"""Waits for the end of processes whose output goes to a pipe, and for the errors of ranks that train until a step raises.

output = output_of(process, 60)

script = write_training(folder)                 # the Python file for a launcher
wait_until_ranks_train(folder, 3, job)          # or, with two ranks, check_a_cut(cluster, folder, job)
network.cut(2)
check_errors(folder, {0: [2], 1: [2], 2: [0, 1]}, time.time())

Ranks write their errors to files. What they print may be lost with the link of their host, or because their launcher ends first.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import forks

#: Silence after which a host counts as gone, and the longest time until the error of a rank, in seconds.
SILENCE_SECONDS, NOTICE_SECONDS = 3, 10.0
#: Variables of the ranks.
VARIABLES = {"SMD_PEER_TIMEOUT_SECONDS": str(SILENCE_SECONDS)}

_TRAINING = """
import itertools, os, time
import torch
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP

def write(name, text):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.{dist.get_rank()}")
    with open(f"{path}.partial", "w") as file:
        file.write(text)
    os.rename(f"{path}.partial", path)

if not dist.is_initialized():
    dist.init_process_group()
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(4, 8)
try:
    for step in itertools.count():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step == 10:
            write("training", str(os.getpid()))
        time.sleep(0.01)
except Exception as error:
    write("error", f"{time.time()} {type(error).__name__}: {error}")
    raise
"""


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Waits for the end of a process; returns its standard output.

    Args:
        process: A process whose standard output is a pipe of text.
        seconds: The longest wait on an idle machine; `--patience` multiplies it.

    Raises:
        AssertionError: The process has not ended in time, or with an exit status other than 0. The text contains what it has printed.
    """
    seconds *= forks.patience
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        # Bytes, even of a pipe of text. The pipe is not read to its end: children of the process may hold it open.
        printed = (error.output or b"").decode(errors="replace")
        raise AssertionError(f"{process.args} still runs after {seconds:.0f} s. It has printed:\n{printed}") from None
    assert process.returncode == 0, output
    return output


def write_training(folder: Path) -> Path:
    """Writes the script. The files of its ranks will lie beside it."""
    path = folder / "train_until_an_error.py"
    path.write_text(_TRAINING)
    return path


def wait_until_ranks_train(folder: Path, size: int, job: subprocess.Popen[str], seconds: float = 120.0) -> None:
    """Waits until all ranks of a job have trained some steps."""
    deadline = time.monotonic() + seconds * forks.patience
    while not all((folder / f"training.{rank}").exists() for rank in range(size)):
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline, f"not all of {size} ranks train"
        time.sleep(0.05)


def check_errors(folder: Path, named: Mapping[int, Sequence[int]], since: float) -> None:
    """Waits until ranks have written their errors, and checks that each came in time and names the right rank.

    Args:
        folder: The folder of the script.
        named: By rank: the ranks of which the error names one as dead.
        since: Time of the fault, in seconds of `time.time`.
    """
    files = {rank: folder / f"error.{rank}" for rank in named}
    deadline = time.monotonic() + 3 * NOTICE_SECONDS
    while not all(file.exists() for file in files.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    texts = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
    for rank, others in named.items():
        assert re.search(rf"rank (?:{'|'.join(map(str, others))}) died", texts[rank]), texts
    seconds = {rank: float(text.split()[0]) - since for rank, text in texts.items()}
    assert max(seconds.values()) < NOTICE_SECONDS, texts


def check_a_cut(cluster: Any, folder: Path, job: subprocess.Popen[str]) -> str:
    """Cuts the link of the second host of a job of two ranks that train, and checks that each names the other one.

    Args:
        cluster: The engine that runs the job; its `cut` cuts the link of a host.
        folder: The folder of the script.
        job: What has started the ranks. It ends within 200 s after the errors.

    Returns:
        What the job has printed.
    """
    try:
        wait_until_ranks_train(folder, 2, job)
        pids = [(folder / f"training.{rank}").read_text() for rank in range(2)]
        assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in pids}) == 2
        cluster.cut(1)
        check_errors(folder, {0: [1], 1: [0]}, time.time())
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
        job.wait()
    return output
