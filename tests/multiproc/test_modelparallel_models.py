"""Pipelines of real ranks against one process: a table of models, every output, gradient and parameter."""

from __future__ import annotations

import pytest

from support import run_ranks

STEPS = 5


def _place(smp, case, partitions, looped):
    """Rows of neighbouring pieces go to the partitions; `looped`, two rows to each."""
    rows = partitions * (2 if looped and len(case.pieces) >= 2 * partitions else 1)
    for place, piece in enumerate(case.pieces):
        place = case.together[0] if place in case.together else place
        smp.set_partition(piece, place * rows // len(case.pieces) % partitions)


def _compare(torch, where, ours, expected, tolerance=1e-12):
    assert ours.shape == expected.shape, f"{where}: {ours.shape} instead of {expected.shape}"
    scale = max(expected.abs().max().item(), 1e-3) if expected.numel() else 1.0
    worst = (ours - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert worst <= tolerance, f"{where} is off by {worst:.1e}"


def run_case(smp, name, partitions, microbatches, pipeline, looped=False):
    """Five steps of one row of the table."""
    import copy

    import torch

    from support.models import MODELS

    where = f"{name}, {partitions} partitions, {microbatches} microbatches, {pipeline}{', looped' if looped else ''}"
    smp.init(
        {
            "partitions": partitions,
            "microbatches": microbatches,
            "pipeline": pipeline,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    torch.manual_seed(7)
    case = MODELS[name]()
    alone = copy.deepcopy(case.model) if name != "checkpointed" else MODELS[name]().model
    alone.load_state_dict(case.model.state_dict())
    _place(smp, case, partitions, looped)
    model = smp.DistributedModel(case.model)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01)),
        torch.optim.Adam(alone.parameters(), lr=0.01),
    ]

    @smp.step
    def step(model, *batch):
        outputs = case.body(model, *batch)
        model.backward(outputs[0])
        return outputs

    for number in range(STEPS):
        batch = case.batch(number)
        torch.manual_seed(number)
        outputs = step(model, *batch)
        torch.manual_seed(number)
        expected = []
        for piece in zip(*(each.chunk(microbatches) for each in batch), strict=True):
            expected.append(case.body(alone, *piece))
            (expected[-1][0] / microbatches).backward()
        for place, column in enumerate(zip(*expected, strict=True)):
            for microbatch, (ours, theirs) in enumerate(zip(outputs[place], column, strict=True)):
                spot = f"{where}, step {number}: output {place} of microbatch {microbatch}"
                if isinstance(theirs, torch.Tensor):
                    _compare(torch, spot, ours, theirs)
                else:
                    assert ours == pytest.approx(theirs, rel=1e-12), spot
        reference = dict(alone.named_parameters())
        for path, parameter in model.local_named_parameters():
            theirs = reference[path].grad
            assert (parameter.grad is None) == (theirs is None), f"{where}, step {number}: gradient of `{path}`"
            if theirs is not None:
                _compare(torch, f"{where}, step {number}: gradient of `{path}`", parameter.grad, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for path, parameter in model.local_named_parameters():
        _compare(torch, f"{where}: `{path}` after {STEPS} steps", parameter, reference[path], 1e-9)
    reference = dict(alone.named_buffers())
    for path, buffer in model.local_named_buffers():
        _compare(torch, f"{where}: buffer `{path}`", buffer.double(), reference[path].double())
    smp.shutdown()


def _table_body(partitions, rows):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.models import MODELS

    torch.set_default_dtype(torch.float64)
    for name in MODELS:
        for microbatches, pipeline, looped in rows:
            run_case(smp, name, partitions, microbatches, pipeline, looped)
    return len(MODELS)


ROWS = {
    1: [(1, "interleaved", False), (4, "interleaved", False)],
    2: [
        (1, "interleaved", False),
        (4, "interleaved", False),
        (8, "interleaved", False),
        (4, "simple", False),
        (4, "zero_bubble", False),
        (4, "interleaved", True),
    ],
    3: [(4, "interleaved", False), (4, "interleaved", True)],
    4: [(8, "interleaved", False), (4, "simple", False), (4, "zero_bubble", False)],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("partitions", list(ROWS))
def test_pipelines_equal_one_process(partitions):
    pytest.importorskip("transformers")
    assert run_ranks(_table_body, partitions, partitions, ROWS[partitions], timeout=290) == [16] * partitions
