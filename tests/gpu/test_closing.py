"""Groups on CUDA devices that one member closes, or cannot create, while the other members do not take part."""

from __future__ import annotations

import time

import pytest

from support import devices, run_ranks
from support.devices import needs_one

pytestmark = [pytest.mark.timeout(150), needs_one]


def _start():
    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    torch.cuda.set_device(devices.own())
    dist.init_process_group("smddp")
    return torch, dist


def _threads(name):
    import pathlib

    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [found for found in names if found.startswith(name)]


def _closed_body():
    torch, dist = _start()
    x = torch.ones(3 << 20, device="cuda")
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    start = time.monotonic()
    if dist.get_rank() == 0:
        # Rank 1 never calls this all-reduce.
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
        torch.cuda.synchronize()
    else:
        time.sleep(12)
    return time.monotonic() - start


@pytest.mark.parametrize("peer_bytes", ["0", "8388608"])
def test_an_operation_of_a_closed_group_ends_at_its_timeout(peer_bytes):
    env = {"SMD_TIMEOUT_SECONDS": "6", "SMD_P2P_MAX_BYTES": peer_bytes}
    first, _ = run_ranks(_closed_body, 2, env=env, timeout=90)
    assert 5 < first < 30, first


def _absent_body():
    torch, dist = _start()
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    group = dist.new_group()
    start, before = time.monotonic(), _threads("smd-")
    if dist.get_rank() == 1:
        # Rank 1 never uses the group on a device, so its communicator cannot be made.
        time.sleep(14)
        return "", 0.0, 0
    text = ""
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError as error:
        text = str(error)
    return text, time.monotonic() - start, len(_threads("smd-")) - len(before)


def test_a_member_that_does_not_join_is_named_and_no_thread_is_left():
    env = {"SMD_TIMEOUT_SECONDS": "6", "SMD_P2P_MAX_BYTES": "0"}
    (text, seconds, more_threads), _ = run_ranks(_absent_body, 2, env=env, timeout=90)
    assert "timed out" in text, text
    assert "[1]" in text, text
    assert seconds < 20, seconds
    assert more_threads <= 0


def _launches_body(count):
    torch, dist = _start()
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(20):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(count):
        dist.all_reduce(x)
    queued = (time.monotonic() - start) / count * 1e6
    torch.cuda.synchronize()
    total = (time.monotonic() - start) / count * 1e6

    # The same all-reduce in a CUDA graph: the work that NCCL queues from a thread of its own must be captured as well.
    y = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(y)
    y.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    return queued, total, y[0].item()


def test_operations_of_nccl_are_queued_within_a_millisecond_and_captured():
    outcome = run_ranks(_launches_body, 2, 200, env={"SMD_P2P_MAX_BYTES": "0"}, timeout=90)
    print(f"an all-reduce of 4 MiB: {outcome[0][0]:.0f} us to queue, {outcome[0][1]:.0f} us in all")
    for queued, _, value in outcome:
        assert value == 2.0
        # Ranks that share a device communicate over sockets and wait for each other's kernels.
        assert queued < (1e5 if devices.SHARED else 1e3), outcome
