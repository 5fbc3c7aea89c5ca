"""Sessions of `horovod.torch`: process sets, `init` and `shutdown`, autotuning, fusion and stall checks."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from pathlib import Path

import pytest

from support import Forked, more, run_ranks
from support.horovod_ranks import ENV, raises, restarted_with, standard_error, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def process_sets():
    torch, hvd, rank, size = start("torch")
    assert hvd.global_process_set.ranks == list(range(size))
    assert str(hvd.ProcessSet([1, 0])) == "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)"
    raises(ValueError, "list of process ranks or an mpi4py Comm object", lambda: hvd.ProcessSet(["a"]))
    raises(
        ValueError,
        "does not exist, or has not been registered",
        lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0])),
    )
    raises(ValueError, "Attempted to add a duplicate process set", lambda: hvd.add_process_set(range(size)))
    raises(ValueError, "there is no rank", lambda: hvd.add_process_set([0, size]))
    if size == 1:
        return
    even = hvd.add_process_set(range(0, size, 2))
    members = [0, 1] if size > 2 else [1]
    pair = hvd.add_process_set(hvd.ProcessSet(members[::-1]))  # overlaps with `even` if there are more than two ranks
    assert (even.process_set_id, pair.process_set_id) == (1, 2)
    raises(ValueError, "rank 0 adds.*rank 1 adds", lambda: hvd.add_process_set([0] if rank == 0 else [1]))
    for one in [even, pair]:
        if one.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one).item() == one.size()
            assert hvd.allgather(torch.tensor([rank]), process_set=one).tolist() == one.ranks
            assert hvd.broadcast(torch.tensor([rank]), one.ranks[-1], process_set=one).item() == one.ranks[-1]
            assert one.ranks[one.rank()] == rank
            hvd.barrier(one)
            if one is pair and size > 2:
                raises(
                    ValueError,
                    "broadcast received invalid root rank",
                    lambda: hvd.broadcast(torch.ones(1), 2, process_set=pair),
                )
            raises(
                NotImplementedError,
                "does not support non-global process sets",
                lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=even),
            )
        else:
            raises(
                ValueError,
                "is not a member of the provided process set",
                lambda one=one: hvd.allreduce(torch.ones(1), process_set=one),
            )
            raises(ValueError, "not part of provided process set", one.rank)
    # Automatic names on all ranks still match, although some ranks made fewer calls.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([size - 1] if size > 2 else [0])
    assert again.process_set_id == 1
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), 1: again.ranks, 2: members}
    # After shutdown a new session starts.
    hvd.shutdown()
    raises(ValueError, "has not been initialized; use hvd.init", hvd.rank)
    raises(hvd.HorovodInternalError, "has not been initialized; use hvd.init", lambda: hvd.allreduce(torch.ones(1)))
    some = [hvd.ProcessSet([0])] if rank == 0 else None
    raises(ValueError, "ranks ask for different process sets", lambda: hvd.init(process_sets=some))
    hvd.shutdown()
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([0, 1])]
    if size > 2:
        hvd.init(process_sets=sets)
        assert [one.process_set_id for one in sets] == [1, 2]
    else:
        raises(ValueError, "is a duplicate", lambda: hvd.init(process_sets=sets))
        hvd.init(process_sets=sets[:1])
    assert sets[0].process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def sessions():
    """Errors without a session, and sessions of a part of the ranks."""
    torch, hvd, rank, size = start("torch")
    if size > 1:
        raises(ValueError, "received invalid root rank", lambda: hvd.broadcast(torch.ones(1), size))

        def different():
            x = torch.ones(1)
            return hvd.allgather(x, name="one") if rank == 0 else hvd.allreduce(x, name="two")

        raises(hvd.HorovodInternalError, "one|two", different)
    duplicates = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
    raises(ValueError, "is a duplicate", lambda: hvd.init(process_sets=duplicates))
    hvd.shutdown()
    assert not hvd.is_initialized()
    text = r"Horovod has not been initialized; use hvd\.init\(\)\."
    raises(hvd.HorovodInternalError, text, lambda: hvd.allreduce(torch.ones(1)))
    for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_homogeneous):
        raises(ValueError, text, ask)
    raises(ValueError, "Invalid type of argument comm", lambda: hvd.init(comm="everybody"))
    # A session of some ranks in reverse order; the remaining rank has a session of its own.
    part = list(range(size))[: max(size - 1, 1)][::-1]
    hvd.init(comm=part)
    assert hvd.size() == (len(part) if rank in part else 1)
    assert hvd.rank() == (part.index(rank) if rank in part else 0)
    assert hvd.allgather(torch.tensor([rank])).tolist() == (part if rank in part else [rank])
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def tuning():
    """Autotuning samples fusion thresholds and logs them with the original's columns."""
    torch, hvd, rank, _ = start("torch")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        settings = {"AUTOTUNE": "1", "AUTOTUNE_LOG": str(log), "AUTOTUNE_STEPS_PER_SAMPLE": "1"}
        settings |= {"AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.3"}
        with restarted_with(hvd, **{f"HOROVOD_{name}": value for name, value in settings.items()}):
            for _ in range(3 + 7 * 5 + 2):
                hvd.allreduce(torch.ones(100), name="tuned")
            if rank == 0:
                header, *rows = log.read_text().splitlines()
                assert header == (
                    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
                    "tensor_fusion_threshold,score"
                )
                found = [(int(row.split(",")[5]), float(row.split(",")[6])) for row in rows]
                tried = [size for size, _ in found[:-1]]
                assert len(set(tried)) == 7
                assert {2**16, 2**27} <= set(tried)
                assert all(2**16 <= size <= 2**27 for size in tried)
                assert found[-1] == max(found[:-1], key=lambda one: one[1])


