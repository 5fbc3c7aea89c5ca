"""Metrics of ranks: for Prometheus in a file and over HTTP, in `smdrun --summary`, `smdrun top` and `smdrun doctor`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from smdistributed import _core
from smdistributed._launch.doctor import REMEDIES
from support.launchers import clean_environment, free_port

pytest.importorskip("torch", reason="PyTorch is not installed")

GUIDE = Path(__file__).parents[3] / "docs/guides/metrics.md"
SMDRUN = [sys.executable, "-m", "smdistributed"]
STEPS, DELAY = 6, 0.3

#: Rank 1 is slow. If HOLD is set to a folder, all ranks wait after half of the steps until the folder has a file `go`.
TRAINING = f"""
import os, pathlib, time, torch, torch.distributed as dist
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp")
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(64, 64))
held = os.environ.get("HOLD")
for step in range({STEPS}):
    if dist.get_rank() == 1:
        time.sleep({DELAY})
    model(torch.ones(2, 64)).sum().backward()
    if held and step == {STEPS} // 2:
        dist.barrier()
        pathlib.Path(held, str(dist.get_rank())).touch()
        while not pathlib.Path(held, "go").exists():
            time.sleep(0.01)
dist.all_reduce(torch.ones(1024))
dist.destroy_process_group()
"""

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="[^"\\\n]*",?)+)\} (\d+(?:\.\d+)?)')


def parsed(text):
    """Returns the samples by name and labels; asserts that each line is valid in Prometheus' text format."""
    samples, kinds = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            assert kind in ("counter", "gauge")
            assert name.endswith("_total") == (kind == "counter")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            # The samples of a metric follow its TYPE line.
            assert list(kinds)[-1] == name
            found = tuple(sorted(re.findall(r'([a-z]+)="([^"]*)"', labels)))
            assert (name, found) not in samples, "duplicate sample"
            samples[name, found] = float(value)
    return samples


def one(samples, name, **labels):
    wanted = {(label, str(value)) for label, value in labels.items()}
    found = [value for (known, each), value in samples.items() if known == name and wanted <= set(each)]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def command(tmp_path, *options):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    return [*SMDRUN, "-n", "2", *options, str(script)]


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_metrics_and_summary_name_the_slow_rank(tmp_path):
    path = tmp_path / "smd.prom"
    environment = {**clean_environment(), "SMD_METRICS": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(tmp_path, "--summary"), env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir() if "tmp" in each.name] == []
    samples = parsed(path.read_text())
    least = STEPS * DELAY * 0.8
    for rank in range(2):
        assert one(samples, "smd_steps_total", rank=rank, size=2, of="reducer") == STEPS
        assert one(samples, "smd_operations_total", rank=rank, operation="all_reduce") >= STEPS
        # In each step a bucket with the 64 x 64 weight and the bias; in the end a tensor of 1024 float32.
        assert one(samples, "smd_bytes_total", rank=rank, operation="all_reduce") >= STEPS * 4 * 65 * 64 + 4096
        assert one(samples, "smd_stalls_total", rank=rank) == 0
        assert one(samples, "smd_fallbacks_total", rank=rank, reason="synchronous_call") == 0
        assert one(samples, "smd_segment_bytes", rank=rank) > 0
    assert one(samples, "smd_exposed_seconds_total", rank=0) > least
    assert one(samples, "smd_communication_seconds_total", rank=0) > least
    assert one(samples, "smd_waited_seconds_total", rank=0, peer=1) > least
    assert one(samples, "smd_exposed_seconds_total", rank=1) < least / 2

    assert re.search(rf"^smdrun: rank 0: {STEPS} steps, ", done.stderr, re.MULTILINE), done.stderr
    slowest = re.search(r"^smdrun: slowest: rank 1; the others waited (\d+\.\d) s for it$", done.stderr, re.MULTILINE)
    assert slowest, done.stderr
    assert float(slowest[1]) > least


