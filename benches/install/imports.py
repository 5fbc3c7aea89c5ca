"""What importing costs, and installing: processor time of fresh processes, which other work on the machine hardly changes.

Usage: imports.py [--rounds 5] [--wheel dist/opensmd-*.whl]

With `--wheel`, also its size, the time to install it into an environment of its own, and the first import of PyTorch's part there
with what the wheel has prebuilt, and with an empty cache and nothing prebuilt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: What is measured, and what was imported before; differences between whole processes would be lost in their spread.
CASES = {
    "collectives": ("import smdistributed.dataparallel.torch.distributed", "import torch"),
    "DDP": (
        "import smdistributed.dataparallel.torch.parallel.distributed",
        "import torch, torch.nn.parallel.distributed",
    ),
}


def seconds(python: Path, code: str, **variables: str) -> tuple[float, float]:
    """Processor time of a process and of what it starts, and the time that passes."""
    given = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    start = time.monotonic()
    process = subprocess.Popen([python, "-c", code], env=given, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"`{code}` failed with status {status}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - start


def beyond(python: Path, code: str, before: str) -> float:
    """Processor time of `code` in a process that has run `before`."""
    timed = f"{before}\nimport time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    return float(subprocess.run([python, "-c", timed], env=given, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    python = Path(sys.executable)
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, (code, before) in CASES.items():
            times[name].append(1e3 * beyond(python, code, before))
    for name, values in times.items():
        spread = f"{min(values):.0f} to {max(values):.0f}"
        print(f"{name}: {statistics.median(values):.0f} ms ({spread}) after `{CASES[name][1]}`", flush=True)
    if options.wheel:
        _install(options.wheel.resolve(), python)


def _install(wheel: Path, python: Path) -> None:
    print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory(prefix="smd-install-") as folder:
        place, cache = Path(folder) / "site", Path(folder) / "cache"
        start = time.monotonic()
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", place, wheel], check=True)
        print(f"pip install: {time.monotonic() - start:.1f} s")
        given = {"PYTHONPATH": str(place), "SMD_CACHE_DIR": str(cache), "CXX": "/no/compiler"}
        code = "import torch, smdistributed.dataparallel.torch.distributed"
        if (place / "smdistributed/_prebuilt").is_dir():
            print("first import, prebuilt: {:.2f} s of processors, {:.2f} s".format(*seconds(python, code, **given)))
            shutil.rmtree(place / "smdistributed/_prebuilt")
        del given["CXX"]
        print("first import, built: {:.2f} s of processors, {:.2f} s".format(*seconds(python, code, **given)))


if __name__ == "__main__":
    main()
