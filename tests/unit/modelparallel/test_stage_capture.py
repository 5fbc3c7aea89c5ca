"""Parts of the capture of stages that need no GPU: the memory of inputs, the number of copies, excluded options."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel import config  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPConfigError  # noqa: E402
from smdistributed.modelparallel.torch.runtime import capture_inputs, stage_capture  # noqa: E402
from smdistributed.modelparallel.torch.tracing.attributes import captured_state  # noqa: E402


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(4.0).view(1, 1, 4).expand(2, 3, 4),
        torch.arange(2).bool().view(2, 1, 1).expand(2, 3, 4),
        torch.arange(6.0).view(2, 3)[:, :, None].expand(2, 3, 4),
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["contiguous", "transposed", "expanded", "mask", "gate", "scalar", "empty"],
)
def test_memory_for_inputs_keeps_strides_and_its_address(tensor):
    memory = capture_inputs.Buffer.like(tensor)
    address = memory.tensor.data_ptr()
    for _ in range(2):
        memory.tensor.as_strided(memory._memory.shape, memory._memory.stride()).zero_()
        memory.fill(tensor)
        assert torch.equal(memory.tensor, tensor)
        # What comes from another rank, or as a copy, has other strides.
        memory.fill(tensor.contiguous())
        assert torch.equal(memory.tensor, tensor)
        assert memory.tensor.stride() == tensor.stride()
        assert memory.tensor.data_ptr() == address


def test_as_many_copies_as_microbatches_are_active():
    one = [("F", 0, 0, None), ("F", 0, 1, None), ("B", 0, 0, None), ("F", 0, 2, None), ("B", 0, 1, None)]
    assert stage_capture._most_active(one, 0) == 2
    # A split backward ends with the gradients of weights.
    split = [("F", 1, 0, None), ("I", 1, 0, None), ("F", 1, 1, None), ("W", 1, 0, None), ("F", 1, 2, None)]
    assert stage_capture._most_active(split, 1) == 2
    assert stage_capture._most_active(split, 0) == 0


class Settings:
    """An object that a module holds, as configurations are."""

    def __init__(self):
        self.scale, self.nested = 1.0, {"sizes": [1, 2]}


CHANGES = {
    "number": lambda module: setattr(module[1], "eps", 0.5),
    "mode": lambda module: module.eval(),
    "list": lambda module: module.scales.__setitem__(0, 9.0),
    "object": lambda module: setattr(module.settings, "scale", 2.0),
    "nested": lambda module: module.settings.nested["sizes"].append(3),
    "function": lambda module: setattr(module, "_activation", torch.tanh),
    "host tensor": lambda module: module.alpha.fill_(0.1),
    "hook": lambda module: module[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_attributes_and_hooks_are_noticed(change):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    module.scales, module.settings, module._activation = [1.0, float("nan")], Settings(), torch.relu
    module.alpha, module.adjacency = torch.tensor(0.5), torch.eye(2).to_sparse()
    module.settings.owner = module
    before = captured_state.captured_state([module])
    assert captured_state.captured_state([module]) == before
    CHANGES[change](module)
    assert captured_state.captured_state([module]) != before


def test_hooks_of_parameters_are_noticed():
    parameter = torch.nn.Parameter(torch.ones(2))
    before = captured_state.address_of(parameter)
    assert captured_state.address_of(parameter) == before
    parameter.register_hook(lambda gradient: gradient)
    other = captured_state.address_of(parameter)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len({before, other, captured_state.address_of(parameter)}) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"offload_activations": True},
        {"shard_optimizer_state": True, "ddp": True},
        {"tensor_parallel_degree": 2, "ddp": True},
    ],
)
def test_options_that_exclude_graphs_are_refused(other):
    with pytest.raises(SMPConfigError, match=f"`cuda_graphs` and `{next(iter(other))}` exclude each other"):
        config.read({"cuda_graphs": True, **other})


class Step:
    """A capture without a device: it counts, and `capturing` sets the gradients of `trained` parameters."""

    def __init__(self, monkeypatch):
        self.module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        self.parameters = dict(self.module.named_parameters())
        self.trained = [self.module[0].weight, self.module[1].weight]
        self.captured = self.version = 0
        self.capture = stage_capture.StageCapture(None, True)
        task = SimpleNamespace(module=self.module, context=SimpleNamespace(grad=True, autocast=()))
        graph = SimpleNamespace(stages=[SimpleNamespace(tasks=[0], has_backward=True)])
        self.mb = SimpleNamespace(stage_graph=graph, recording=SimpleNamespace(tasks=[task]))
        self.actions = [("F", 0, 0, None), ("F", 0, 1, None), ("B", 0, 0, None), ("B", 0, 1, None)]
        monkeypatch.setattr(stage_capture, "_obstacle", lambda *_: None)
        monkeypatch.setattr(self.capture, "_captured", self.capturing)

    def capturing(self, splits, copies, mb, parameters, casts, kept):
        self.captured += 1
        for parameter in self.trained:
            # As autograd does while a graph is captured: only a missing gradient is new.
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
        return {number: [object() for _ in range(copies[number])] for number in splits}

    def begin(self, key="step"):
        self.capture.begin_step(key, self.version, self.actions, self.mb, self.parameters)


def test_gradients_begin_with_what_the_script_has_set(monkeypatch):
    step = Step(monkeypatch)
    weight, bias = step.module[0].weight, step.module[0].bias
    weight.grad = torch.full_like(weight, 3.0)
    step.begin()
    memory = weight.grad
    assert memory.eq(3).all()
    assert bias.grad is None
    assert step.module[1].weight.grad.eq(0).all()
    assert step.capture.num_graphs == 2
    weight.grad = None
    step.begin()
    assert weight.grad is memory
    assert memory.eq(0).all()
    weight.grad = torch.full_like(weight, 5.0)
    step.begin("another step")
    assert weight.grad is memory
    assert memory.eq(5).all()
    assert (step.captured, step.capture.num_graphs) == (4, 4)


def test_a_failed_capture_leaves_gradients_as_they_were(monkeypatch):
    step = Step(monkeypatch)
    weight = step.module[0].weight
    weight.grad = torch.full_like(weight, 3.0)

    def fail(*_):
        step.module[1].weight.grad = torch.ones(2)
        raise stage_capture._UncapturableError("`a` waits")

    monkeypatch.setattr(step.capture, "_captured", fail)
    with pytest.warns(UserWarning, match="no effect on this rank's part of the step: `a` waits"):
        step.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.begin()
    assert step.capture.num_graphs == 0
    assert weight.grad.eq(3).all()
    assert step.module[1].weight.grad is None


def test_a_lack_of_memory_leaves_gradients_as_they_were_and_the_next_step_captures(monkeypatch):
    step = Step(monkeypatch)
    weight, capturing = step.module[0].weight, step.capturing

    def fail(splits, copies, *more):
        if max(copies.values()) > 1:
            raise torch.OutOfMemoryError("no")
        return capturing(splits, copies, *more)

    monkeypatch.setattr(step.capture, "_captured", fail)
    with pytest.raises(torch.OutOfMemoryError):
        step.begin()
    assert weight.grad is None
    monkeypatch.setattr(step.capture, "_captured", capturing)
    step.begin()
    assert step.capture.num_graphs == 2


def test_only_a_changed_module_is_captured_again_and_not_for_ever(monkeypatch):
    step = Step(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in range(stage_capture._MAX_CAPTURES):
            step.module[1].eps = 0.1 * change
            for _ in range(3):
                step.begin()
    # Each capture finds the parameters first.
    assert step.captured == 2 * stage_capture._MAX_CAPTURES
    step.module[1].eps = 7.0
    with pytest.warns(UserWarning, match="the step runs without graphs now"):
        step.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.begin()
    assert step.capture.num_graphs == 0
    assert step.capture.take(step.mb, 0) is None


def test_only_some_steps_have_graphs(monkeypatch):
    step = Step(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for number in range(stage_capture._MAX_PROGRAMS):
                step.begin(number)
    captured = step.captured
    with pytest.warns(UserWarning, match="different steps have graphs"):
        step.begin("one more")
    assert step.capture.take(step.mb, 0) is None
    assert step.captured == captured == 2 * stage_capture._MAX_PROGRAMS


def test_gradients_of_another_type_are_not_used_again(monkeypatch):
    step = Step(monkeypatch)
    weight = step.module[0].weight
    step.begin()
    assert weight.grad.dtype is torch.float32
    weight.grad = None
    weight.data = weight.data.to(torch.bfloat16)
    step.begin()
    assert weight.grad.dtype is torch.bfloat16


def test_steps_of_another_version_make_room(monkeypatch):
    step = Step(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step.version in range(3):
            for number in range(stage_capture._MAX_PROGRAMS):
                step.begin(number)
    assert step.capture.num_graphs == 2 * stage_capture._MAX_PROGRAMS


def test_sparse_gradients_have_no_graphs(monkeypatch):
    step = Step(monkeypatch)

    def sparse(*_):
        step.module[0].weight.grad = torch.eye(2).to_sparse()
        return {0: [object()]}

    monkeypatch.setattr(step.capture, "_captured", sparse)
    with pytest.warns(UserWarning, match="sparse gradients"):
        step.begin()
    assert step.capture.num_graphs == 0
    assert step.module[0].weight.grad is None
