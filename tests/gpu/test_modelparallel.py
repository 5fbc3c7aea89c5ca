"""Pipelines on GPUs: gradients equal those of one process, for all schedules and numbers of replicas; ranks share the
random numbers of the body; a rank that dies ends the others.
"""

from __future__ import annotations

import itertools
import json

import pytest

from support import devices, run_ranks, start_ranks
from support.devices import NUM_RANKS, needs_one
from support.rank_main import announce

pytestmark = [pytest.mark.timeout(280), needs_one]

MODELS = ("mlp", "nested", "skip", "tied", "two_by_two", "dictionaries", "batch_norm", "in_place", "asking", "gpt2")
#: Partitions, microbatches, schedule, and whether a rank has several stages. Replicas use the remaining ranks.
ROWS = (
    (1, 4, "interleaved", False),
    (2, 4, "interleaved", False),
    (2, 8, "zero_bubble", True),
    (4, 8, "interleaved", False),
)


def _device():

    import torch

    torch.cuda.set_device(devices.own())
    return torch.device("cuda", torch.cuda.current_device())


def _case(smp, torch, name, partitions, microbatches, pipeline, looped, device):
    """Runs and compares three steps of one model with one row; returns a description of the error, or None."""
    import copy

    from support.models import MODELS

    smp.init(
        {
            "partitions": partitions,
            "microbatches": microbatches,
            "pipeline": pipeline,
            "ddp": True,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    torch.manual_seed(7)
    case = MODELS[name]()
    alone = copy.deepcopy(case.model).to(device)
    rows = partitions * (2 if looped and len(case.pieces) >= 2 * partitions else 1)
    for place, piece in enumerate(case.pieces):
        place = case.together[0] if place in case.together else place
        smp.set_partition(piece, place * rows // len(case.pieces) % partitions)
    model = smp.DistributedModel(case.model)
    optimizers = [
        smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01)),
        torch.optim.Adam(alone.parameters(), lr=0.01),
    ]

    @smp.step
    def step(model, *batch):
        outputs = case.body(model, *batch)
        model.backward(outputs[0])
        return outputs[0]

    worst, replicas = 0.0, smp.dp_size()
    for number in range(3):
        batches = [tuple(each.to(device) for each in case.batch(number * 8 + replica)) for replica in range(replicas)]
        losses = step(model, *batches[smp.dp_rank()])
        for replica, batch in enumerate(batches):
            for place, piece in enumerate(zip(*(each.chunk(microbatches) for each in batch), strict=True)):
                loss = case.body(alone, *piece)[0]
                (loss / microbatches / replicas).backward()
                if replica == smp.dp_rank():
                    worst = max(worst, (losses[place] - loss).abs().item())
        reference = dict(alone.named_parameters())
        for path, parameter in model.local_named_parameters():
            theirs = reference[path].grad
            if (parameter.grad is None) != (theirs is None):
                return f"step {number}: gradient of `{path}`"
            if theirs is not None:
                scale = max(theirs.abs().max().item(), 1e-3)
                worst = max(worst, (parameter.grad - theirs).abs().max().item() / scale)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for path, parameter in model.local_named_parameters():
        worst = max(worst, (parameter - reference[path]).abs().max().item())
    return f"off by {worst:.1e}" if worst > 1e-8 else None


def _equality_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    device = _device()
    torch.set_default_dtype(torch.float64)
    failed = []
    for row in ROWS:
        if row[0] > NUM_RANKS:
            continue
        for name in MODELS:
            # Buffers follow the first replica, so batch statistics with several replicas differ from those of one
            # process.
            if name == "batch_norm" and row[0] < NUM_RANKS:
                continue
            error = _case(smp, torch, name, *row, device)
            if error is not None:
                failed.append(f"{name}, {row}: {error}")
            smp.shutdown()
    return failed


def test_gradients_of_pipelines_equal_those_of_one_process():
    pytest.importorskip("transformers")
    assert run_ranks(_equality_body, NUM_RANKS, timeout=240) == [[]] * NUM_RANKS


def _sums_body():
    import copy
    import itertools

    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({})
    _device()
    torch.manual_seed(1)
    failed = []
    for half_type in (torch.bfloat16, torch.float16):
        # Sizes that are whole vectors and not, one too small for the kernel, and a transposed weight.
        sizes = (1024, 513, 1001, 300, 2048, 8)
        model = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes))).cuda()
        model[3].weight.data = model[3].weight.data.mT.contiguous().mT
        models = [model, copy.deepcopy(model)]
        inputs = [torch.randn(16, sizes[0], device="cuda") for _ in range(3)]
        for turn, each in enumerate(models):
            with torch.autocast("cuda", half_type):
                outputs = [each(x) for x in inputs]
            if turn == 0:
                torch.ops.smd.accumulate_casts(outputs[:1])
            torch.manual_seed(2)
            for output in outputs:
                output.backward(torch.randn_like(output))
        for (name, one), other in zip(model.named_parameters(), models[1].parameters(), strict=True):
            if not torch.equal(one.grad, other.grad):
                failed.append(f"{half_type}, {name}")
    smp.shutdown()
    return failed


