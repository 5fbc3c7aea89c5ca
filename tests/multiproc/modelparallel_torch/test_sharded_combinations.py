"""Sharded parameters and optimizer states with tensor parallelism and pipelines, beside one process."""

from __future__ import annotations

import pytest

from support import Forked, run_ranks


def _equality_body(cases):
    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare_sharded

    for layout, more in cases:
        try:
            compare_sharded(*layout, **more)
        except BaseException as error:
            raise AssertionError(f"{layout}, {more}") from error
        smp.shutdown()


STATES = {"shard_optimizer_state": True}
CASES = {
    "two": (2, [((2, 1, 1), STATES), ((2, 1, 1), {"sharded_data_parallel_degree": 2})]),
    "four": (
        4,
        [
            ((2, 2, 1), STATES),
            ((2, 1, 2), {**STATES, "optimize": "speed"}),
            ((2, 1, 2), {"sharded_data_parallel_degree": 2, "prescaled": True}),
            ((2, 1, 2), {"sharded_data_parallel_degree": 4, "optimize": "speed", "recompute": True}),
        ],
    ),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(name):
    ranks, cases = CASES[name]
    run_ranks(_equality_body, ranks, cases, launcher=Forked("torch"), timeout=140)


def _settings(tp, pp, **more):
    from support.tensor_parallel import config

    return config(tp, pp, False, "memory", sdp_param_persistence_threshold=9, **more)


#: Four ranks each: tensor parallelism, partitions, and what else.
LAYOUTS = {
    "shards of slices": (2, 1, {"sharded_data_parallel_degree": 2}),
    "states of slices": (2, 2, STATES),
    "shards": (1, 1, {"sharded_data_parallel_degree": 4}),
    "states": (1, 2, STATES),
    "whole": (1, 1, {}),
}
JOURNEYS = [
    ("shards of slices", ["shards of slices", "states of slices", "whole"]),
    ("states of slices", ["shards of slices", "states"]),
    ("shards", ["states of slices"]),
]


def _checkpoints_body(folder):
    import copy

    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, start

    torch.set_default_dtype(torch.float64)

    def begin(layout, seed, load=None):
        tp, pp, more = LAYOUTS[layout]
        model, optimizer, step = start(_settings(tp, pp, **more), seed)
        if load is not None:
            load()
        if pp == 1 and load is not None:
            return model, optimizer
        step(model, batch_of(0))
        if load is None:
            optimizer.step()
        return model, optimizer

    for number, (saved, others) in enumerate(JOURNEYS):
        model, optimizer = begin(saved, 0)
        where = f"{folder}/{number}"
        smp.save_checkpoint(where, "partial", model=model, optimizer=optimizer, user_content={"at": 1})
        smp.save_checkpoint(where, "core", user_content={"at": 1}, format="sharded")
        weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        smp.shutdown()
        for other in others:
            for tag in ("partial", "core"):

                def load(where=where, tag=tag):
                    assert smp.resume_from_checkpoint(where, tag) == {"at": 1}

                model, optimizer = begin(other, 7, load)
                found = model.state_dict(), optimizer.state_dict()["state"]
                what = saved, other, tag
                for one, wanted in zip(found, (weights, states), strict=True):
                    assert one.keys() == wanted.keys(), what
                assert all(torch.equal(found[0][name], each) for name, each in weights.items()), what
                for name, state in states.items():
                    assert all(torch.equal(found[1][name][key], each) for key, each in state.items()), (*what, name)
                smp.shutdown()


@pytest.mark.timeout(150)
def test_checkpoints_load_at_other_layouts(tmp_path):
    run_ranks(_checkpoints_body, 4, str(tmp_path), launcher=Forked("torch"), timeout=140)
