"""Sharded parameters and optimizer states with tensor parallelism and pipelines, compared with one process."""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks
from support.ranks import RanksFailedError


def _check_equality(cases):
    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare_sharded

    for layout, settings in cases:
        try:
            compare_sharded(*layout, **settings)
        except Exception as error:
            raise AssertionError(f"{layout}, {settings}") from error
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
    "pipelines": (
        4,
        [
            ((1, 2, 2), {"sharded_data_parallel_degree": 2, "recompute": True}),
            ((2, 2, 1), {"sharded_data_parallel_degree": 2, "optimize": "speed", "passes": 2}),
        ],
    ),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", [more(name) if name == "four" else name for name in CASES])
def test_equal_to_one_process(name):
    ranks, cases = CASES[name]
    run_ranks(_check_equality, ranks, cases, launcher=Forked("torch"), timeout=140)


def _settings(tp, pp, **more):
    from support.tensor_parallel import config

    return config(tp, pp, False, "memory", sdp_param_persistence_threshold=9, **more)


#: Layouts of four ranks: tensor-parallel degree, partitions, and further settings.
LAYOUTS = {
    "shards of slices": (2, 1, {"sharded_data_parallel_degree": 2}),
    "states of slices": (2, 2, STATES),
    "shards": (1, 1, {"sharded_data_parallel_degree": 4}),
    "states": (1, 2, STATES),
    "shards of partitions": (1, 2, {"sharded_data_parallel_degree": 2}),
    "whole": (1, 1, {}),
}
SAVED_AND_LOADED = [
    ("shards of slices", [("shards of slices", "core"), ("states of slices", "partial"), ("whole", "core")]),
    ("states of slices", [("shards of slices", "partial"), ("states", "core")]),
    ("shards", [("shards of partitions", "core")]),
    ("shards of partitions", [("whole", "partial")]),
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

    for number, (saved, others) in enumerate(SAVED_AND_LOADED):
        model, optimizer = begin(saved, 0)
        where = f"{folder}/{number}"
        smp.save_checkpoint(where, "partial", model=model, optimizer=optimizer, user_content={"at": 1})
        smp.save_checkpoint(where, "core", user_content={"at": 1}, format="sharded")
        weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        smp.shutdown()
        for other, tag in others:

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


def _check_precision_only(folder):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, start

    settings = _settings(1, 1, sharded_data_parallel_degree=2, fp16=True)
    scales = {"dynamic_loss_scale": True, "init_scale": 64.0}
    model, optimizer, step = start(settings, **scales)
    members = torch.distributed.get_process_group_ranks(optimizer.ds_param_shard_group)
    assert members == smp.get_dp_group()
    names = smp.state.param_index_to_name_tp_group[0]
    assert list(names.values()) == [name for name, _ in model.module.named_parameters()]
    assert smp.state.param_name_to_index_tp_group == [{name: index for index, name in names.items()}]
    for number in range(2):
        optimizer.zero_grad()
        step(model, batch_of(number))
        optimizer.step()
    smp.save_checkpoint(folder, "partial", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "core", format="sharded")
    wanted = optimizer.state_dict()
    smp.shutdown()
    for tag in ("partial", "core"):
        model, optimizer, _ = start(settings, 7, **scales)
        smp.resume_from_checkpoint(folder, tag, load_sharded_optimizer_state=False)
        found = optimizer.state_dict()
        assert not found["state"]
        assert wanted["state"]
        for name, master in wanted["master_weights"].items():
            assert torch.equal(found["master_weights"][name], master), (tag, name)
        assert found["loss_scale"] == wanted["loss_scale"]
        smp.shutdown()


@pytest.mark.timeout(100)
def test_loading_only_master_weights_and_loss_scale(tmp_path):
    run_ranks(_check_precision_only, 2, str(tmp_path), launcher=Forked("torch"), timeout=90)


def _check_half_modules():
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch import state_mod, utils
    from support.tensor_parallel import batch_of, start

    ends = []
    for fp16_params in (False, True):
        model, optimizer, step = start(_settings(2, 1, fp16_params=fp16_params))
        kinds = {each.dtype for each in model.module.body.parameters()}
        assert kinds == {torch.float16 if fp16_params else torch.float32}
        assert model.module.head.weight.dtype == torch.float32
        ends.append(step(model, batch_of(0)).reduce_mean())
        axes = {name: utils.get_distribution_axis(each) for name, each in model.module.named_parameters()}
        assert axes["body.embeddings.word_embedding.weight"] is not None
        assert axes["head.weight"] is None
        assert utils.rmsg("begins") == f"[{smp.rank()}] begins"
        assert state_mod.state is smp.state
        assert len(smp.state.param_index_to_name_tp_group) == 2
        optimizer.step()
        smp.shutdown()
    assert ends[1].dtype == torch.float32
    torch.testing.assert_close(ends[1], ends[0], rtol=5e-3, atol=0)


@pytest.mark.timeout(100)
def test_fp16_params_apply_to_distributed_modules():
    run_ranks(_check_half_modules, 2, launcher=Forked("torch"), timeout=90)


def _killed_body(settings):
    import os
    import signal

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, start

    model, _, step = start(settings)

    def die(module, inputs):
        os.kill(os.getpid(), signal.SIGKILL)

    if smp.rank() == 1:
        model.module.body.transformer.seq_layers[1].register_forward_pre_hook(die)
    step(model, batch_of(0))


@pytest.mark.timeout(100)
def test_a_rank_that_dies_in_a_step_of_shards_is_named():
    settings = _settings(1, 1, sharded_data_parallel_degree=2, fp16=True)
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(_killed_body, 2, settings, launcher=Forked("torch"), timeout=60)
    assert not failed.value.outcome.timed_out
    assert "SMPPeerFailedError" in failed.value.outcome.ranks[0].error
    assert "rank 1" in failed.value.outcome.ranks[0].error
