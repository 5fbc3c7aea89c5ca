"""Parts of model parallelism that can be tested in one process."""

from __future__ import annotations

import copy
import types

import pytest

torch = pytest.importorskip("torch")

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed.modelparallel.torch import communication  # noqa: E402
from smdistributed.modelparallel.torch.compat import add_documented_aliases  # noqa: E402
from smdistributed.modelparallel.torch.exceptions import SMPPartitionError  # noqa: E402
from smdistributed.modelparallel.torch.partitioning.materialize import (  # noqa: E402
    delay_param_initialization,
    delay_parameters,
    materialize,
)
from smdistributed.modelparallel.torch.split import split  # noqa: E402
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter  # noqa: E402


def test_every_documented_name_is_there():
    import smdistributed.modelparallel
    import smdistributed.modelparallel.backend.exceptions as backend_exceptions
    import smdistributed.modelparallel.torch.exceptions as exceptions

    assert smdistributed.modelparallel.__version__ >= "1.15.0"
    assert backend_exceptions.SMPError is exceptions.SMPError
    assert callable(smp.step)
    assert smp.model.DistributedModel is smp.DistributedModel
    assert smp.core.initialized is False
    assert callable(smp.patches.checkpoint.checkpoint_sequential)
    assert all(hasattr(smp, name) for name in smp.__all__)