def test_gradients_of_casts_add_up_as_in_pytorch():
    assert run_ranks(_sums_body, 1, timeout=60) == [[]]


def _products_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    smp.init({})
    _device()
    torch.manual_seed(1)
    failed = []
    for half_type in (torch.bfloat16, torch.float16):
        for later in (False, True):
            layer = torch.nn.Linear(1000, 520).cuda()
            exact = torch.zeros(520, 1000, dtype=torch.float64, device="cuda")
            waiting = []
            for _ in range(3):
                x = torch.randn(4, 16, 1000, device="cuda", requires_grad=True)
                with torch.autocast("cuda", half_type):
                    output = layer(x)
                gradient = torch.randn_like(output)
                exact += gradient.flatten(0, 1).double().T @ x.detach().to(half_type).flatten(0, 1).double()
                weights = torch.classes.smd.WeightGradients([output], [x])
                torch.autograd.backward(output, gradient, inputs=weights.begin(later))
                waiting.append(weights)
            if later and layer.weight.grad is not None:
                failed.append(f"{half_type}: the gradient was not deferred")
            for weights in waiting:
                weights.run()
            error = ((layer.weight.grad - exact).norm() / exact.norm()).item()
            # A rounding to the narrow type would give an error of 1e-4 (float16) or 1e-3 (bfloat16).
            if layer.weight.grad.dtype != torch.float32 or error > 1e-5:
                failed.append(f"{half_type}, {later}: {error:.1e}")
    smp.shutdown()
    return failed


def test_deferred_weight_gradients_are_not_rounded_to_the_narrow_type():
    assert run_ranks(_products_body, 1, timeout=60) == [[]]


def _offloading_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    device = _device()
    rows, width, layers, microbatches = 2048, 2048, 8, 16
    peaks, gradients = [], []
    for offload in (False, True):
        smp.init(
            {
                "partitions": 2, "microbatches": microbatches, "active_microbatches": microbatches,
                "pipeline": "simple", "auto_partition": False, "default_partition": 0,
                "offload_activations": offload, "activation_loading_horizon": 1,
            }
        )  # fmt: skip
        torch.manual_seed(3)
        network = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers))
        )
        for place, part in enumerate(network):
            smp.set_partition(part, place * 2 // layers)
        smp.set_activation_checkpointing(network)
        model = smp.DistributedModel(network)

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(microbatches * rows, width, generator=torch.Generator().manual_seed(1)).to(device)
        for _ in range(3):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(model, x)
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append([parameter.grad.clone() for parameter in model.local_parameters()])
        smp.shutdown()
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    return peaks


def test_offloaded_activations_save_device_memory():
    for kept, offloaded in run_ranks(_offloading_body, 2, timeout=120):
        # Kept are 16 microbatches x 4 checkpointed modules of 16 MiB each. With offloading, the device holds those of 2
        # tasks and messages.
        assert offloaded < 0.7 * kept, (kept, offloaded)


def _unused_prefetches_body():
    """Drops prefetched tensors before their copies have begun; returns numbers that the copies wrote elsewhere."""
    import torch

    from smdistributed.modelparallel.torch.runtime import offloading

    device = _device()
    host, elems, layers = offloading.CudaHost(device), 1 << 22, 4
    wrong = []
    # With a backward, which uses the tensors, and without one.
    for is_used in (True, False):
        batch = offloading.Batch(host, layers)
        x = torch.ones(elems, device=device, requires_grad=True)
        with batch.hooks():
            loss = sum((x * torch.full((elems,), float(value), device=device)).sum() for value in range(1, layers + 1))
        torch.cuda.synchronize()
        with torch.cuda.stream(host._back):
            # About 0.2 s.
            torch.cuda._sleep(400_000_000)
        batch.prefetch_all()
        if is_used:
            loss.backward()
            assert torch.equal(x.grad, torch.full_like(x, sum(range(1, layers + 1))))
        del loss
        # The allocator's free blocks of this size include those of the prefetched tensors.
        later = [torch.zeros(elems, device=device) for _ in range(4 * layers)]
        torch.cuda.synchronize()
        wrong.append(sum(int(each.count_nonzero()) for each in later))
    return wrong


def test_memory_of_unused_prefetched_activations_is_reused_after_their_copies():
    assert run_ranks(_unused_prefetches_body, 1, timeout=60) == [[0, 0]]


def _check_random():
    import torch

    import smdistributed.modelparallel.torch as smp

    device = _device()
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(smp.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))
    smp.set_partition(model[2], 1)
    model = smp.DistributedModel(model)

    @smp.step
    def step(model, x):
        noise = torch.rand(4, device=x.device)
        loss = (model(x) * noise.sum()).square().mean()
        model.backward(loss)
        return loss, noise, torch.rand(2)

    found = [step(model, torch.ones(4, 64, device=device)) for _ in range(2)]
    drawn = [tensor.cpu() for _, *outputs in found for output in outputs for tensor in output]
    # The body draws from both generators, so all ranks must continue with the same generator states.
    drawn += [torch.cuda.get_rng_state(), torch.get_rng_state()]
    states_of_ranks = smp.allgather(drawn, smp.PP_GROUP)
    assert all(torch.equal(a, b) for a, b in zip(*states_of_ranks, strict=True))
    assert len({tuple(tensor.tolist()) for tensor in drawn}) == len(drawn)


