"""Step bodies on two partitions compute what plain PyTorch computes in one process, or raise an error."""

from __future__ import annotations

import pytest

from support import Forked, more, run_ranks

FORKED = Forked("torch")


def _model(kind="plain"):
    """Returns the model's class: layers `a` and `b` on two partitions, which the body or the model's forward calls.

    Args:
        kind: Variant of the layers and of the forward that a body needs.
    """
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Scaled(nn.Module):
        """A layer whose output depends on attributes and on its training mode."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.scale = 1.0
            self.options = {"shift": 0.0}
            self.aux = 0.0
            if kind == "factor":
                self.factor = nn.Buffer(torch.ones(6))

        def forward(self, x):
            if kind == "inplace":
                x.mul_(1.5)
            out = self.linear(x) * self.scale + self.options["shift"]
            if kind == "shared":
                out = out + self.table.shift
            if kind == "factor":
                out = out * self.factor
            if kind == "aux":
                self.aux = out.square().mean()
            return out if self.training else out + 1

    class Shift(nn.Module):
        """Its backward does not need the argument, so the body may change the argument in place."""

        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return (x + self.shift) * 2

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.view_as(value)

        @staticmethod
        def backward(ctx, gradient):
            return -0.7 * gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Scaled(), Shift() if kind == "shift" else Scaled()
            self.register_buffer("count", torch.zeros(3))
            for place, part in enumerate((self.a, self.b)):
                smp.set_partition(part, place % smp.pp_size())
            if kind == "shared":
                for part in (self.a, self.b):
                    # A module object with several parents: adapters share their projections in this way.
                    part.table = part.linear.table = nn.Module()
                    part.table.shift = nn.Buffer(torch.ones(6))
            if kind == "buffers":
                self.positions = nn.Buffer(torch.arange(6, dtype=torch.float32))
            if kind == "returns":
                self.same, self.act = nn.Identity(), nn.Hardswish(inplace=True)
                for part in (self.same, self.act):
                    smp.set_partition(part, 1 % smp.pp_size())

        def forward(self, x):
            if kind == "function":
                return self.b(Reverse.apply(self.a(x)))
            if kind != "buffers":
                return self.b(torch.tanh(self.a(x)))
            self.positions = self.positions.to(device=x.device, dtype=x.dtype)
            self.positions = self.positions.to(x.dtype)
            out = self.b(torch.tanh(self.a(x)) + self.positions / 3) + self.count.sum()
            self.count = self.count * 0.5 + out.detach().mean()
            return out

    return Model


def _loss(out, y):
    return (out - y).square().mean()


def _modes(model, backward, x, y):
    """Calls the model in evaluation mode and in training mode."""
    model.eval()
    t = model(x)
    model.train()
    s = model(x)
    loss = _loss(t + 2 * s, y)
    backward(loss)
    return loss, t, s


def _attributes(model, backward, x, y):
    """Changes an attribute of modules between calls."""
    core = getattr(model, "module", model)
    out = 0
    for scale in (1.0, 0.5, 3.0):
        core.b.scale = core.a.scale = scale
        out = out + model(x)
    loss = _loss(out, y)
    backward(loss)
    core.b.scale = core.a.scale = 1.0
    return loss, out


def _contents(model, backward, x, y):
    """Changes the content of an attribute, a dictionary, before the first call."""
    core = getattr(model, "module", model)
    core.b.options["shift"] = 0.5
    out = model(x)
    loss = _loss(out, y)
    backward(loss)
    return loss, out


def _freezes(model, backward, x, y):
    """Freezes parameters for one of two calls, as scripts do to switch adapters."""
    core = getattr(model, "module", model)
    core.b.requires_grad_(False)
    t = model(x)
    core.b.requires_grad_(True)
    loss = _loss(t + model(x * 2), y)
    backward(loss)
    return loss


def _refilled(model, backward, x, y):
    """Changes replicated tensors in place between calls that read them."""
    import torch

    mask, out = torch.zeros(6), 0
    view = mask[2:]
    for number in range(3):
        mask.fill_(number)
        view.add_(1)
        out = out + model(x) + mask
    z, seen = x * 2, []
    with torch.no_grad():
        seen.append(model(z))
        z.zero_()
        seen.append(model(z))
        torch.mul(x, 2, out=z)
        seen.append(model(z))
        torch.nn.functional.relu(z, True)
        seen.append(model(z))
        z[1:, :2] = 5
        seen.append(model(z))
        z.data.mul_(3)
        seen.append(model(z))
    loss = _loss(out, y)
    backward(loss)
    return loss, seen


def _views(model, backward, x, y):
    """Writes to a tensor through a view after a call on another partition has read the tensor."""
    core = getattr(model, "module", model)
    h = core.a(x)
    f = core.b(h)
    h[:, :4].mul_(2)
    g = core.b(h)
    t = h.transpose(0, 1)
    t[1] += 1
    k = core.b(h) + core.b(t.t() + 3)
    loss = _loss(f + g + k + h, y)
    backward(loss)
    return loss, f, g, h


def _late_views(model, backward, x, y):
    """Writes to a view in a later pipeline stage than the one that computes the tensor and its views."""
    import torch

    core = getattr(model, "module", model)
    h = core.a(x) + 2
    left, right = h[:, :3], h.narrow(1, 3, 3)
    f = core.b(h)
    left.add_(core.a(f).mean())
    out = torch.cat([left, right], dim=1) + h + core.b(h + 2)
    loss = _loss(out + f, y)
    backward(loss)
    return loss, left, right, h


def _data(model, backward, x, y):
    """Writes through `.data` and `detach()`, which autograd does not record."""
    core = getattr(model, "module", model)
    h = core.a(x)
    f = core.b(h)
    h.data.mul_(2)
    g = core.b(h)
    h.detach().clamp_(-0.5, 0.5)
    loss = _loss(f + g + h * 1, y)
    backward(loss)
    return loss, g, h


def _module_writes(model, backward, x, y):
    """Calls a module that changes its argument in place."""
    core = getattr(model, "module", model)
    h = core.a(x + 1)
    f = core.b(h)
    g = core.a(f)
    out = f + g + h
    loss = _loss(out, y)
    backward(loss)
    return loss, f


def _functions(model, backward, x, y):
    """Applies custom autograd functions of both forms, with and without `setup_context`."""
    import torch

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, factor):
            ctx.factor = factor
            return value.view_as(value)

        @staticmethod
        def backward(ctx, gradient):
            return -ctx.factor * gradient, None

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(value):
            return value * value, value.sum()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient, total):
            (value,) = ctx.saved_tensors
            return 3 * value * gradient + total

    core = getattr(model, "module", model)
    h, total = Square.apply(core.a(x))
    out = core.b(Reverse.apply(h, 0.7))
    loss = _loss(out, y) + 0.1 * total
    backward(loss)
    return loss, out


def _function_of_a_forward(model, backward, x, y):
    """Calls a model whose forward, with submodules on both partitions, applies a custom autograd function."""
    out = model(x)
    loss = _loss(out, y)
    backward(loss)
    return loss, out


def _auxiliary(model, backward, x, y):
    """Adds the auxiliary losses that modules store in attributes."""
    core = getattr(model, "module", model)
    out = model(x)
    loss = _loss(out, y) + 0.3 * core.a.aux + core.b.aux
    backward(loss)
    return loss, core.b.aux


def _nested(model, backward, x, y):
    """Returns nested structures, and uses a tensor after writes through views that no longer exist."""
    core = getattr(model, "module", model)
    h = core.a(x)
    pieces = [core.b(piece) for piece in (h[:, ::2].repeat(1, 2), h.t().contiguous().t())]
    h[:, 1:3] = pieces[0][:, :2]
    h[0].zero_()
    loss = _loss(core.b(h) + pieces[1], y)
    backward(loss)
    return {"loss": loss, "pieces": pieces, "h": h}


def _sizes(model, backward, x, y):
    """Uses tensors as sizes and indices; the sizes differ between microbatches."""
    import torch

    core = getattr(model, "module", model)
    h = core.a(x)
    count = torch.div(h.size(1), 2, rounding_mode="trunc") - torch.tensor(int(x.sum() > y.sum()))
    room = h.new_zeros((h.size(0), count + 1, 6))
    room[:, :count] = h[:, None]
    picked = room.narrow(1, count - 1, 1).squeeze(1) + h[torch.tensor(0)]
    filled = h.detach().index_fill(1, torch.tensor(1), torch.tensor(2))
    loss = _loss(core.b(picked) + room.sum(1).view(-1, count.clamp(max=2) * 3).reshape(h.shape), y) + filled.sum()
    backward(loss)
    return loss, picked


def _returned_argument(model, backward, x, y):
    """Calls an in-place activation on the output of an `Identity`, which is a tensor of another partition."""
    core = getattr(model, "module", model)
    h = core.act(core.same(core.a(x)))
    g = core.act(core.same(core.a(y).t())).t()
    loss = _loss(core.b(h), y) + g.square().mean()
    backward(loss)
    return loss, h, g


def _buffers(model, backward, x, y):
    """Calls a model whose forward, with submodules on both partitions, replaces buffers: by a cast, and by a running mean."""
    out = model(x) + model(y)
    backward(_loss(out, y))
    return out


def _module_of_several_parents(model, backward, x, y):
    """Calls a model in which a module object has several parents."""
    out = model(x)
    backward(_loss(out, y))
    return out


def _written_buffers(model, backward, x, y):
    """Writes values of other partitions to a buffer several times; the next microbatch reads the buffer."""
    core = getattr(model, "module", model)
    out = 0
    for _ in range(2):
        out = out + model(x) + core.count.sum()
        core.count.mul_(0.5).add_(out.detach().mean())
    core.count[1:].add_(out.detach().mean())
    backward(_loss(out + core.count.sum(), y))
    return out


def _saved_buffer(model, backward, x, y):
    """Writes to a buffer that the backward of a product needs; the next microbatch writes to it again."""
    import torch

    core = getattr(model, "module", model)
    h = core.a(x)
    core.count.mul_(0.5).add_(x.mean() + 0.5)
    h = torch.cat([h[:, :3] * core.count, h[:, 3:]], 1)
    out = core.b(h)
    backward(_loss(out, y))
    return out


def _buffer_of_a_module(model, backward, x, y):
    """Writes to a buffer that a module saves for its backward; the next microbatch writes to it again."""
    core = getattr(model, "module", model)
    core.a.factor.mul_(0.5).add_(x.mean() + 0.5)
    out = core.b(core.a(x))
    backward(_loss(out, y))
    return out


def _check_cases(cases, partitions, schedule):
    import traceback
    import warnings

    from support.bodies import compare

    warnings.simplefilter("ignore")
    failures = {}
    for name, kind in cases:
        try:
            compare(lambda kind=kind: _model(kind)(), globals()[name], partitions=partitions, schedule=schedule)
        except Exception:
            failures[name] = traceback.format_exc()
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


CASES = [
    ("_modes", "plain"),
    ("_attributes", "plain"),
    ("_contents", "plain"),
    ("_freezes", "plain"),
    ("_refilled", "plain"),
    ("_views", "shift"),
    ("_late_views", "shift"),
    ("_data", "shift"),
    ("_module_writes", "inplace"),
    ("_functions", "plain"),
    ("_function_of_a_forward", "function"),
    ("_auxiliary", "aux"),
    ("_nested", "shift"),
    ("_sizes", "plain"),
    ("_returned_argument", "returns"),
    ("_buffers", "buffers"),
    ("_module_of_several_parents", "shared"),
    ("_written_buffers", "plain"),
    ("_saved_buffer", "plain"),
    ("_buffer_of_a_module", "factor"),
]


@pytest.mark.parametrize("schedule", ["interleaved", more("zero_bubble")])
def test_bodies_equal_one_process(schedule):
    run_ranks(_check_cases, 2, CASES, 2, schedule, launcher=FORKED)


def _kept(model, backward, x, y, kept=[]):  # noqa: B006 - must persist between microbatches
    out = model(x)
    if kept:
        out = out + kept[-1]
    kept.append(out)
    backward(_loss(out, y))


def _reads_gradient(model, backward, x, y):
    backward(_loss(model(x), y))
    return next(parameter.grad for parameter in model.parameters())


def _retains(model, backward, x, y):
    out = model(x)
    out.retain_grad()
    backward(_loss(out, y))
    return out.grad


def _replaces_module(model, backward, x, y):
    import torch

    model.module.b.linear = torch.nn.Linear(6, 6)
    backward(_loss(model(x), y))


def _lost_view(model, backward, x, y):
    h = model.module.a(x)
    row = h[0]
    h = model.module.b(h)
    backward(_loss(h + row, y))


REFUSED = [
    ("_kept", "plain", "a tensor of microbatch 0 that requires a gradient is used in microbatch 1"),
    ("_reads_gradient", "plain", "`grad` of a tensor on a partition"),
    ("_retains", "plain", "`retain_grad` of a tensor on a partition"),
    ("_replaces_module", "plain", "`b.linear` is a parameter, a buffer or a module"),
    ("_lost_view", "inplace", "`b` on partition 1 changed the storage of this view in place"),
]


def _refused(name, kind, text):
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import SMPUsageError

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    model = smp.DistributedModel(_model(kind)())

    @smp.step
    def step(model, x, y):
        return globals()[name](model, model.backward, x, y)

    with pytest.raises(SMPUsageError) as caught:
        step(model, torch.randn(4, 6), torch.randn(4, 6))
    assert text in str(caught.value), f"{name}: {caught.value}"
    smp.shutdown()


def _check_refusals():
    for case in REFUSED:
        _refused(*case)


def test_unsupported_bodies_raise():
    run_ranks(_check_refusals, 2, launcher=FORKED)


def _check_tensor_outside_of_modules(schedule):
    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.exceptions import SMPUsageError

    table = torch.zeros(2, 6)

    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(table.mul_(0.5).add_(x.detach()))

    smp.init(
        {
            "partitions": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
            "pipeline": schedule,
        }
    )
    net = nn.Sequential(Mean(6, 6), nn.Tanh(), nn.Linear(6, 6))
    smp.set_partition(net[2], 1)
    model = smp.DistributedModel(net)

    @smp.step
    def step(model, x, y):
        model.backward(_loss(model(x), y))

    def step_and_barrier():
        step(model, torch.randn(4, 6), torch.randn(4, 6))
        smp.barrier()

    # The other rank learns of it as it waits for a tensor, or for the barrier.
    wanted = SMPUsageError if smp.pp_rank() == 0 else RuntimeError
    with pytest.raises(wanted) as caught:
        step_and_barrier()
    assert "needs a tensor that was changed in place" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("schedule", ["simple", "zero_bubble"])
def test_tensor_that_the_next_microbatch_changes(schedule):
    run_ranks(_check_tensor_outside_of_modules, 2, schedule, launcher=FORKED)


def _check_shared_gradients(schedule, placed):
    """The first gradient of a parameter is a view of the gradient of its stage's input, which is still to be sent."""
    import copy

    import torch
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 8))

        def forward(self, x):
            return (x.squeeze(0) + self.table.view(16, 8)).unsqueeze(0)

    smp.init({"partitions": 2, "microbatches": 6, "pipeline": schedule, "auto_partition": False,
              "default_partition": 0})  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    whole = nn.Sequential(nn.Linear(8, 8), Position(), nn.Linear(8, 8), Position(), nn.Linear(8, 8))
    alone = copy.deepcopy(whole)
    for part, partition in zip(whole, placed, strict=True):
        smp.set_partition(part, partition)
    model = smp.DistributedModel(whole)

    @smp.step
    def step(model, x):
        model.backward(model(x).sin().sum())

    for number in range(3):
        model.zero_grad()
        alone.zero_grad()
        x = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(number))
        step(model, x)
        for piece in x.chunk(6):
            (alone(piece).sin().sum() / 6).backward()
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-11, atol=1e-12)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("schedule", "placed"),
    [("simple", (0, 0, 0, 1, 1)), ("interleaved", (0, 1, 0, 1, 0)), ("zero_bubble", (0, 1, 1, 0, 0))],
)
def test_gradients_of_inputs_that_share_memory_with_those_of_parameters(schedule, placed):
    run_ranks(_check_shared_gradients, 2, schedule, placed, launcher=FORKED)
