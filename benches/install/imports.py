"""Processor time of imports, and time to install a wheel.

Usage: imports.py [--rounds 5] [--wheel dist/opensmd-*.whl]

Each import runs in a fresh process. Processor time hardly depends on other load on the machine. With `--wheel`, also
prints the wheel's size, the time to install it into an empty folder, and the time of the first import of its PyTorch
part: once with the prebuilt shims, and once with an empty cache and no prebuilt shims.
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

#: The import that is measured, and the code that runs before it. The time is taken within one process, because
#: processes vary more than the difference.
CASES = {
    "collectives": ("import smdistributed.dataparallel.torch.distributed", "import torch"),
    "DDP": (
        "import smdistributed.dataparallel.torch.parallel.distributed",
        "import torch, torch.nn.parallel.distributed",
    ),
}


def seconds(python: Path, code: str, **variables: str) -> tuple[float, float]:
    """Returns the processor time of a process with its children, and its wall time."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    start = time.monotonic()
    process = subprocess.Popen([python, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"`{code}` failed with status {status}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - start


def processor_time_after(python: Path, code: str, before: str) -> float:
    """Returns the processor time of `code` in a process that has run `before`."""
    timed = f"{before}\nimport time\nstart = time.process_time()\n{code}\nprint(time.process_time() - start)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return float(subprocess.run([python, "-c", timed], env=environment, stdout=subprocess.PIPE, check=True).stdout)


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
            times[name].append(1e3 * processor_time_after(python, code, before))
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
        environment = {"PYTHONPATH": str(place), "SMD_CACHE_DIR": str(cache), "CXX": "/no/compiler"}
        code = "import torch, smdistributed.dataparallel.torch.distributed"
        if (place / "smdistributed/_prebuilt").is_dir():
            print(
                "first import, prebuilt: {:.2f} s of processors, {:.2f} s".format(*seconds(python, code, **environment))
            )
            shutil.rmtree(place / "smdistributed/_prebuilt")
        del environment["CXX"]
        print("first import, built: {:.2f} s of processors, {:.2f} s".format(*seconds(python, code, **environment)))


if __name__ == "__main__":
    main()