def test_random_numbers_of_the_body_are_shared():
    run_ranks(_check_random, 2, timeout=120)


#: Milliseconds for which each stage of the test below occupies the device.
BUSY_MS = 20


def _timeline_body(graphs):
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init(
        {"partitions": 2, "microbatches": 3, "auto_partition": False, "default_partition": 0, "cuda_graphs": graphs}
    )
    device = _device()
    khz = torch.cuda.get_device_properties(device).clock_rate

    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            torch.cuda._sleep(BUSY_MS * khz)
            return self.inner(x)

    layers = [Busy(), Busy()]
    for place, layer in enumerate(layers):
        smp.set_partition(layer, place)
    model = smp.DistributedModel(nn.Sequential(*layers))

    @smp.step
    def train(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(4):
        train(model, torch.ones(6, 8, device=device))


@pytest.mark.parametrize("graphs", [False, True])
def test_the_timeline_has_the_times_of_the_device(graphs, tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(_timeline_body, 2, graphs, env={"SMD_TIMELINE": str(path)}, timeout=120)
    events = [json.loads(line.rstrip(",\n")) for line in path.read_text().splitlines()[1:] if line.startswith("{")]
    forwards = sorted((e["pid"], e["ts"], e["dur"]) for e in events if e["name"] == "forward")
    # Two ranks, four steps, three microbatches.
    assert len(forwards) == 24
    # Ranks that share a GPU take turns; the device's clock may be a little faster than it says.
    assert all(duration > 0.7 * BUSY_MS * 1e3 for _, _, duration in forwards), forwards
    for (rank, start, duration), (next_rank, next_start, _) in itertools.pairwise(forwards):
        assert rank != next_rank or start + duration < next_start + 100, "stages of one stream do not overlap"


def _kill_body(victim):
    import torch

    import smdistributed.modelparallel.torch as smp

    device = _device()
    smp.init({"partitions": NUM_RANKS, "microbatches": 4, "auto_partition": False, "default_partition": 0})
    layers = [torch.nn.Linear(256, 256) for _ in range(smp.size())]
    for place, layer in enumerate(layers):
        smp.set_partition(layer, place)
    model = smp.DistributedModel(torch.nn.Sequential(*layers))

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.ones(8, 256, device=device)
    for number in range(1 << 30):
        step(model, x).reduce_mean().item()
        if number == 20 and smp.rank() == victim:
            announce("training")


@pytest.mark.parametrize("victim", [0, NUM_RANKS - 1])
def test_a_killed_rank_ends_the_others(victim):
    with start_ranks(_kill_body, NUM_RANKS, victim, timeout=120) as job:
        job.wait_for("training")
        killed = job.kill(victim)
        outcome = job.wait()
    assert not outcome.timed_out, outcome.describe()
    for rank in outcome.ranks:
        if rank.rank != victim:
            assert f"rank {victim} " in (rank.error or ""), outcome.describe()
            assert rank.ended_at - killed < 10.0, outcome.describe()
