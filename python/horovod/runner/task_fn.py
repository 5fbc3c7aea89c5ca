"""The task that runs on each host during the search for interfaces: ``python -m horovod.runner.task_fn``.

It reads its instructions from standard input.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from horovod.runner.common.util import codec, host_hash, timeout
from horovod.runner.common.util.network import Addresses
from horovod.runner.driver.driver_service import HorovodRunDriverClient
from horovod.runner.task.task_service import HorovodRunTaskClient, HorovodRunTaskService


def _task_fn(index: int, num_hosts: int, driver_addresses: Addresses, key: bytes, seconds: float, nics: Any) -> None:
    limit = timeout.Timeout(seconds, "{activity} took longer than {timeout} seconds")
    task = HorovodRunTaskService(index, key, nics)
    try:
        driver = HorovodRunDriverClient(
            driver_addresses, key, probe_timeout=max(1.0, min(5.0, seconds / 4)), attempts=1
        )
        driver.register_task(index, task.addresses(), host_hash.host_hash())
        following = (index + 1) % num_hosts
        while True:
            try:
                places = driver.all_task_addresses(following)
                break
            except RuntimeError:
                # The task has not been registered yet.
                limit.check_time_out_for(f"the start of task {following}")
                time.sleep(0.05)
        # An interface that drops packets must not use up the time for all others.
        probe_timeout = max(1.0, min(5.0, limit.remaining() / 4))
        found = HorovodRunTaskClient(following, places, key, match_intf=True, probe_timeout=probe_timeout, attempts=1)
        driver.register_task_to_task_addresses(following, found.addresses())
        found.task_to_task_address_check_completed()
        # The preceding task may still be checking addresses.
        task.wait_for_task_to_task_address_check_finish_signal(limit)
    finally:
        task.shutdown()


def main() -> int:
    """Read the driver's instructions and follow them.

    Returns:
        The exit code.
    """
    _task_fn(*codec.loads_base64(sys.stdin.read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
