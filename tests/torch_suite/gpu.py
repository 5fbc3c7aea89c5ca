"""Runs PyTorch's own test suite on GPUs, over nccl and over smddp, and compares the outcomes.

    python tests/torch_suite/gpu.py --ranks 2 [--jobs 4] [-k PART] [--backends nccl,smddp]

A test that starts its own processes spends nearly all of its time on imports and on CUDA contexts. So each job here has
`--ranks` processes that run many tests and are replaced when one fails. Every test makes its process group anew, as in
the suite. Jobs of both backends run at the same time. Ends with status 1 if a test that passes over nccl fails over
smddp.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Tests that a backend outside of PyTorch cannot pass, with the reason.
EXCEPTIONS = {
    "test_ddp_logging_data_cpu": "torch's logger calls every backend that is not its own `custom`",
    "test_ddp_profiling_execution_trace": "expects the name `nccl`",
    "test_monitored_barrier_allreduce_hang": "expects the text of NCCL's error",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": "expects the text of NCCL's error",
    "test_nccl_high_priority_stream": "makes a ProcessGroupNCCL itself, and expects its events under the name `smddp`",
}
#: Over nccl, a test of CPU tensors ends with this text on all ranks, before they have run any collective.
WITHOUT_CPU = "No backend type associated with device type cpu"
#: A test that takes longer has failed.
LIMIT_SECONDS = 60.0
#: Limit for imports and for making the CUDA context.
START_SECONDS = 120.0


def worker(rank: int, backend: str, answers: int) -> None:
    """One rank of a job: runs the tests that it reads from standard input and writes their outcomes to `answers`."""
    os.environ["BACKEND"] = "nccl"
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_utils
    from torch.testing._internal.distributed import distributed_test

    skips = {skip.exit_code for skip in distributed_test.TEST_SKIPS.values()}
    if backend == "smddp":
        _use_smddp(dist, distributed_test)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        pass

    torch.zeros(1, device="cuda")
    names = sorted(name for name in dir(Suite) if name.startswith("test_"))
    os.write(answers, (json.dumps({"names": names}) + "\n").encode())
    for line in sys.stdin:
        name, _, store = line.strip().partition(" ")
        test = Suite(name)
        test.rank, test.file_name = rank, store
        # Used by tests that destroy and recreate their process groups.
        os.environ["INIT_METHOD"] = f"file://{store}-again"
        # Some tests set this variable and do not reset it.
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        dist.set_debug_level_from_env()
        outcome, text = "passed", ""
        try:
            seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
            dist.init_process_group(
                backend="nccl",
                init_method=test.init_method,
                world_size=int(test.world_size),
                rank=rank,
                timeout=distributed_test.timedelta(seconds=seconds),
            )
            test._barrier()
            common_utils.set_rng_seed()
            getattr(test, name)()
            test._barrier()
        except distributed_test.unittest.SkipTest as skip:
            outcome, text = "skipped", str(skip)
        except SystemExit as end:
            outcome, text = ("skipped" if end.code in skips else "failed"), f"exit {end.code}"
        except BaseException:
            outcome, text = "failed", traceback.format_exc()
        # After a failure, the process group may be unusable: the job's processes are replaced.
        if (outcome != "failed" or WITHOUT_CPU in text) and dist.is_initialized():
            dist.destroy_process_group()
        torch.cuda.set_device(0)
        os.write(answers, (json.dumps({"outcome": outcome, "text": text}) + "\n").encode())


def _use_smddp(dist, distributed_test) -> None:
    """Makes tests that request nccl get smddp. Whatever depends on the name nccl, such as the device of tensors, stays
    as it is.
    """
    from smdistributed.dataparallel.torch import torch_smddp  # noqa: F401

    def with_smddp(function):
        def call(*args, **kwargs):
            kwargs = {key: "smddp" if value == "nccl" else value for key, value in kwargs.items()}
            return function(*("smddp" if arg == "nccl" else arg for arg in args), **kwargs)

        return call

    for name in ("init_process_group", "new_group"):
        setattr(dist, name, with_smddp(getattr(dist, name)))
    # The suite reads these lists while a test runs, to decide which events it expects in a profile.
    for names in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append("smddp")

    def with_name(test):
        def run(self):
            distributed_test.BACKEND = "smddp"
            try:
                test(self)
            finally:
                distributed_test.BACKEND = "nccl"

        return run

    # These tests check the name itself.
    base = distributed_test.DistributedTest._DistTestBase
    for name in ("test_get_backend", "test_Backend_enum_class"):
        if hasattr(base, name):
            setattr(base, name, with_name(getattr(base, name)))


class Job:
    """A group of ranks that runs one test after the other."""

    def __init__(self, backend: str, ranks: int, devices: list[int], log: Path) -> None:
        self.backend, self.ranks, self.devices, self.log = backend, ranks, devices, log
        self.processes: list[subprocess.Popen] = []

    def start(self) -> list[str]:
        """Starts the ranks; returns the names of all tests."""
        self.folder = tempfile.TemporaryDirectory(prefix="torch-suite-")
        for part in ("barrier", "test_dir", "init_dir"):
            Path(self.folder.name, part).mkdir()
        self.tests = 0
        self.pipes, self.processes = [], []
        for rank in range(self.ranks):
            read, write = os.pipe()
            environment = {
                **os.environ,
                "WORLD_SIZE": str(self.ranks),
                "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices)),
                "TEMP_DIR": self.folder.name,
                "MASTER_ADDR": "127.0.0.1",
            }
            environment.setdefault("OMP_NUM_THREADS", "1")
            command = [
                sys.executable,
                __file__,
                "--worker",
                str(rank),
                "--backends",
                self.backend,
                "--answers",
                str(write),
            ]
            with self.log.open("a") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, pass_fds=[write], text=True
                )
            os.close(write)
            self.processes.append(process)
            self.pipes.append(os.fdopen(read))
        answers = self._answers(START_SECONDS)
        if any(answer is None for answer in answers):
            text = self.log.read_text()[-3000:]
            self.stop()
            raise RuntimeError(f"the ranks of the suite did not start: {text}")
        return answers[0]["names"]

    def run(self, name: str) -> tuple[str, str]:
        """Returns the outcome of a test and the texts of its ranks."""
        if not self.processes:
            self.start()
        self.tests += 1
        for process in self.processes:
            try:
                process.stdin.write(f"{name} {self.folder.name}/store-{self.tests}\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass
        answers = self._answers(LIMIT_SECONDS)
        outcomes = {answer["outcome"] if answer else "failed" for answer in answers}
        texts = [f"rank {rank}: {answer['text'] if answer else 'no answer'}" for rank, answer in enumerate(answers)]
        if "failed" in outcomes or len(outcomes) > 1:
            if not all(WITHOUT_CPU in text for text in texts):
                self.stop()
            return "failed", "\n".join(texts)
        return outcomes.pop(), texts[0]

    def stop(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
        for pipe in self.pipes:
            pipe.close()
        self.processes = []
        self.folder.cleanup()

    def _answers(self, seconds: float) -> list[dict | None]:
        answers: list[dict | None] = [None] * self.ranks
        deadline = time.monotonic() + seconds
        waiting = {pipe.fileno(): rank for rank, pipe in enumerate(self.pipes)}
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for pipe in select.select(list(waiting), [], [], remaining)[0]:
                rank = waiting.pop(pipe)
                line = self.pipes[rank].readline()
                answers[rank] = json.loads(line) if line else None
                if answers[rank] is None or answers[rank].get("outcome") == "failed":
                    # The other ranks may wait for this one; they get 5 s more.
                    deadline = min(deadline, time.monotonic() + 5)
        return answers


def run(backend: str, arguments: argparse.Namespace) -> dict[str, tuple[str, str, float]]:
    """Returns the outcome, text and seconds of every test."""
    devices = list(range(arguments.devices))
    sets = [devices[at : at + arguments.ranks] for at in range(0, len(devices) - arguments.ranks + 1, arguments.ranks)]
    remaining: queue.Queue[str] = queue.Queue()
    found: dict[str, tuple[str, str, float]] = {}
    names_known = threading.Event()

    def serve(at: int) -> None:
        job = Job(backend, arguments.ranks, sets[at % len(sets)], arguments.log / f"{backend}-{at}.log")
        names = job.start()
        if at == 0:
            for name in names:
                if not arguments.part or any(part in name for part in arguments.part.split(",")):
                    remaining.put(name)
            names_known.set()
        names_known.wait()
        while time.monotonic() < arguments.deadline:
            try:
                name = remaining.get_nowait()
            except queue.Empty:
                break
            start = time.monotonic()
            found[name] = (*job.run(name), time.monotonic() - start)
        if job.processes:
            job.stop()

    errors: list[BaseException] = []

    def serve_and_keep_errors(at: int) -> None:
        try:
            serve(at)
        except BaseException as error:
            errors.append(error)
        finally:
            names_known.set()

    threads = [threading.Thread(target=serve_and_keep_errors, args=(at,)) for at in range(arguments.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each test, each with a GPU of its own")
    parser.add_argument("--devices", type=int, help="GPUs to use; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="tests of each backend that run at the same time")
    parser.add_argument("--backends", default="nccl,smddp")
    parser.add_argument("-k", dest="part", help="run only tests with one of these parts (a,b,c) in their name")
    parser.add_argument("--seconds", type=float, default=3600, help="start no test after this time")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()), help="folder for the output of ranks")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker, arguments.backends, arguments.answers)
        return
    if arguments.devices is None:
        import torch

        arguments.devices = torch.cuda.device_count()
    if arguments.devices < arguments.ranks:
        parser.error(f"{arguments.ranks} ranks need as many GPUs: there are {arguments.devices}")
    start = time.monotonic()
    arguments.deadline = start + arguments.seconds
    backends = arguments.backends.split(",")
    with ThreadPoolExecutor(len(backends)) as pool:
        found = dict(zip(backends, pool.map(lambda backend: run(backend, arguments), backends), strict=True))
    for backend, outcomes in found.items():
        kinds = [outcome for outcome, _, _ in outcomes.values()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("passed", "skipped", "failed"))
        print(f"{backend}, {arguments.ranks} ranks: {counts}; {time.monotonic() - start:.0f} s", flush=True)
    reference = found.get("nccl", {})
    worse = 0
    for name, (outcome, text, seconds) in sorted(found.get("smddp", {}).items()):
        wanted = reference.get(name, ("passed",))[0]
        if outcome == "passed" or wanted != "passed" or (outcome == "skipped" and not reference):
            continue
        known = EXCEPTIONS.get(name)
        worse += known is None
        print(f"  {name}: {outcome} after {seconds:.0f} s" + (f" (known: {known})" if known else f"\n{text}"))
    for name, (outcome, text, _) in sorted(reference.items()):
        if outcome == "failed":
            errors = [line for line in text.splitlines() if "Error" in line or "no answer" in line]
            print(f"  over nccl: {name}: {(errors or [text])[-1].strip()}")
    passing = [name for name, (outcome, _, _) in reference.items() if outcome == "passed"]
    both = sum(found.get("smddp", {}).get(name, ("",))[0] == "passed" for name in passing)
    print(f"of {len(passing)} that pass over nccl, {both} pass over smddp", flush=True)
    (arguments.log / "suite.json").write_text(json.dumps(found))
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