@pytest.mark.timeout(120)
def test_http_and_top_show_a_running_job(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    environment = clean_environment() | {"SMD_METRICS": address, "HOLD": str(tmp_path), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command(tmp_path), env=environment)
    try:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), job)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            samples = parsed(answer.read().decode())
        steps = STEPS // 2 + 1
        assert one(samples, "smd_steps_total", rank=1, of="reducer") == steps
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/other", timeout=10)

        top = [*SMDRUN, "top", "--once", "--interval", "0.2"]
        mine = subprocess.run([*top, str(job.pid)], env=clean_environment(), capture_output=True, text=True, check=True)
        title, head, *ranks = mine.stdout.splitlines()
        assert re.fullmatch(r"job [0-9a-f]+: 2 of 2 ranks on this host", title)
        assert head.split()[:4] == ["rank", "pid", "steps", "steps/s"]
        assert [line.split()[0] for line in ranks] == ["0", "1"]
        assert [line.split()[2] for line in ranks] == [str(steps)] * 2
        # No rank is in a collective.
        assert [line.split()[-1] for line in ranks] == ["-", "-"]
        other = subprocess.run(
            [*top, "999999999"], env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert other.returncode == 2
        assert "process 999999999 is not a rank, or the launcher of a rank, of a job" in other.stderr
        (tmp_path / "go").touch()
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()


@pytest.mark.timeout(60)
def test_top_shows_for_which_rank_a_rank_waits(tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, pathlib, time, torch, torch.distributed as dist\n"
        "import smdistributed.dataparallel.torch.torch_smddp\n"
        'dist.init_process_group("smddp")\n'
        "if dist.get_rank() == 1:\n"
        '    while not pathlib.Path(os.environ["HOLD"], "go").exists(): time.sleep(0.01)\n'
        "dist.all_reduce(torch.ones(4))\n"
    )
    job = subprocess.Popen([*SMDRUN, "-n", "2", str(script)], env=clean_environment() | {"HOLD": str(tmp_path)})
    top = [*SMDRUN, "top", "--once", "--interval", "0.2", str(job.pid)]

    def is_shown():
        shown = subprocess.run(top, env=clean_environment(), capture_output=True, text=True, check=False).stdout
        return [line.split()[8:] for line in shown.splitlines()[2:]] == [["rank", "1"], ["-"]]

    try:
        wait_for(is_shown, job)
        (tmp_path / "go").touch()
        assert job.wait(30) == 0
    finally:
        job.kill()
        job.wait()


@pytest.mark.timeout(60)
def test_doctor_shows_the_slower_paths_of_a_running_job(tmp_path):
    script = tmp_path / "copies.py"
    script.write_text(
        "import os, pathlib, time, torch, torch.distributed as dist\n"
        "import smdistributed.dataparallel.torch.torch_smddp\n"
        'dist.init_process_group("smddp")\n'
        "for _ in range(3): dist.all_reduce(torch.ones(1024, 512).t())\n"
        'pathlib.Path(os.environ["HOLD"], str(dist.get_rank())).touch()\n'
        'while not pathlib.Path(os.environ["HOLD"], "go").exists(): time.sleep(0.01)\n'
    )
    job = subprocess.Popen([*SMDRUN, "-n", "2", str(script)], env=clean_environment() | {"HOLD": str(tmp_path)})
    doctor = [*SMDRUN, "doctor", "--job"]
    try:
        wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), job)
        fallbacks = {reason for _, _, counts in _core.running_fallbacks(job.pid) for reason, _ in counts}
        assert fallbacks == set(REMEDIES)
        assert all(f"`{reason}`" in GUIDE.read_text() for reason in fallbacks)
        shown = subprocess.run([*doctor, str(job.pid)], env=clean_environment(), capture_output=True, text=True)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert re.search(r"^ok  job [0-9a-f]+ +2 rank\(s\) on this host$", shown.stdout, re.MULTILINE), shown.stdout
        found = re.search(r"^--  copied_tensor +6 times, on rank\(s\) 0, 1\n +-> (.*)$", shown.stdout, re.MULTILINE)
        assert found, shown.stdout
        assert "pass contiguous tensors" in found[1]
        assert "synchronous_call" not in shown.stdout
        other = subprocess.run([*doctor, "999999999"], env=clean_environment(), capture_output=True, text=True)
        assert other.returncode == 1
        assert "no rank of this user that process 999999999 started or is runs on this host" in other.stdout
        (tmp_path / "go").touch()
        assert job.wait(30) == 0
    finally:
        job.kill()
        job.wait()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["no/such/folder/smd.prom", "no.such.host.invalid:9100"])
def test_an_unusable_destination_is_an_error(tmp_path, where):
    environment = clean_environment() | {"SMD_METRICS": where}
    done = subprocess.run(command(tmp_path), env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert f"cannot publish metrics at `{where}` (SMD_METRICS)" in done.stderr
    assert not Path(tmp_path, "no").exists()
