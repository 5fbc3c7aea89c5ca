"""Processes forked by a rank, such as data loader workers: they can read the rank, but cannot call collectives."""

from __future__ import annotations

import os

import pytest

from support import run_ranks
from support.forks import Forked

REFUSAL = "this process was forked from one that uses the library"


def ask_torch():
    import torch

    import horovod.torch as hvd
    import smdistributed.dataparallel.torch.distributed as dist

    hvd.init()
    pair = dist.new_group([1, 0])
    questions = {
        "hvd": lambda: (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "set": lambda: (hvd.global_process_set.rank(), hvd.global_process_set.size(), hvd.is_homogeneous()),
        "dist": lambda: (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()),
        "pair": lambda: (dist.get_rank(pair), dist.get_world_size(pair)),
        "there": lambda: (hvd.is_initialized(), dist.is_initialized()),
    }
    collectives = {
        "hvd": lambda: hvd.allreduce(torch.ones(1)),
        "dist": lambda: dist.all_reduce(torch.ones(1)),
        "init": lambda: hvd.init(),
    }

    def refusal(call):
        try:
            call()
        except Exception as error:
            return str(error)
        return "no error"

    class Questions(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            answers = {name: ask() for name, ask in questions.items()}
            return answers, {name: refusal(call) for name, call in collectives.items()}

    loader = torch.utils.data.DataLoader(
        Questions(), num_workers=1, multiprocessing_context="fork", collate_fn=lambda items: items, timeout=30
    )
    expected = {name: ask() for name, ask in questions.items()}
    for items in loader:
        for answers, refusals in items:
            assert answers == expected, (answers, expected)
            assert all(REFUSAL in text for text in refusals.values()), refusals
    # Collectives of the parent still work.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
    return hvd.rank()


def test_workers_of_torchs_data_loader_know_their_rank():
    assert run_ranks(ask_torch, 2, launcher=Forked("torch")) == [0, 1]


def _in_child(ask):
    """Calls `ask` in a forked child; returns the `repr` of its result or of its exception."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr(ask()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def ask_smp():
    import smdistributed.modelparallel.torch as smp

    smp.init({})

    def places():
        return (
            smp.rank(),
            smp.size(),
            smp.local_rank(),
            smp.local_size(),
            smp.dp_rank(),
            smp.pp_rank(),
            smp.is_initialized(),
        )

    assert _in_child(places) == repr(places())
    # The same in a child of the child.
    assert _in_child(lambda: _in_child(places)) == repr(repr(places()))
    assert REFUSAL in _in_child(smp.barrier)
    smp.barrier()
    return smp.rank()


def test_forked_children_know_their_place_in_smp():
    assert run_ranks(ask_smp, 2, launcher=Forked("torch")) == [0, 1]


def ask_tensorflow():
    import smdistributed.dataparallel.tensorflow as sdp
    from smdistributed import _core

    sdp.init()

    def places():
        return sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size()

    assert _in_child(places) == repr(places())
    assert REFUSAL in _in_child(_core.barrier)
    return sdp.rank()


@pytest.mark.more
def test_forked_children_know_their_rank_in_tensorflow():
    pytest.importorskip("tensorflow")
    assert run_ranks(ask_tensorflow, 2, launcher=Forked("tensorflow")) == [0, 1]