class _Layers(torch.nn.Module):
    """Layers whose weight gradients can be deferred, and layers whose weight gradients cannot."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.image = torch.nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.first, self.second = torch.nn.Linear(48, 5), torch.nn.Linear(5, 5, bias=False)
        self.norm = torch.nn.LayerNorm(5)
        self.last = torch.nn.Parameter(torch.randn(5, 5) / 3)
        if kind == "hooked":
            self.second.weight.register_hook(lambda gradient: gradient)

    def forward(self, x):
        hidden = self.norm(self.first(self.image(x).flatten(1)))
        once = torch.utils.checkpoint.checkpoint if self.kind == "recomputed" else lambda call, *args, **_: call(*args)
        hidden = hidden + once(lambda y: torch.tanh(self.second(y)), hidden, use_reentrant=self.kind == "reentrant")
        if self.kind == "reentrant":
            hidden = torch.utils.checkpoint.checkpoint(self.second, hidden, use_reentrant=True)
        if self.kind == "shared":
            hidden = self.second(hidden) * self.second.weight[0]
        if self.kind == "twice":
            hidden = self.second(hidden)
        return torch.addmm(hidden, hidden, self.last)


#: For each kind of layers: the weights whose gradients can be deferred if the input needs a gradient.
_DEFERRED = {
    "plain": {"image.weight", "first.weight", "second.weight", "last"},
    "twice": {"image.weight", "first.weight", "second.weight", "last"},
    "recomputed": {"image.weight", "first.weight", "second.weight", "last"},
    "hooked": {"image.weight", "first.weight", "last"},
    "shared": {"image.weight", "first.weight", "last"},
    "reentrant": set(),
}


def _flops():
    from torch.utils.flop_counter import FlopCounterMode

    in_place = {torch.ops.aten.addmm_: lambda total, left, right, **_: 2 * left[0] * left[1] * right[1]}
    return FlopCounterMode(display=False, custom_mapping=in_place)


def _equal(one, other):
    return one is other or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("kind", _DEFERRED)
def test_separate_weight_gradients_equal_those_of_an_ordinary_backward(kind, wanted, deferred):
    torch.manual_seed(0)
    layers = _Layers(kind).double()
    expected, x = copy.deepcopy(layers), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_(wanted) for _ in range(2)]
    for _ in range(2):
        gradient = torch.randn(3, 5, dtype=torch.float64)
        before = {name: None if each.grad is None else each.grad.clone() for name, each in layers.named_parameters()}
        output, whole = layers(inputs[0]), expected(inputs[1])
        with _flops() as ours:
            weights = torch.classes.smd.WeightGradients([output], [])
            torch.autograd.backward(output, gradient, inputs=weights.begin(deferred) if weights.size() else None)
            waiting = {name for name, each in layers.named_parameters() if _equal(each.grad, before[name])}
            weights.run()
        # If the input needs no gradient, the convolution has the gradient of its weight only, which is computed at
        # once.
        assert waiting == (_DEFERRED[kind] - (set() if wanted else {"image.weight"}) if deferred else set())
        with _flops() as theirs:
            whole.backward(gradient)
        assert ours.get_total_flops() == theirs.get_total_flops(), "a product was computed twice"
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for ours, theirs in zip(layers.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_input_that_serves_as_a_weight_is_not_deferred():
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    for inputs, size in (([x, weight], 0), ([x], 1)):
        weights = torch.classes.smd.WeightGradients([torch.nn.functional.linear(x, weight)], inputs)
        assert weights.size() == size


def _backward(output, gradient, deferred=False, inputs=()):
    """Runs a backward that computes weight gradients separately. With ``deferred``, they are computed when the caller
    runs the returned object.
    """
    weights = torch.classes.smd.WeightGradients([output], list(inputs))
    torch.autograd.backward(output, gradient, inputs=weights.begin(deferred) if weights.size() else None)
    if deferred:
        weights.end()
    return weights


def test_a_deferred_product_does_not_share_its_gradient_with_a_leaf():
    position, layer = torch.nn.Parameter(torch.zeros(1, 4, 8)), torch.nn.Linear(8, 8)
    gradients, inputs = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
    waiting = [
        _backward(position.squeeze(0) + layer(x).add(0), gradient.clone(), deferred=True)
        for x, gradient in zip(inputs, gradients, strict=True)
    ]
    assert [each.size() for each in waiting] == [1, 1]
    for each in waiting:
        each.run()
    torch.testing.assert_close(layer.weight.grad, torch.einsum("nto,nti->oi", gradients, inputs))
    torch.testing.assert_close(position.grad[0], gradients.sum(0))


def test_an_input_that_is_modified_before_its_deferred_product_is_an_error():
    x, layer = torch.randn(3, 5), torch.nn.Linear(5, 4)
    weights = _backward(layer(x), torch.ones(3, 4), deferred=True)
    x.mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation between the two parts"):
        weights.run()


def test_hooked_weights_get_their_gradients_from_pytorch():
    x, seen = torch.randn(3, 5, requires_grad=True), []

    def transposed(weight):
        other = weight.t()
        other.register_hook(lambda gradient: gradient * 0.5)
        return x @ other

    def cast(weight):
        other = weight.double()
        other.retain_grad()
        return torch.nn.functional.linear(x.double(), other)

    def accumulated(weight):
        accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda *_: seen.append(1))
        return torch.nn.functional.linear(x, weight) + 0 * accumulator.variable.sum()

    for use in (transposed, cast):
        assert torch.classes.smd.WeightGradients([use(torch.nn.Parameter(torch.randn(4, 5)))], []).size() == 0
    _backward(accumulated(torch.nn.Parameter(torch.randn(4, 5))), torch.ones(3, 4))
    assert seen
    wide = torch.nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
    wide.grad_dtype = torch.float32
    _backward(torch.nn.functional.linear(x.bfloat16(), wide), torch.ones(3, 4, dtype=torch.bfloat16))
    assert wide.grad.dtype == torch.float32


def test_gradients_of_real_weights_in_complex_products():
    x, weight = torch.randn(3, 5, dtype=torch.cfloat, requires_grad=True), torch.nn.Parameter(torch.randn(5, 4))
    gradient = torch.randn(3, 4, dtype=torch.cfloat)
    _backward(x @ weight.to(torch.cfloat), gradient)
    torch.testing.assert_close(weight.grad, (x.detach().mH @ gradient).real)


def test_a_deferred_gradient_is_added_to_a_sparse_one():
    table, x = torch.nn.Embedding(10, 4, sparse=True), torch.randn(3, 4, requires_grad=True)
    table(torch.tensor([1])).sum().backward()
    weights = _backward(torch.nn.functional.linear(x, table.weight), torch.ones(3, 10), deferred=True)
    weights.run()
    expected = x.detach().sum(0).expand(10, 4) + torch.eye(10)[1, :, None]
    torch.testing.assert_close(table.weight.grad, expected)


def test_subclasses_of_checkpoint_functions_run_in_pytorchs_backward():
    class MyCheckpoint(torch.utils.checkpoint.CheckpointFunction):
        pass

    one, two, x = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    output = two(MyCheckpoint.apply(one, True, x))
    _backward(output, torch.ones(2, 3))
    assert one.weight.grad is not None
    assert two.weight.grad is not None


def _cast_of(parameter, node):
    """Finds the node of a graph that casts ``parameter``."""
    for child, _ in node.next_functions:
        if child is not None:
            found = node if getattr(child, "variable", None) is parameter else _cast_of(parameter, child)
            if found is not None:
                return found
    return None


@pytest.mark.parametrize("hooked", [False, True])
def test_gradients_of_casts_add_up_to_the_same_bits(hooked):
    # 256 x 256 weights have 65,536 elements, the smallest size for which `accumulate_casts` adds up gradients.
    width = 256
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(width, width), torch.randn(3, width)
    if hooked:
        layer.weight.register_hook(lambda gradient: gradient)
    widened, found = [], []
    for at_once in (True, False):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            # Autocast caches the cast of the weight, so all three losses share it.
            losses = [layer(x * scale).float().pow(2).sum() for scale in (1.0, 0.3, 3.0)]
        if at_once:
            torch.ops.smd.accumulate_casts(losses[:1])
            cast = _cast_of(layer.weight, losses[0].grad_fn)
            cast.register_hook(lambda inputs, _: widened.append(inputs[0] is not None))
        for loss in losses:
            loss.backward()
        found.append((layer.weight.grad, layer.bias.grad))
    assert widened == ([True] * 3 if hooked else [True, False, False])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_casts_to_other_devices_are_left_to_pytorch():
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    weight.grad = torch.zeros_like(weight)
    elsewhere = weight.to("meta", torch.bfloat16)
    torch.ops.smd.accumulate_casts([elsewhere])
    # The hook leaves the gradient to PyTorch, which fails to copy it from the meta device to the parameter's.
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        elsewhere.backward(torch.zeros_like(elsewhere))


def test_arguments_are_split_inside_of_structures():
    x = torch.arange(8)
    pieces = split({"a": [x, "word"], "b": (x.view(2, 4),)}, "batch", 2, 0, False)
    assert torch.equal(pieces[1]["a"][0], x[4:])
    assert pieces[0]["b"][0].shape == (1, 4)
    assert split(x, "x", 3, 0, True)[2] is x
    with pytest.raises(ValueError, match="`batch\\['a'\\]` has 8 rows along axis 0, which 3 microbatches"):
        split({"a": x}, "batch", 3, 0, False)
    with pytest.raises(ValueError, match="DataLoader"):
        split(torch.utils.data.DataLoader([1]), "loader", 2, 0, False)


def test_activations_are_loaded_within_the_horizon_before_their_backward():
    from types import SimpleNamespace

    from smdistributed.modelparallel.torch.runtime.offloading import ActivationPrefetcher

    program = [("F", 0, 0, None), ("SF", 0, 0, 1), ("F", 0, 1, None), ("F", 0, 2, None), ("RB", 0, 0, 1)]
    program += [(kind, 0, index, None) for index in range(3) for kind in "IW"]
    loads = ActivationPrefetcher(SimpleNamespace(horizon=2), program)
    # The backwards run 3, 4 and 5 tasks after their forwards.
    assert [loads.is_backward_near(0, index) for index in range(3)] == [False, False, False]
    begun = []
    kept = [SimpleNamespace(prefetch_all=lambda index=index: begun.append(index)) for index in range(3)]
    microbatches = [SimpleNamespace(stage_states={0: SimpleNamespace(offloaded=each)}) for each in kept]
    seen = []
    for kind, *_ in program:
        if kind in "FIW":
            loads.begin(microbatches)
            seen.append(list(begun))
    assert seen == [[], [0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert ActivationPrefetcher(SimpleNamespace(horizon=3), program).is_backward_near(0, 0)


def test_arguments_of_master_weights_are_refused_without_fp16(monkeypatch):
    monkeypatch.setattr(smp.state, "optimizer", None)
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(TypeError, match="no argument `loss_scale`"):
        smp.DistributedOptimizer(plain, loss_scale=4.0)
    with pytest.raises(smp.exceptions.SMPUsageError, match=r"`smp\.clip_grad_norm_` clips"):
        smp.DistributedOptimizer(plain).clip_master_grads(1.0)


class _Base(torch.nn.Module):
    def forward(self, x):
        return x + 1


class _Derived(_Base):
    def forward(self, x):
        return 2 * super()._orig_forward(x)


def test_documented_spellings_reach_the_model():
    model = torch.nn.Sequential(_Derived(), torch.nn.Linear(2, 2))
    names = list(model.state_dict())
    add_documented_aliases(model)
    inner = model.module.module
    assert torch.equal(model[0](torch.ones(2)), torch.full((2,), 4.0))
    assert isinstance(inner, torch.nn.Sequential)
    assert (inner[1], len(inner), list(inner)) == (model[1], 2, list(model))
    assert torch.equal(inner(torch.ones(2)), model(torch.ones(2)))
    inner.word = "kept"
    assert model.word == "kept"
    assert not hasattr(inner, "module")
    assert list(model.state_dict()) == names
    assert list(copy.deepcopy(model).module.module.state_dict()) == names
    own = torch.nn.Module()
    own.module = torch.nn.Linear(2, 2)
    add_documented_aliases(own)
    assert type(own.module) is torch.nn.Linear


class _Patched(_Base):
    """A class whose ``forward`` a script has replaced by one that calls the previous ``forward``."""

    def forward(self, x):
        return 3 * self._orig_forward(x)

    _orig_forward = _Base.forward


def test_a_scripts_own_orig_forward_is_kept():
    model = torch.nn.Sequential(_Patched(), _Derived())
    for _ in range(2):
        add_documented_aliases(model)
        assert torch.equal(model[0](torch.ones(2)), torch.full((2,), 6.0))

    class Later(_Derived):
        def forward(self, x):
            return 5 * super()._orig_forward(x)

    add_documented_aliases(torch.nn.Sequential(Later()))
    assert torch.equal(Later()(torch.ones(2)), torch.full((2,), 20.0))
    assert "_orig_forward" not in vars(torch.nn.Module)


class _Tagged(torch.nn.Parameter):
    """A parameter of a class of the script."""


def test_delayed_parameters_keep_their_class_and_attributes():
    handle = delay_parameters()
    try:
        one, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        shared = _Tagged(torch.ones(3, 3), requires_grad=False)
        shared.word = "kept"
        one.register_parameter("more", shared)
        other.register_parameter("more", shared)
        assert one.more is other.more
        assert one.more.is_meta
        assert not shared.is_meta
        assert (type(one.more), one.more.word, one.more.requires_grad) == (_Tagged, "kept", False)
        # A parameter that is assigned keeps its values.
        one.weight = shared
        assert one.weight is shared
        lazy = torch.nn.LazyLinear(4)
    finally:
        handle.remove()
    assert lazy(torch.ones(1, 2)).shape == (1, 4)


def _materialized(model):
    """Materializes a model as on the only rank of a pipeline."""
    materialize(model, types.SimpleNamespace(of=lambda module: 0), 0, torch.device("cpu"))
    return model


class _Mixed(torch.nn.Module):
    """Has a buffer, a plain tensor, modules that keep references to their parameters, and an embedding."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(5.0))
        self.scale = torch.full((1,), 3.0)
        self.recurrent = torch.nn.LSTM(4, 3)
        self.attention = torch.nn.MultiheadAttention(3, 1)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 7)
        self.table = torch.nn.Embedding(7, 3)

    def forward(self, x):
        x = self.recurrent(x)[0]
        x = self.norm(self.attention(x, x, x)[0].transpose(1, 2)) * self.scale
        return self.head(x.transpose(1, 2)) + self.positions.sum()


