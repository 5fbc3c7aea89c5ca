"""Attributes, parameters and buffers that share memory: steps give the results of plain PyTorch, or raise."""

from __future__ import annotations

from typing import Any

import pytest

from parity.step_bodies import run_all
from support import Forked, run_ranks
from support.step_bodies import Program

FORKED = Forked("torch")
_LAYERS = {"a": "Momentum", "b": "Offset", "d": "Mode"}
#: Partitions on which `a` and `b` are together, and on which they are not.
_TOGETHER, _APART = {"begin": 0, "a": 1, "b": 1, "d": 0}, {"begin": 0, "a": 1, "b": 0, "d": 0}


def _program(places: dict[str, int] | None, prepare: str, body: list[str], **parts: Any) -> Program:
    given = {"layers": _LAYERS, "schedule": "simple", "forward": [], "result": "loss, h", **parts}
    return Program(
        seed=1, partitions=2, dtype="float64", places=places, prepare=prepare.split("\n"), body=body, **given
    )


_VIEW = "net.b.offset = net.a.running[:]"
_BOTH = ["h = net.a(h)", "h = net.b(h)"]
#: A call that the schedule could run before an earlier one.
_TWISTED = ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"]
EQUAL = {
    "a view of a buffer that does not change, on another partition": _program(
        _APART, f"{_VIEW}\nnet.a.eval()\nnet.a.running.fill_(0.5)", ["h = net.a(h)", "h = net.b(h) + net.b.offset"]
    ),
    "a call reads a view of a buffer that another call changes": _program(_TOGETHER, _VIEW, _TWISTED),
    "a call reads a view of running statistics that another call changes": _program(
        _TOGETHER, "net.b.offset = net.a.norm.running_mean[:]", _TWISTED, layers=_LAYERS | {"a": "Norm"}
    ),
    "a call reads a buffer in a list, which another call changes": _program(
        _TOGETHER, "net.b.more[0] = net.a.running", _TWISTED
    ),
    "a call reads a view that the script takes of another view between steps": _program(
        _TOGETHER, "net.kept = net.a.running", _TWISTED, between=["if step == 1:\n    net.b.offset = net.kept[:]"]
    ),
    "a call reads a buffer that the script assigns between steps": _program(
        _TOGETHER, "net.kept = 1", _TWISTED, between=["if step == 1:\n    net.b.offset = net.a.running"]
    ),
    "two buffers are views of one memory": _program(
        _TOGETHER, "net.b.running = net.a.running[:]", [*_TWISTED, "h = h + net.a.running"],
        layers=_LAYERS | {"b": "Momentum"},
    ),
    "two parameters are views of one memory": _program(
        _TOGETHER, "net.b.linear.bias = nn.Parameter(net.a.linear.bias.data[:])", _BOTH
    ),
    "two parameters are columns of one matrix, on two partitions": _program(
        _APART,
        "both = torch.randn(4, 8)\nnet.a.linear.weight = nn.Parameter(both[:, :4])\n"
        "net.b.linear.weight = nn.Parameter(both[:, 4:])", _BOTH,
    ),
    "the body reads and writes a buffer under its other names": _program(
        _TOGETHER, "net.b.offset = net.a.running\nnet.kept = [net.a.running]",
        ["net.b.offset.add_(1)", "h = torch.tanh(net.d(net.b(net.a(h)) + net.a.running)) + net.b.offset + net.kept[0]"],
    ),
    "the model has parameters in a list": _program(
        _TOGETHER, "net.kept = [net.a.linear.bias]", ["h = net.d(net.a(h)) + net.kept[0]", "h = net.b(h)"],
        forward=["h = net.d(h) * net.kept[0]"],
    ),
    "a module without parameters reads a parameter": _program(
        _TOGETHER, "net.c.register_forward_hook(lambda module, args, out: out + module.kept[0][:2])\n"
        "net.c.kept = [net.a.linear.bias]", ["h = net.a(h)", "h = h + net.c(h).mean()"], layers=_LAYERS | {"c": "Cut"},
    ),
    "a buffer that the script replaces between steps": _program(
        _TOGETHER, "net.kept = 1", _BOTH, between=["if step == 1:\n    net.a.running = torch.ones(4)"]
    ),
    "an automatic partition keeps modules with one memory together": _program(
        None, "net.b.more[0] = net.a.linear.bias", _BOTH
    ),
}  # fmt: skip
_MOVED = "on partition 1 changes `a.running`; `b.offset` of a module on another partition refers"
_ONE = "modules that share parameters or buffers, or views of them, go to one partition"
REFUSED = {
    "a call changes a buffer of which another partition has a view": (_program(_APART, _VIEW, _BOTH), _MOVED),
    "a call changes running statistics of which another partition has a view": (
        _program(
            _APART, "net.b.offset = net.a.norm.running_mean[:]", _BOTH, layers=_LAYERS | {"a": "Norm"}
        ),
        "`a` on partition 1 changes `a.norm.running_mean`; `b.offset` of a module on another partition refers",
    ),
    "a call changes a buffer that another partition has in an attribute": (
        _program(_APART, "net.b.offset = net.a.running", _BOTH), _MOVED,
    ),
    "the body changes a buffer of which another partition has a view": (
        _program(_APART, f"{_VIEW}\nnet.a.eval()", ["net.a.running.add_(1)", *_BOTH]), _MOVED,
    ),
    "the body reads a view of a buffer that a call changes": (
        _program(_TOGETHER, _VIEW, ["h = net.d(net.a(h)) + net.b.offset"]),
        "`b.offset` shares memory with `a.running`, which is on partition 1 and changes",
    ),
    "the body reads a view of a buffer, which a later call changes": (
        _program(_TOGETHER, _VIEW, ["h = h + net.b.offset", "h = net.a(h)"]),
        "has used `b.offset`, a view of it",
    ),
    "the body reads a view of a parameter": (
        _program(_TOGETHER, "net.kept = net.a.linear.bias.data[:]", ["h = net.a(h) + net.kept"]),
        "`kept` shares memory with `a.linear.bias`, which is on partition 1 and changes",
    ),
    "the body writes to a view of a buffer": (
        _program(_TOGETHER, _VIEW, ["net.b.offset.add_(1)", *_BOTH]),
        "`add_` writes to `b.offset`, which shares memory with `a.running`",
    ),
    "a call writes to a view of another module's buffer": (
        _program(_TOGETHER, "net.b.seen = net.a.running[:]", _BOTH, layers=_LAYERS | {"b": "Seen"}),
        "`b` writes to `b.seen`, which shares memory with `a.running`",
    ),
    "a buffer changes of which another partition has got a view": (
        _program(
            _APART, "net.kept = net.a.running", ["h = net.a(h)", "h = net.b(net.d(h))"],
            between=["if step == 1:\n    net.b.offset = net.kept[:]"],
        ),
        "has changed the content of `b.offset`; a module on partition 0 has it now",
    ),
    "another partition has a parameter in a list": (
        _program(_APART, "net.b.more[0] = net.a.linear.bias", _BOTH),
        f"`a.linear.bias` on partition 1 and `b.more` on partition 0 are one tensor: {_ONE}",
    ),
    "another partition has a view of a parameter": (
        _program(_APART, "net.b.offset = net.a.linear.bias.data[:]", _BOTH),
        f"`a.linear.bias` on partition 1 and `b.offset` on partition 0 share memory: {_ONE}",
    ),
    "buffers on two partitions are views of one memory": (
        _program(_APART, "net.b.running = net.a.running[:]", _BOTH, layers=_LAYERS | {"b": "Momentum"}),
        f"`a.running` on partition 1 and `b.running` on partition 0 share memory: {_ONE}",
    ),
    "parameters on two partitions are views of one memory": (
        _program(_APART, "net.b.linear.bias = nn.Parameter(net.a.linear.bias.data[:])", _BOTH),
        f"`a.linear.bias` on partition 1 and `b.linear.bias` on partition 0 share memory: {_ONE}",
    ),
}  # fmt: skip


