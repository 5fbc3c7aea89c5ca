"""Compares collectives on one host with Open MPI and gloo, whose rounds alternate in one run.

    python benches/collectives/compare.py [--ranks 2 4] [--rounds 3] [--only all_reduce] [--without gloo]

Each figure is the time of one call on the slowest rank: the median over all repeats of all rounds, followed by the 10th
and 90th percentiles. Ours makes up to 200 calls before, in which it chooses by measurement. `all_reduce_after_work` is an all-reduce after 2 ms of other work on each rank. Before the tables
stand the processor and the time that a cache line takes from one core to another and back, which says whether they
share a cache. Needs cargo, or `--program`; Open MPI needs `mpicc` and `mpirun`, and gloo needs PyTorch. A library that
is missing is left out, with a message.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KIB, MIB = 1 << 10, 1 << 20
TIME_LIMIT_SECONDS = 170
ALL_REDUCE = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB]
CASES = {
    "all_reduce": ALL_REDUCE,
    "all_reduce_after_work": [16 * KIB, MIB, 4 * MIB, 25 * MIB],
    "all_gather": [MIB, 25 * MIB],
    "broadcast": [MIB, 25 * MIB],
    "barrier": [0],
}
OWN_CASES = {"window": [MIB, 25 * MIB, 80 * MIB], "memory": [256 * MIB]}

Key = tuple[str, int]
Times = dict[Key, list[float]]


def case(name: str, size: int, repeats: int) -> str:
    """The measurement as an argument of the programs. Small operations are timed many at a time."""
    calls = max(1, min(50 if name == "all_reduce_after_work" else 500, (4 * MIB) // max(size, KIB)))
    return f"{name}:{size}:{repeats}:{calls}"


def parse(output: str) -> Times:
    times: Times = {}
    for line in output.splitlines():
        name, size, *seconds = line.split()
        times[name, int(size)] = [float(second) for second in seconds]
    return times


def finish(processes: list[subprocess.Popen[str]], what: str) -> str:
    """Waits for all ranks; returns the output of the first."""
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit(f"{what} failed: exit codes {[process.returncode for process in processes]}")
    return outputs[0]


def run_ranks(command: list[str], size: int, cases: list[str]) -> Times:
    """Starts one process for each rank, with the variables of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        processes.append(subprocess.Popen([*command, *cases], env=env, text=True, stdout=subprocess.PIPE))
    return parse(finish(processes, command[-1]))


def run_mpi(program: Path, size: int, cases: list[str]) -> Times:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(size), str(program), *cases]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    return parse(finish([process], "mpirun"))


def build(folder: Path, built: Path | None) -> tuple[list[str], Path | None]:
    """Builds the Rust program, unless it is given, and, if Open MPI is installed, the MPI program."""
    if built is None:
        subprocess.run(
            ["cargo", "build", "--release", "-q", "-p", "smd-core", "--example", "collectives"], cwd=ROOT, check=True
        )
        built = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/examples/collectives"
    own = [str(built)]
    if not (shutil.which("mpicc") and shutil.which("mpirun")):
        print("Open MPI is left out: no `mpicc` and `mpirun` (Debian: openmpi-bin, libopenmpi-dev)")
        return own, None
    program = folder / "open_mpi"
    subprocess.run(["mpicc", "-O3", "-o", str(program), str(HERE / "open_mpi.c")], check=True)
    return own, program


def has_torch() -> bool:
    if subprocess.run([sys.executable, "-c", "import torch.distributed"], capture_output=True).returncode == 0:
        return True
    print("gloo is left out: PyTorch is not installed")
    return False


