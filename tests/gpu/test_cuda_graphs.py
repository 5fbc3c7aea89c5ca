"""The option `cuda_graphs`: losses and gradients have the bits of a pipeline without graphs; what a graph would not
notice is noticed, and what it cannot contain is named.
"""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import needs_four, needs_one

pytestmark = [pytest.mark.timeout(280), needs_one]

#: Models whose stages are captured, and models that have a reason against it.
CAPTURED = ("mlp", "skip", "tied", "nested", "two_by_two", "in_place", "batch_norm", "checkpointed", "gpt2", "t5")
OTHERS = {"asking": "it reads values in its body", "dictionaries": "takes or returns lists or objects that it changes"}


def _device(dtype="float64"):
    import torch

    from smdistributed.modelparallel.torch.runtime import recomputation

    # The models are small. Without a lower limit, their backwards recompute tensors, too.
    recomputation._MIN_BYTES = 0
    torch.cuda.set_device(devices.own())
    torch.set_default_dtype(getattr(torch, dtype))
    return torch.device("cuda", torch.cuda.current_device())


def _train(
    name,
    schedule,
    looped,
    graphs,
    device,
    change=None,
    settings=None,
    probability=None,
    autocast="",
    recompute=None,
    waits=False,
):
    """Trains for six steps.

    Args:
        change: Called in the fifth step.
        settings: More of `smp.init`.
        probability: That of dropout, if the model has any.
        autocast: Where it is entered: `inside` of the step's body or `outside`; and with which type.
        recompute: The piece of the model that has activation checkpointing.
        waits: Whether the last piece of the model waits for the device.

    Returns losses and gradients of each step, the number of graphs, and the warnings.
    """
    import contextlib
    import warnings

    import torch

    import smdistributed.modelparallel.torch as smp
    from support.models import MODELS

    smp.init(
        {
            "partitions": 2,
            "microbatches": 4,
            "pipeline": schedule,
            "auto_partition": False,
            "default_partition": 0,
            "cuda_graphs": graphs,
            **(settings or {}),
        }
    )
    torch.manual_seed(7)
    case = MODELS[name]()
    for module in case.model.modules():
        if probability is not None and isinstance(module, torch.nn.Dropout):
            module.p = probability
    if waits:
        case.pieces[-1].forward = lambda x, layer=case.pieces[-1]: type(layer).forward(layer, x) * (x.sum().item() + 2)
    rows = 4 if looped and len(case.pieces) >= 4 else 2
    for place, piece in enumerate(case.pieces):
        place = case.together[0] if place in case.together else place
        smp.set_partition(piece, place * rows // len(case.pieces) % 2)
    model = smp.DistributedModel(case.model)
    if recompute is not None:
        smp.set_activation_checkpointing(case.pieces[recompute])
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def cast(place):
        where, _, dtype = autocast.partition(" ")
        return torch.autocast("cuda", getattr(torch, dtype)) if where == place else contextlib.nullcontext()

    @smp.step
    def step(model, *batch):
        with cast("inside"):
            outputs = case.body(model, *batch)
        model.backward(outputs[0])
        return outputs[0]

    seen = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(6):
            # Gradients of two steps add up once, and are zeros instead of `None` once.
            if number != 4:
                optimizer.zero_grad(set_to_none=number != 3)
            if change is not None and number == 4:
                change(case, model)
            batch = (each.to(device) for each in case.batch(number + 10 * smp.dp_rank()))
            batch = (each.to(torch.get_default_dtype()) if each.is_floating_point() else each for each in batch)
            with cast("outside"):
                losses = step(model, *batch)
            seen[number] = torch.stack(list(losses)).clone()
            for path, parameter in model.local_named_parameters():
                seen[number, path] = None if parameter.grad is None else parameter.grad.clone()
            optimizer.step()
    seen["random"] = torch.rand(3), torch.rand(3, device=device)
    capture = model.pipeline._capture
    count = 0 if capture is None else capture.num_graphs
    smp.shutdown()
    return seen, count, [str(each.message) for each in caught]


def _same(one, other):
    import torch

    if one.keys() != other.keys():
        return False
    if not all(map(torch.equal, one["random"], other["random"])):
        return False
    pairs = [(tensor, other[key]) for key, tensor in one.items() if key != "random"]
    return all(
        mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
        for mine, theirs in pairs
    )


def _equality_body():
    import torch

    device = _device()
    # Sums of several thread blocks have no fixed order otherwise.
    torch.backends.cudnn.deterministic = True
    failed = []
    for schedule, looped in (("interleaved", False), ("zero_bubble", True)):
        for name in CAPTURED:
            alone, _, _ = _train(name, schedule, looped, False, device)
            captured, count, texts = _train(name, schedule, looped, True, device)
            if count == 0:
                failed.append(f"{name}, {schedule}: no graphs, {[each for each in texts if 'graph' in each]}")
            elif not _same(alone, captured):
                failed.append(f"{name}, {schedule}: other numbers with {count} graphs")
    return failed


def test_losses_and_gradients_are_those_without_graphs():
    pytest.importorskip("transformers")
    assert run_ranks(_equality_body, 2, timeout=250) == [[]] * 2


def _draws_and_casts_body():
    import torch

    device = _device("float32")
    torch.backends.cudnn.deterministic = True
    failed = []
    for name, schedule, autocast, probability, recompute in (
        ("gpt2", "interleaved", "inside bfloat16", 0.0, None),
        ("gpt2", "zero_bubble", "outside bfloat16", 0.3, None),
        ("gpt2", "interleaved", "", 0.3, None),
        ("dropout", "zero_bubble", "inside bfloat16", 0.2, None),
        ("mlp", "zero_bubble", "inside float16", None, None),
        ("tied", "interleaved", "inside bfloat16", None, None),
        ("mlp", "interleaved", "outside bfloat16", None, 1),
        ("in_place", "zero_bubble", "inside bfloat16", None, None),
    ):
        looped = schedule == "zero_bubble"
        arguments = {"probability": probability, "autocast": autocast, "recompute": recompute}
        alone, _, _ = _train(name, schedule, looped, False, device, **arguments)
        captured, count, texts = _train(name, schedule, looped, True, device, **arguments)
        if count == 0:
            failed.append((name, schedule, arguments, "no graphs", [each for each in texts if "graph" in each]))
        elif not _same(alone, captured):
            failed.append((name, schedule, arguments, f"other numbers with {count} graphs"))
    return failed


def test_random_numbers_and_casts_are_those_without_graphs():
    pytest.importorskip("transformers")
    assert run_ranks(_draws_and_casts_body, 2, timeout=120) == [[]] * 2


def _replicas_body():
    device = _device()
    failed = []
    for name, schedule in (("gpt2", "interleaved"), ("in_place", "zero_bubble")):
        settings = {"ddp": True}
        alone, _, _ = _train(name, schedule, False, False, device, settings=settings)
        captured, count, texts = _train(name, schedule, False, True, device, settings=settings)
        if count == 0 or not _same(alone, captured):
            failed.append((name, schedule, count, [each for each in texts if "graph" in each]))
    return failed


@needs_four
def test_replicas_have_the_gradients_of_pipelines_without_graphs():
    pytest.importorskip("transformers")
    assert run_ranks(_replicas_body, 4, timeout=120) == [[]] * 4


def _reasons_body():
    device = _device()
    failed = []
    for name, reason in OTHERS.items():
        alone, _, _ = _train(name, "interleaved", False, False, device)
        other, count, texts = _train(name, "interleaved", False, True, device)
        told = [each for each in texts if "`cuda_graphs` has no effect" in each and reason in each]
        if count or len(told) != 1 or not _same(alone, other):
            failed.append((name, count, texts))
    # Only the rank of the module in question has a reason.
    told = []
    for name, options, reason in (
        ("dropout", {"recompute": 3}, "draws random numbers in a module with activation checkpointing"),
        ("dropout", {"waits": True}, "cannot be captured: "),
    ):
        alone, _, _ = _train(name, "interleaved", False, False, device, **options)
        other, _, texts = _train(name, "interleaved", False, True, device, **options)
        if not _same(alone, other):
            failed.append((name, options))
        told.append(sum("`cuda_graphs` has no effect" in each and reason in each for each in texts))
    return failed, told


def test_steps_without_graphs_say_why_once():
    results = run_ranks(_reasons_body, 2, timeout=120)
    assert [failed for failed, _ in results] == [[]] * 2
    assert [told for _, told in results] == [[0, 0], [1, 1]]


def _changes_body():
    import torch

    device = _device()
    calls = []

    def scale(case, _):
        for piece in case.pieces:
            for module in piece.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.eps = 0.5

    def hook(case, _):
        for piece in case.pieces:
            for module in piece.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.register_forward_hook(lambda *arguments: calls.append(1))

    def hook_of_parameter(_, model):
        for path, parameter in model.local_named_parameters():
            if path == "scale":
                parameter.register_hook(lambda _: calls.append(1))

    failed, told = [], []
    for name, change, reason in (
        ("gpt2", scale, None),
        ("gpt2", hook, "has a hook, which a graph would not call"),
        ("mlp", hook_of_parameter, "has a hook on its gradient, which a graph would not call"),
    ):
        alone, _, _ = _train(name, "interleaved", False, False, device, change)
        expected, calls[:] = len(calls), []
        other, count, texts = _train(name, "interleaved", False, True, device, change)
        found = [each for each in texts if "cuda_graphs" in each]
        is_right = all(reason is not None and reason in each for each in found) and (found or count)
        if not _same(alone, other) or len(calls) != expected or not is_right:
            failed.append((change.__name__, count, len(calls), expected, found))
        told.append(len(found))
        calls.clear()
    return failed, told


def test_changed_attributes_and_new_hooks_are_noticed():
    pytest.importorskip("transformers")
    results = run_ranks(_changes_body, 2, timeout=120)
    assert [failed for failed, _ in results] == [[]] * 2
    # The parameter with a hook is on one of the ranks.
    assert sorted(told for _, told in results) == [[0, 1, 0], [0, 1, 1]]
