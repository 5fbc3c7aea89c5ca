"""What each process of :func:`horovod.run` runs."""

from __future__ import annotations

import os
import sys
import traceback
from multiprocessing.connection import Client
from typing import Any

try:
    import cloudpickle as pickle
except ImportError:
    import pickle


def _rank() -> int:
    """The last one that this process had: an elastic job gives out others than it starts with."""
    from horovod.common import basics

    core = basics.shared()
    return core.rank() if core.is_initialized() else int(os.environ.get("HOROVOD_RANK", os.environ.get("RANK", "0")))


def _pickled(rank: int, succeeded: bool, outcome: Any) -> bytes:
    try:
        return pickle.dumps((rank, succeeded, outcome))
    except Exception as error:
        if succeeded:
            raise
        # An exception that holds what cannot travel.
        return pickle.dumps((rank, False, RuntimeError(f"{outcome!r} (which cannot be pickled: {error})")))


def main() -> int:
    """Fetches the function, runs it, and delivers what it returns."""
    port, key = os.environ.pop("HOROVOD_RUN_DESK").split(":")
    # The launcher's host is where the rendezvous is; processes of `mpirun` without one are on the same host.
    host = os.environ.get("SMD_RENDEZVOUS", "127.0.0.1:0").rpartition(":")[0]
    with Client((host, int(port)), authkey=bytes.fromhex(key)) as desk:
        func, args, kwargs = pickle.loads(desk.recv_bytes())
        try:
            result = func(*args, **kwargs)
            desk.send_bytes(_pickled(_rank(), True, result))
        except Exception as error:
            traceback.print_exc()
            desk.send_bytes(_pickled(int(os.environ.get("HOROVOD_RANK", "0")), False, error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