def test_delayed_parameters_get_the_usual_initial_values_and_other_tensors_are_unchanged():
    torch.manual_seed(5)
    plain = _Mixed().eval()
    with delay_param_initialization():
        delayed = _Mixed().eval()
    assert all(parameter.is_meta for parameter in delayed.parameters())
    torch.manual_seed(5)
    _materialized(delayed)
    found, expected = delayed.state_dict(), plain.state_dict()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    x = torch.randn(2, 6, 4)
    assert torch.equal(delayed(x), plain(x))


def test_tensors_that_are_never_initialized_are_named():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = torch.nn.Linear(2, 2)
            self.token = torch.nn.Parameter(torch.zeros(3))

        def reset_parameters(self):
            self.inside.reset_parameters()

    with delay_param_initialization():
        model = Odd()
    with pytest.raises(SMPPartitionError, match="`token` was created without memory"):
        _materialized(model)
    with torch.device("meta"):
        buffers = torch.nn.Module()
        buffers.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    with pytest.raises(SMPPartitionError, match="`count` was created without memory"):
        _materialized(buffers)


class _Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


class _ByData(torch.nn.Module):
    """Initializes through `.data`; has a parameter without elements, a buffer that is set later, and parametrized
    weights.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3))
        self.register_buffer("mean", torch.zeros(2))
        self.empty = torch.nn.Linear(0, 4)
        self.norm = torch.nn.BatchNorm1d(2)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
        self.doubled = torch.nn.utils.parametrize.register_parametrization(torch.nn.Linear(3, 2), "weight", _Doubled())
        self.reset_parameters()

    def reset_parameters(self):
        self.weight.data.uniform_()
        self.mean.zero_()


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_delayed_initialization_through_data_and_parametrizations_keeps_values_of_buffers():
    torch.manual_seed(5)
    plain = _ByData()
    with delay_param_initialization():
        delayed = _ByData()
    for model in (plain, delayed):
        model.mean.fill_(4)
        model.norm.running_mean.fill_(7)
    torch.manual_seed(5)
    _materialized(delayed)
    found, expected = delayed.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_recurrent_layers_of_other_partitions_keep_no_memory():
    model = torch.nn.Sequential(torch.nn.LSTM(4, 3), torch.nn.Linear(3, 1))
    materialize(model, types.SimpleNamespace(of=lambda module: int(module is model[0])), 0, torch.device("cpu"))
    assert all(isinstance(weight, MetaParameter) for weight in model[0]._flat_weights)
    assert model[0]._flat_weights[0] is model[0].weight_ih_l0


@pytest.mark.parametrize("wrapped", [False, True])
def test_delayed_models_of_hugging_face_get_the_usual_initial_values(wrapped):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=8, n_head=4, vocab_size=200, n_positions=32)

    def build():
        model = transformers.GPT2Model(config)
        return torch.nn.Sequential(torch.nn.Linear(2, 2), model) if wrapped else model

    plain = build()
    with delay_param_initialization():
        delayed = build()
    _materialized(delayed)
    found, expected = delayed.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    spreads = {name: float(tensor.std()) for name, tensor in expected.items() if tensor.numel() > 1000}
    assert len({round(spread, 3) for spread in spreads.values()}) > 1
    assert {name: float(found[name].std()) for name in spreads} == pytest.approx(spreads, rel=0.1)
    for name in expected.keys() - spreads.keys() - {"0.weight", "0.bias"}:
        assert torch.equal(found[name], expected[name]), name


def test_parents_do_not_initialize_parameters_of_other_partitions():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32)
    with delay_param_initialization():
        model = transformers.GPT2LMHeadModel(config)
    remote = model.transformer.h[1].mlp.c_proj
    materialize(model, types.SimpleNamespace(of=lambda module: int(module is remote)), 0, torch.device("cpu"))
    assert isinstance(remote.weight, MetaParameter)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(model.transformer.h[0].mlp.c_proj.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.1)


def test_tensors_that_are_gathered_on_the_host_stay_there():
    tensor = torch.arange(4.0)
    key = (0, (4,), "torch.float32", "cuda", None)
    contents = [tensor.view(torch.uint8)]
    assert torch.equal(communication._tensor(contents, True, key), tensor)
    assert communication._tensor(contents, True, key).device.type == "cpu"
