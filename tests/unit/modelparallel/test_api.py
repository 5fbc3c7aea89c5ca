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