@pytest.mark.timeout(240)
def test_shared_memory_has_the_results_of_plain_pytorch():
    results = run_all(dict(enumerate(EQUAL.values())), 2)
    wrong = [f"{name}: {': '.join(results[at])}" for at, name in enumerate(EQUAL) if results[at][0] != "equal"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(240)
def test_shared_memory_that_a_partition_would_not_see_changed_raises():
    results = run_all({at: program for at, (program, _) in enumerate(REFUSED.values())}, 2)
    for at, (name, (_, text)) in enumerate(REFUSED.items()):
        kind, description = results[at]
        assert kind == "raises", f"{name}: {kind}: {description}"
        assert text in description, f"{name}: {description}"


def _load_body(when: str) -> list[Any]:
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.exceptions import SMPError

    class Shifted(nn.Module):
        def __init__(self, shift: torch.Tensor) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(2, 2), shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 0 + self.shift

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.BatchNorm1d(2).eval()
            self.second = Shifted(self.first.running_mean[:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x) + self.first(x) * 0

    smp.init({"partitions": 2, "microbatches": 1, "auto_partition": False, "default_partition": 0})
    model = Model()
    smp.set_partition(model.second, 1)
    model = smp.DistributedModel(model)

    @smp.step
    def step(model, x):
        return model(x)

    values = dict(Model().state_dict()) | {"first.running_mean": torch.full((2,), 3.0)}
    if when == "before":
        model.load_state_dict(values)
    found = [step(model, torch.ones(2, 2)).outputs[0].tolist()]
    if when == "after":
        model.load_state_dict(values)
        found.append(step(model, torch.ones(2, 2)).outputs[0].tolist())
    if when == "script" and smp.pp_rank() == 0:
        model.module.first.running_mean.fill_(3.0)
    if when == "script":
        try:
            step(model, torch.ones(2, 2))
        except SMPError as error:
            found.append(str(error))
    return found


@pytest.mark.timeout(130)
def test_a_loaded_state_reaches_views_on_other_partitions():
    for found in run_ranks(_load_body, 2, "before", launcher=FORKED, timeout=120):
        assert found == [[[3.0, 3.0], [3.0, 3.0]]]
    for found in run_ranks(_load_body, 2, "after", launcher=FORKED, timeout=120):
        assert found == [[[0.0, 0.0], [0.0, 0.0]], [[3.0, 3.0], [3.0, 3.0]]]


@pytest.mark.timeout(130)
def test_a_script_that_changes_a_buffer_of_which_another_partition_has_a_view_raises():
    for found in run_ranks(_load_body, 2, "script", launcher=FORKED, timeout=120):
        assert "the script has changed `first.running_mean` in place; `second.shift` on another" in found[1]
