"""Errors of the c10d backend: an error on one rank raises on all; aborts, timeouts and Ctrl-C end waits."""

from __future__ import annotations

import signal
import time

import pytest

from support import Forked, run_ranks, start_ranks
from support.rank_main import announce

pytest.importorskip("torch", reason="PyTorch is not installed")


def _init(**arguments):
    import torch
    import torch.distributed as dist

    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    dist.init_process_group("smddp", **arguments)
    return torch, dist, dist.get_rank(), dist.get_world_size()


def _one_rank_fails():
    torch, dist, rank, size = _init()
    unknown = torch.ones(4, dtype=torch.uint16)
    good = torch.ones(4)
    overlapping = torch.ones(1).expand(4)
    blocks = [torch.empty(4) for _ in range(size)]
    # Rank 1's invalid calls, with the exception that rank 1 gets. The other ranks make the valid calls below.
    wrongs = [
        (lambda: dist.all_reduce(unknown), TypeError, "UInt16"),
        (lambda: dist.broadcast(overlapping, 0), RuntimeError, "more than one element"),
        (lambda: dist.all_gather_into_tensor(torch.empty(4 * size), unknown), TypeError, "UInt16"),
        (lambda: dist.all_gather([*blocks[:-1]], good), ValueError, "blocks|outputs|size"),
        (lambda: dist.reduce_scatter_tensor(good, torch.ones(4 * size + 1)), ValueError, "cannot be split"),
        (lambda: dist.all_to_all_single(good, good, [1] * size, None), ValueError, "split sizes"),
        (lambda: dist.all_reduce(unknown, async_op=True), TypeError, "UInt16"),
    ]
    rights = [
        lambda: dist.all_reduce(good),
        lambda: dist.broadcast(good, 0),
        lambda: dist.all_gather_into_tensor(torch.empty(4 * size), good),
        lambda: dist.all_gather(blocks, good),
        lambda: dist.reduce_scatter_tensor(good, torch.ones(4 * size)),
        lambda: dist.all_to_all_single(torch.empty(4 * size), torch.ones(4 * size)),
        lambda: dist.all_reduce(good, async_op=True).wait(),
    ]
    start = time.monotonic()
    for (wrong, kind, text), right in zip(wrongs, rights, strict=True):
        if rank == 1:
            with pytest.raises(kind, match=text):
                wrong()
        else:
            with pytest.raises(dist.DistBackendError, match="rank 1 failed"):
                right()
        # The group is still usable.
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [size] * 3
    # An invalid operation among coalesced ones: the whole batch fails on all ranks.
    for device in (None, torch.device("cpu")):
        tensors = [torch.ones(3), unknown if rank == 1 else torch.ones(3), torch.ones(40_000)]

        def coalesced(device=device, tensors=tensors):
            with dist._coalescing_manager(device=device, async_ops=True) as pending:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            pending.wait()

        expected = (TypeError, "UInt16") if rank == 1 else (dist.DistBackendError, "rank 1 failed .*UInt16")
        with pytest.raises(expected[0], match=expected[1]):
            coalesced()
        # After an error in the block, torch keeps the coalescing state.
        dist.distributed_c10d._world.pg_coalesce_state.clear()
        dist.barrier()
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as pending:
            value = torch.ones(3)
            dist.all_reduce(value)
        pending.wait()
        assert value.tolist() == [size] * 3
    assert time.monotonic() - start < 20
    return rank


def test_a_failing_rank_is_named_on_all_ranks():
    assert run_ranks(_one_rank_fails, 3, launcher=Forked("torch")) == [0, 1, 2]


def _abort_on_rank_0():
    torch, dist, rank, _ = _init()
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        group = dist.new_group([0], use_local_synchronization=True)
        time.sleep(0.5)
        dist.distributed_c10d._abort_process_group()
        assert not dist.is_initialized()
        with pytest.raises(dist.DistBackendError, match="closed"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        del group
        return None
    time.sleep(1)
    start = time.monotonic()

    def three():
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))

    # The first all-reduce may succeed, because rank 0 started it before it aborted.
    with pytest.raises(dist.DistBackendError, match=r"rank 0 left the job") as failure:
        three()
    assert time.monotonic() - start < 5
    return str(failure.value)


def test_abort_ends_waits_everywhere():
    assert run_ranks(_abort_on_rank_0, 2, launcher=Forked("torch"))[1].endswith("[smd:peer_failed]")


def _time_out():
    from datetime import timedelta

    torch, dist, rank, _ = _init(timeout=timedelta(seconds=1))
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    text = None
    if rank != 2:
        kinds = [
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.barrier(),
            lambda: dist.recv(torch.ones(1), 2),
        ]
        for kind in kinds:
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError) as failure:
                kind()
            assert time.monotonic() - start < 5
            text = text or str(failure.value)
    # Rank 2 stays alive until the timeouts of the others have expired.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(3)], timedelta(seconds=30))
    return text


def test_a_timeout_names_the_missing_ranks():
    first, second, _ = run_ranks(_time_out, 3, launcher=Forked("torch"))
    for text in (first, second):
        assert "all_reduce(sum) of 1 float32 timed out after 1.0s: no sign of rank(s) [2]" in text, text


def _blocking_calls():
    """Rank 0 is interrupted in each kind of blocking call; rank 1 makes none of the calls."""
    from datetime import timedelta

    torch, dist, rank, _ = _init()
    import torch.distributed._functional_collectives as functional

    groups = [dist.new_group() for _ in range(5)]
    if rank == 1:
        time.sleep(100)
    value = torch.ones(1000)
    waits = [
        lambda: dist.all_reduce(value, group=groups[0]),
        lambda: dist.all_reduce(value, group=groups[1], async_op=True).wait(),
        lambda: dist.recv(value, 1, group=groups[2]),
        lambda: functional.wait_tensor(functional.all_reduce(value, "sum", groups[3])),
        lambda: dist.monitored_barrier(groups[4], timedelta(seconds=60)),
        lambda: dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=60)),
    ]
    for at, wait in enumerate(waits):
        try:
            announce(f"waits {at}")
            wait()
        except KeyboardInterrupt:
            announce(f"interrupted {at}")
        else:
            raise AssertionError(f"wait {at} ended by itself")
    return len(waits)


def test_ctrl_c_is_a_keyboard_interrupt_in_every_wait():
    with start_ranks(_blocking_calls, 2, launcher=Forked("torch")) as job:
        for at in range(6):
            job.wait_for(f"waits {at}")
            time.sleep(0.2)
            pressed = job.kill(0, signal.SIGINT)
            job.wait_for(f"interrupted {at}")
            assert time.monotonic() - pressed < 5
        job.kill(1)
        outcome = job.wait()
    assert outcome.ranks[0].value == 6, outcome.describe()
