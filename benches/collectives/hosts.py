"""Compares all-reduces between hosts: OpenSMD's over TCP, over TCP with `SMD_TRUSTED_NETWORK=1` and over
MPI, Open MPI's own, gloo's, and the time of the bytes alone through plain sockets.

    python benches/collectives/hosts.py [--hosts 2] [--per-host 2] [--rounds 3]

The candidates run one after another in each round. The hosts are network namespaces of this machine
(`tests/support/hosts`): packets pass through its memory, which takes processor time that a real network does not. Each
figure is the median, over all repeats of all rounds, of the time of one call on the slowest rank, with the 10th and the
90th percentile. Needs root and PyTorch, and Open MPI for the column of MPI.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests")]

import compare  # noqa: E402

from support import hosts as support_hosts  # noqa: E402

SIZES = [4 * compare.KIB, 64 * compare.KIB, compare.MIB, 4 * compare.MIB, 25 * compare.MIB]


def run(starts: list[tuple[list[str], dict[str, str]]], what: str) -> compare.Times:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=environment | own, text=True, stdout=subprocess.PIPE) for command, own in starts
    ]
    return compare.parse(compare.finish(processes, what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20, help="repeats per round; the first ones contain trials")
    parser.add_argument("--without", nargs="+", default=[], choices=["mpi", "gloo", "trusted", "sockets"])
    arguments = parser.parse_args()
    if reason := support_hosts.missing_network():
        sys.exit(f"cannot create the hosts: {reason}")
    size = arguments.hosts * arguments.per_host
    program = str(HERE / "ours.py")
    cases = [compare.case("all_reduce", bytes_, arguments.repeats) for bytes_ in SIZES]
    with support_hosts.Hosts(arguments.hosts) as hosts, tempfile.TemporaryDirectory() as folder:
        build = Path(folder)
        by_hand = hosts.by_hand()
        candidates = {"TCP": lambda: run(by_hand.starts(size, [program, *cases]), "ours over TCP")}
        if "trusted" not in arguments.without:
            trusted = hosts.by_hand(own={rank: {"SMD_TRUSTED_NETWORK": "1"} for rank in range(size)})
            candidates["TCP, trusted"] = lambda: run(trusted.starts(size, [program, *cases]), "ours over TCP, trusted")
        if "mpi" not in arguments.without and support_hosts.missing() is None:
            passed_on = [word for variable in ("PYTHONPATH", "OMP_NUM_THREADS") for word in ("-x", variable)]
            mpirun = hosts.command(size, passed_on)
            candidates["MPI"] = lambda: run([([*mpirun, program, *cases], {})], "ours over MPI")
            peer = build / "open_mpi"
            subprocess.run(["mpicc", "-O3", "-o", str(peer), str(HERE / "open_mpi.c")], check=True)
            # Without the Python interpreter at its end.
            candidates["Open MPI"] = lambda: run([([*mpirun[:-1], str(peer), *cases], {})], "Open MPI")
        if "gloo" not in arguments.without:
            interface = {"GLOO_SOCKET_IFNAME": "eth0"}
            starts = by_hand.starts(size, [str(HERE / "gloo.py"), *cases])
            candidates["gloo"] = lambda: run([(command, own | interface) for command, own in starts], "gloo")
        if "sockets" not in arguments.without:
            sockets = [str(HERE / "sockets.py"), str(arguments.hosts), support_hosts.address(0)]
            plain = by_hand.starts(size, [*sockets, *cases])
            candidates["sockets"] = lambda: run(
                [(command, own | {"GLOO_SOCKET_IFNAME": "eth0"}) for command, own in plain], "plain sockets"
            )
        results: dict[str, dict[compare.Key, list[float]]] = defaultdict(lambda: defaultdict(list))
        for _ in range(arguments.rounds):
            for name, measure in candidates.items():
                for key, times in measure().items():
                    results[name][key] += times
    print(f"\n{size} processes on {arguments.hosts} hosts\n")
    print(
        "| all-reduce | "
        + " | ".join(name if name in ("Open MPI", "gloo", "sockets") else f"ours over {name}" for name in candidates)
        + " | gloo / TCP | Open MPI / MPI |"
    )
    print("| --- |" + " --- |" * (len(candidates) + 2))
    for bytes_ in SIZES:
        key = ("all_reduce", bytes_)
        times = [compare.spread_name(results[name][key], 0.5) for name in candidates]
        median = {name: compare.pick(results[name][key], 0.5) for name in candidates}
        ratios = [
            f"{median[other] / median[ours]:.2f}" if other in median else "-"
            for other, ours in (("gloo", "TCP"), ("Open MPI", "MPI"))
        ]
        print("| " + " | ".join([compare.size_name(bytes_), *times, *ratios]) + " |")


if __name__ == "__main__":
    main()
