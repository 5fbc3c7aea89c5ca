"""Bad input, and the death of a rank: every rank raises an error with the values, within seconds of the call."""

from __future__ import annotations

import os
import time

import pytest

from support import Forked, run_ranks
from support.ranks import RanksFailedError

#: Longest time from the call to the error.
SECONDS = 5.0

#: For each case: a configuration for all ranks, or one for each; and the words that the error contains on every rank.
CONFIGURATIONS = {
    "partitions": (2, {"partitions": 3}, ["2 processes", "3 pipeline stages"]),
    "tensor": (2, {"tensor_parallel_degree": 3, "ddp": True}, ["2 processes", "3 tensor parts"]),
    "both": (3, {"tensor_parallel_degree": 2, "partitions": 2, "ddp": True}, ["3 processes", "2 pipeline stages times 2 tensor parts"]),
    "sharded": (
        3,
        {"sharded_data_parallel_degree": 2, "ddp": True},
        ["`sharded_data_parallel_degree`", "2", "3"],
    ),
    "precision": (2, {"fp16": True, "bf16": True}, ["`fp16` and `bf16`"]),
    "two shardings": (
        2,
        {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True, "ddp": True},
        ["`sharded_data_parallel_degree`", "`shard_optimizer_state`"],
    ),
    "no replicas": (2, {"shard_optimizer_state": True}, ["`shard_optimizer_state` needs `ddp: true`"]),
    "horovod": (2, {"horovod": True}, ["`horovod` is True"]),
    "differing value": (2, [{"microbatches": 2}, {"microbatches": 4}], ["`microbatches` is 2 on rank 0 and 4 on rank 1"]),
    "differing degrees": (
        2,
        [{"partitions": 2}, {"tensor_parallel_degree": 2, "ddp": True}],
        ["on rank 0", "on rank 1", "`tensor_parallel_degree` is 1 on rank 0 and 2 on rank 1"],
    ),
    "one wrong value": (2, [{"partitions": 2}, {"partitions": 0}], ["`partitions` is 0"]),
    "one wrong combination": (2, [{"fp16": True}, {"fp16": True, "bf16": True}], ["`fp16` and `bf16`"]),
}  # fmt: skip


def _timed(call):
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", time.monotonic() - begin


def _configured_body(settings, folder, size):
    import smdistributed.modelparallel.torch as smp

    rank = int(os.environ["RANK"])
    # The first call waits for all processes, which import PyTorch for seconds on a busy machine.
    open(f"{folder}/{rank}", "w").close()
    while len(os.listdir(folder)) < size:
        time.sleep(0.01)
    found = _timed(lambda: smp.init(settings[rank] if isinstance(settings, list) else settings))
    # After the error, `init` with a valid configuration succeeds.
    smp.init({})
    sizes = smp.size()
    smp.shutdown()
    return found, sizes


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_configuration_that_does_not_fit(case, tmp_path):
    size, settings, words = CONFIGURATIONS[case]
    arguments = settings, str(tmp_path), size
    for found, sizes in run_ranks(_configured_body, size, *arguments, launcher=Forked("torch"), timeout=40):
        kind, text, seconds = found
        assert kind in ("SMPConfigError", "SMPUnsupportedError"), found
        assert [word for word in words if word not in text] == [], text
        assert seconds < SECONDS
        assert sizes == size


def _layers_body():
    import warnings

    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    found = [
        _timed(lambda: smp.nn.DistributedAttentionLayer(3, 4, 12)),
        _timed(lambda: smp.nn.DistributedTransformerOutputLayer(4, 7)),
        _timed(lambda: smp.nn.DistributedLinear(5, 4)),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with smp.tensor_parallelism():
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(3, 2))
        model[1].weight = model[0].weight
        model = smp.DistributedModel(model)
    kinds = [type(each).__name__ for each in model.module]
    smp.shutdown()
    return found, kinds, [str(each.message) for each in caught]


@pytest.mark.timeout(60)
def test_layers_that_cannot_be_divided():
    for found, kinds, warned in run_ranks(_layers_body, 2, launcher=Forked("torch"), timeout=50):
        words = [
            "`num_attention_heads` is 3: expected a multiple of `tensor_parallel_degree` 2",
            "`intermediate_size` is 7",
            "`in_features` of DistributedLinear is 5",
        ]
        for (kind, text, seconds), word in zip(found, words, strict=True):
            assert kind in ("SMPValidationError", "NotDivisibleError")
            assert word in text
            assert seconds < SECONDS
        # Modules of the script that cannot be divided stay whole, and a warning says why.
        assert kinds == ["Linear"] * 3
        assert any("shares a parameter with another module" in text for text in warned)
        assert any("`in_features` of DistributedLinear is 3" in text for text in warned)


def _tied_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    inner[1].weight = inner[0].weight
    smp.set_partition(inner[1], 1)
    model = smp.DistributedModel(inner)

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    found = _timed(lambda: step(model, torch.ones(4, 4)))
    smp.shutdown()
    return found


@pytest.mark.timeout(60)
def test_a_weight_that_is_tied_across_partitions():
    for kind, text, seconds in run_ranks(_tied_body, 2, launcher=Forked("torch"), timeout=50):
        assert kind == "SMPPartitionError", text
        assert "`0.weight`" in text
        assert "0" in text
        assert "1" in text
        assert seconds < SECONDS


def _killed_body(victim, settings, folder):
    import signal

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, start

    model, _, step = start(settings)
    step(model, batch_of(0))

    def die(module, inputs):
        with open(f"{folder}/killed", "w") as file:
            file.write(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if smp.rank() == victim:
        for each in model.local_modules():
            each.register_forward_pre_hook(die)
    step(model, batch_of(1))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("victim", [0, 3, *(pytest.param(rank, marks=pytest.mark.more) for rank in (1, 2))])
def test_a_rank_that_dies_in_a_step_is_named_on_every_other(victim, tmp_path):
    settings = {"tensor_parallel_degree": 2, "partitions": 2, "ddp": True, "microbatches": 2}
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(_killed_body, 4, victim, settings, str(tmp_path), launcher=Forked("torch"), timeout=80)
    outcome = failed.value.outcome
    killed = float((tmp_path / "killed").read_text())
    for each in outcome.ranks:
        if each.rank != victim:
            assert "SMPPeerFailedError" in each.error, each
            assert f"rank {victim}" in each.error, each
            assert each.ended_at - killed < SECONDS, each


def _results_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    smp.set_partition(network[1], 1)
    model = smp.DistributedModel(network)

    @smp.step
    def step(model, x):
        output = model(x)
        model.backward(output.sum())
        return output

    def fail(*_):
        raise MemoryError("no memory for the results")

    step(model, torch.ones(4, 4))
    smp.barrier()
    if smp.rank() == 1:
        model.pipeline.results = fail
    return _timed(lambda: step(model, torch.ones(4, 4)))


@pytest.mark.timeout(60)
def test_a_rank_that_cannot_hold_the_results_of_a_step_tells_the_others():
    (kind, text, seconds), (own, _, _) = run_ranks(_results_body, 2, launcher=Forked("torch"), timeout=50)
    assert own == "MemoryError"
    assert kind == "SMPPeerFailedError"
    assert "MemoryError: no memory for the results" in text
    assert seconds < SECONDS
