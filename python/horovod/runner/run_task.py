"""The process of a job of :func:`horovod.run`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.util.peers import connect

try:
    import cloudpickle as pickle
except ImportError:
    import pickle

#: Seconds to wait for the caller's answer to a result, which is immediate unless the caller has ended.
_ACK_TIMEOUT = 300


def _rank() -> int:
    """Return the last rank that this process had, because ranks change in elastic jobs."""
    from horovod.common import basics

    return get_env_rank_and_size()[0] if basics.last_rank is None else basics.last_rank


def _pickled(rank: int, succeeded: bool, outcome: Any) -> bytes:
    try:
        return pickle.dumps((rank, succeeded, outcome))
    except Exception as error:
        if succeeded:
            raise
        # An exception that refers to objects that cannot be pickled.
        return pickle.dumps((rank, False, RuntimeError(f"{outcome!r} (which cannot be pickled: {error})")))


def main() -> int:
    """Fetch the function, run it, and deliver its result.

    Returns:
        The exit code.
    """
    *named, port, key = os.environ.pop("HOROVOD_RUN_FUNCTION_SERVER").split(":")
    # The launcher is on the rendezvous's host; without a rendezvous, the processes of `mpirun` are on the same host.
    host = named[0] if named else os.environ.get("SMD_RENDEZVOUS", "127.0.0.1:0").rpartition(":")[0]
    connection, _ = connect(host, int(port), bytes.fromhex(key))
    with connection:
        func, args, kwargs = pickle.loads(connection.recv_bytes())
        try:
            result = func(*args, **kwargs)
            delivery, code = _pickled(_rank(), True, result), 0
        except Exception as error:
            traceback.print_exc()
            delivery, code = _pickled(_rank(), False, error), 1
        connection.send_bytes(delivery)
        # Waits until the result is received: the job ends with its processes, and a late result would be lost.
        if not connection.poll(_ACK_TIMEOUT):
            raise TimeoutError(f"horovod.run did not acknowledge the result of rank {_rank()} within {_ACK_TIMEOUT} s")
        connection.recv_bytes()
    return code


if __name__ == "__main__":
    sys.exit(main())
