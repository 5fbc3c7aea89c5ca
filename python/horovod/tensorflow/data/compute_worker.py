"""The process of a job that prepares data: ``python -m horovod.tensorflow.data.compute_worker CONFIG``."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

from horovod.runner.common.service.compute_service import ComputeService
from horovod.runner.common.util import secret
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.network import NoValidAddressesFound
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn

#: Seconds between checks for a service that another process will start.
_POLL_SECONDS = 0.2


def main(dispatchers: int, dispatcher_side: str, filename: str, timeout: int) -> None:
    """Run one process of the job until the training is done. The first one writes a file that describes the service.

    Args:
        dispatchers: Number of dispatchers.
        dispatcher_side: ``compute`` or ``training``.
        filename: The file, which all processes of both jobs can read; it is removed at the end.
        timeout: Longest wait for dispatchers and workers, in seconds.

    Raises:
        ValueError: The number of processes is not a multiple of the number of dispatchers.
    """
    index, size = get_env_rank_and_size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(f"Number of processes ({size}) must be a multiple of number of dispatchers ({dispatchers})")
    if index != 0:
        compute_worker_fn(_service_that_answers(filename, timeout))
        return
    with contextlib.suppress(FileNotFoundError):
        # The file may be from a job that was killed.
        os.unlink(filename)
    key = secret.make_secret_key()
    service = ComputeService(dispatchers, size // dispatchers, key)
    try:
        config = TfDataServiceConfig(
            dispatchers, size // dispatchers, dispatcher_side, service.addresses(), key, timeout
        )
        config.write(filename)
        compute_worker_fn(config)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(filename)
        service.shutdown()


def _service_that_answers(filename: str, seconds: float) -> TfDataServiceConfig:
    """Return the file's service; wait if the file is from an earlier job, which was killed."""
    end = time.monotonic() + seconds
    while True:
        config = TfDataServiceConfig.read(filename, wait_for_file_creation=True)
        try:
            config.compute_client()
        except NoValidAddressesFound:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return config


def run_commandline(argv: Sequence[str] | None = None) -> None:
    """Run :func:`main` with the arguments of the command line.

    Args:
        argv: The arguments; by default those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m horovod.tensorflow.data.compute_worker", description=__doc__)
    parser.add_argument(
        "configfile", help="file that the first process writes, and that the other processes and the training job read"
    )
    parser.add_argument(
        "--dispatchers",
        type=int,
        default=1,
        help="number of dispatchers, over which the worker processes are spread evenly",
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=("training", "compute"),
        default="compute",
        help="the job that runs the dispatchers",
    )
    parser.add_argument("--timeout", type=int, default=60, help="timeout for dispatchers and workers, in seconds")
    args = parser.parse_args(argv)
    main(args.dispatchers, args.dispatcher_side, args.configfile, args.timeout)


if __name__ == "__main__":
    # Launchers end their jobs with this signal; the file must be removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    run_commandline()