def processor() -> str:
    """The processor's name, its number of cores and its caches, each with the number of cores that share it."""
    names = [line.split(":")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    caches = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size, shared = (
            (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        if kind != "Instruction":
            caches.append(f"L{level} {size} of CPUs {shared}")
    return f"{names[0].strip() if names else platform.machine()}, {os.cpu_count()} cores; {', '.join(caches)}"


def size_name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size else "-"


def time_name(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def spread_name(times: list[float] | None, quantile: float) -> str:
    """The figure, followed by the 10th and 90th percentiles."""
    if not times:
        return "-"
    ordered = sorted(times)
    ends = [time_name(ordered[round(share * (len(ordered) - 1))]) for share in (0.1, 0.9)]
    return f"{time_name(pick(times, quantile))} ({' to '.join(ends)})"


def pick(times: list[float], quantile: float) -> float:
    return statistics.median(times) if quantile == 0.5 else sorted(times)[int(quantile * len(times))]


def report(size: int, results: dict[str, dict[Key, list[float]]], quantile: float) -> None:
    figure = {library: {key: pick(times, quantile) for key, times in of.items()} for library, of in results.items()}
    ours = figure["ours"]
    memory_bytes = OWN_CASES["memory"][0]
    limit = None
    if ("memory", memory_bytes) in ours:
        limit = 2 * size * memory_bytes / ours["memory", memory_bytes]
        print(f"\n{size} processes; memory moves {limit / 1e9:.1f} GB/s in all\n")
    print("| collective | size | ours | Open MPI | gloo | MPI / ours | gloo / ours | of the memory limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, bytes_), own in ours.items():
        if name == "memory":
            continue
        key = (name, bytes_)
        others = [figure.get(library, {}).get(key) for library in ("mpi", "gloo")]
        ratios = [f"{other / own:.2f}" if other else "-" for other in others]
        # Bytes that must at least be read and written: each rank reads and writes each byte once. In an all-gather, it
        # reads one part and writes all.
        moved = {
            "all_reduce": 2 * size,
            "all_reduce_after_work": 2 * size,
            "window": 2 * size,
            "broadcast": size,
            "all_gather": size * (size + 1),
        }.get(name)
        share = f"{moved * bytes_ / own / limit:.0%}" if moved and limit and bytes_ >= 25 * MIB else "-"
        times = [spread_name(results.get(library, {}).get(key), quantile) for library in ("ours", "mpi", "gloo")]
        print("| " + " | ".join([name, size_name(bytes_), *times, *ratios, share]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9, help="repeats in each round")
    parser.add_argument("--only", nargs="+", default=[*CASES, *OWN_CASES], choices=[*CASES, *OWN_CASES])
    parser.add_argument("--program", type=Path, help="rust-core/examples/collectives.rs, built elsewhere")
    parser.add_argument("--without", nargs="+", default=[], choices=["mpi", "gloo"])
    parser.add_argument(
        "--quantile",
        type=float,
        default=0.5,
        help="0.1 shows the speed of the code on a machine that is busy with other work",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own, mpi = build(Path(folder), arguments.program)
        gloo = has_torch() if "gloo" not in arguments.without else False
        print(processor())
        lines = []
        for size in arguments.ranks:
            results: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
            for _ in range(arguments.rounds):
                lines += run_ranks(own, 1, ["line:0:3:20000"])["line", 0]
                for library, times in run_round(size, own, mpi, gloo, arguments):
                    for key, seconds in times.items():
                        results[library][key] += seconds
            report(size, results, arguments.quantile)
        print(f"\nA cache line from core to core and back: {spread_name(lines, 0.5)}")


def run_round(
    size: int, own: list[str], mpi: Path | None, gloo: bool, arguments: argparse.Namespace
) -> Iterator[tuple[str, Times]]:
    """Runs one round of each library, one after the other."""

    def cases(table: dict[str, list[int]], repeats: int) -> list[str]:
        names = [name for name in table if name in arguments.only]
        return [case(name, bytes_, repeats) for name in names for bytes_ in table[name]]

    yield "ours", run_ranks(own, size, cases(CASES | OWN_CASES, arguments.repeats))
    if mpi and "mpi" not in arguments.without:
        yield "mpi", run_mpi(mpi, size, cases(CASES, arguments.repeats))
    if gloo:
        # gloo is slow, so it has fewer repeats.
        command = [sys.executable, str(HERE / "gloo.py")]
        yield "gloo", run_ranks(command, size, cases(CASES, max(3, arguments.repeats // 3)))


if __name__ == "__main__":
    main()