def fusion():
    """Small tensors that are ready at the same time are fused.

    With `HOROVOD_DISABLE_GROUP_FUSION` only the tensors of one grouped call are fused.
    """
    torch, hvd, rank, size = start("torch")
    if size == 1:
        return
    for disabled in (0, 1):
        with (
            tempfile.TemporaryDirectory() as folder,
            restarted_with(hvd, HOROVOD_DISABLE_GROUP_FUSION=str(disabled)),
        ):
            path = Path(folder) / "timeline.json"
            hvd.start_timeline(str(path))
            # The last rank calls later, so that all tensors become ready at once.
            time.sleep(0.1 if rank == size - 1 else 0)
            ones = [hvd.allreduce_async(torch.full((8,), float(at)), name=f"one{at}", op=hvd.Sum) for at in range(40)]
            pairs = [
                hvd.grouped_allreduce_async([torch.ones(4), torch.ones(3)], name=f"pair{at}", op=hvd.Sum)
                for at in range(10)
            ]
            assert all((hvd.synchronize(handle) == float(at * size)).all() for at, handle in enumerate(ones))
            assert all((each == size).all() for handle in pairs for each in hvd.synchronize(handle))
            hvd.stop_timeline()
            if rank == 0:
                events = json.loads(path.read_text())
                names = {
                    event["pid"]: event["args"].get("name", "")
                    for event in events
                    if event.get("name") == "process_name"
                }
                fused = {names[event["pid"]] for event in events if event.get("name") == "MEMCPY_IN_FUSION_BUFFER"}
                assert sum("pair" in name for name in fused) == 10, fused
                assert any("one" in name for name in fused) == (not disabled), fused


def stalls():
    """A rank is late for longer than the stall timeout: rank 0 reports it, and all pending operations fail."""
    torch, hvd, rank, size = start("torch")
    if size == 1:
        return
    # A shutdown time below the warning time is ignored with a warning.
    with standard_error() as stderr, restarted_with(hvd, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1"):
        if rank == 0:
            time.sleep(2)
        hvd.allreduce(torch.ones(2), name="later")
        assert "`SMD_STALL_SHUTDOWN_SECONDS` is 1, less than `SMD_STALL_WARNING_SECONDS`" in stderr()
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    ended = Path(hvd.broadcast_object(tempfile.mktemp()))
    with restarted_with(hvd, **limits), standard_error() as stderr:
        if rank == size - 1:
            # Stays away until the others' operations have failed.
            deadline = time.monotonic() + 60
            while not ended.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        else:
            handles = [hvd.allreduce_async(torch.ones(2), name=f"late{at}") for at in range(8)]
            for handle in handles:
                raises(
                    hvd.HorovodInternalError, r"late.*Horovod has been shut down\.", lambda h=handle: hvd.synchronize(h)
                )
        if rank == 0:
            ended.touch()
            late = ", ".join(f"allreduce.late{at}" for at in range(6)) + " ..."
            text = stderr()
            assert "more than 1 seconds" in text, text
            assert f"Missing ranks:\n{size - 1}: [{late}]" in text, text
            assert "Will shutdown.\n" in text, text
            assert f"Missing ranks:\n{size - 1}!: [{late}]" in text, text
    if rank == 0:
        ended.unlink()


PARTS = (process_sets, sessions, tuning, fusion, stalls)  # fmt: skip


def all_parts():
    """Runs all parts in one job, because ranks take long to start."""
    for part in PARTS:
        part()


@pytest.mark.timeout(220)
@pytest.mark.parametrize("size", [2, more(3), more(4)])
def test_process_sets_and_worlds(size):
    """The assertions are in `all_parts`, which runs on each rank."""
    run_ranks(all_parts, size, launcher=Forked("torch"), env=ENV, timeout=200)
