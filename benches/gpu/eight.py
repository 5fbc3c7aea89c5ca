"""All comparisons of this folder, one after the other, on all GPUs of a host: made for eight, for four too.

    python benches/gpu/eight.py
    python benches/gpu/eight.py --ranks 4 --parts collectives pipelines --output FOLDER

Each part runs other scripts of this folder, whose texts describe the measurement. A part that fails does not stop the others; the exit code is then 1. With ``--output``, the whole output of each
command is also written to a file of that folder.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def smdrun(ranks: int, command: str) -> list[str]:
    """Returns the command that starts a script of this folder on each rank."""
    script, *options = shlex.split(command)
    return ["smdrun", "-n", str(ranks), str(HERE / script), *options]


def collectives(ranks: int, rounds: int) -> dict[str, list[str]]:
    """All-reduce, reduce-scatter and all-gather, beside NCCL's."""
    command = f"collectives.py --collectives all_reduce reduce_scatter all_gather --rounds {rounds}"
    return {"collectives": smdrun(ranks, command)}


def steps(ranks: int, rounds: int) -> dict[str, list[str]]:
    """Steps of data parallelism, beside torch DDP's variants."""
    cases = "124M:8 350M:8 1.5B:2 hf-llama:4 124M:8:compile 350M:8:compile hf-llama:4:compile"
    return {"steps": smdrun(ranks, f"ddp_step.py --cases {cases} --rounds {rounds} --steps 5")}


def pipelines(ranks: int, rounds: int) -> dict[str, list[str]]:
    """Pipelines with one partition a rank, beside torch's Schedule1F1B."""
    kinds = "interleaved interleaved+graphs zero_bubble zero_bubble+graphs"
    common = f"huggingface.py --families llama gpt2 --pipelines {kinds} --rounds {rounds} --steps 2"
    return {f"pipelines, {count} microbatches": smdrun(ranks, f"{common} --microbatches {count}") for count in (16, 32)}


def bubbles(ranks: int, rounds: int) -> dict[str, list[str]]:
    """The waits of a pipeline as it ran, beside those of its simulation."""
    timeline = Path(tempfile.gettempdir()) / f"timeline-{os.getpid()}.json"
    script = "huggingface.py --families llama --pipelines interleaved+graphs --rounds 1 --steps 1"
    return {
        "timeline": ["env", f"SMD_TIMELINE={timeline}", *smdrun(ranks, script)],
        "report": ["smdrun", "report", str(timeline)],
    }


def layouts(ranks: int, rounds: int) -> dict[str, list[str]]:
    """Tensor, pipeline and sharded data parallelism together, beside `fully_shard` and `parallelize_module`."""
    return {"layouts": smdrun(ranks, f"layouts.py --rounds {rounds}")}


def kills(ranks: int, rounds: int) -> dict[str, list[str]]:
    """A killed rank in each kind of job."""
    return {"kills": [sys.executable, str(HERE / "kills.py"), "--ranks", str(ranks)]}


PARTS = {part.__name__: part for part in (collectives, steps, pipelines, bubbles, layouts, kills)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one command")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in arguments.parts:
        for name, command in PARTS[part](arguments.ranks, arguments.rounds).items():
            print(f"\n== {name}: {shlex.join(command)}", flush=True)
            begin = time.monotonic()
            path = arguments.output / f"{name.replace(', ', '-').replace(' ', '-')}.txt" if arguments.output else None
            text, code = run(command, arguments.limit, path)
            print(text, f"-- {name}: exit code {code} after {time.monotonic() - begin:.0f} s", sep="\n", flush=True)
            if code != 0:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def run(command: list[str], limit: float, path: Path | None) -> tuple[str, int]:
    """Runs a command; returns its output and its exit code, or 124 if the limit was over."""
    env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        # `smdrun` ends its ranks when it is told to stop.
        process.terminate()
        text, code = process.communicate()[0], 124
    if path is not None:
        path.write_text(text)
    return text, code


if __name__ == "__main__":
    sys.exit(main())
