"""Behaviour on which published scripts rely, tested in one process."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed._common import lifecycle  # noqa: E402
from smdistributed.modelparallel import binding, config  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPPartitionError, SMPUsageError  # noqa: E402
from smdistributed.modelparallel.torch import optimizer  # noqa: E402
from smdistributed.modelparallel.torch.checkpoint import hugging_face  # noqa: E402
from smdistributed.modelparallel.torch.exceptions import SMPCheckpointError  # noqa: E402
from smdistributed.modelparallel.torch.nn import replacement  # noqa: E402
from smdistributed.modelparallel.torch.partitioning import cost_trace  # noqa: E402


@pytest.fixture
def job(monkeypatch):
    """Initializes a job of one process, without configuration variables of a launcher."""
    for name in ("SM_HP_MP_PARAMETERS", "SMP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    smp.init({"microbatches": 2})
    yield smp
    smp.shutdown()
    # `smp.shutdown` does not end the session of one process, which jobs of later tests would take for theirs.
    lifecycle.shutdown()


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg))])
def test_the_configuration_can_be_copied_and_pickled(change):
    cfg = config.read({"microbatches": 3})
    new = change(cfg)
    assert type(new) is config.Config
    assert dict(new) == dict(cfg)
    assert new.microbatches == 3
    with pytest.raises(AttributeError, match="read only"):
        new.microbatches = 4
    with pytest.raises(AttributeError, match="no key `_values_`"):
        _ = config.Config.__new__(config.Config)._values_


def test_scripts_see_that_states_of_sharded_data_parallelism_are_sharded(monkeypatch):
    for name in ("SM_HP_MP_PARAMETERS", "SMP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    # The Trainer of transformers reads this key to decide which ranks save the optimizer's state.
    assert config.read({"ddp": True, "sharded_data_parallel_degree": 2}).shard_optimizer_state
    assert not config.read({"ddp": True}).shard_optimizer_state


def test_the_launchers_value_overrides_before_limits_are_checked(monkeypatch):
    monkeypatch.delenv("SMP_CONFIG", raising=False)
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"tensor_parallel_degree": 1, "fp16": false}')
    cfg = config.read({"tensor_parallel_degree": 4, "fp16": True})
    assert (cfg.tensor_parallel_degree, cfg.fp16) == (1, False)
    with pytest.raises(NotImplementedError, match=r"smp\.init: `horovod` is True"):
        config.read({"horovod": True})
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"horovod": true}')
    with pytest.raises(NotImplementedError, match="SM_HP_MP_PARAMETERS: `horovod` is True"):
        config.read({"shard_optimizer_state": False})


def test_the_scaler_takes_the_arguments_of_torch_cuda_amp():
    names = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]
    parameters = inspect.signature(smp.amp.GradScaler).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = inspect.signature(torch.cuda.amp.GradScaler).parameters
    assert [name for name in parameters if name != "device"] == names == list(theirs)
    assert all(parameters[name].default == theirs[name].default for name in names)
    scaler = smp.amp.GradScaler(1024.0, 3.0, 0.25, 7, device="cpu")
    assert scaler.is_enabled()
    assert scaler.get_scale() == 1024.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    assert not smp.amp.GradScaler(enabled=False).is_enabled()
    with pytest.raises(TypeError, match=r"`device='cuda'`"):
        smp.amp.GradScaler("cuda")


class _WithoutValues(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.inner(x) * self.scale


def test_a_failed_constructor_registers_nothing(job):
    with smp.delay_param_initialization():
        module = _WithoutValues()
    for _ in range(2):
        # The second attempt must fail like the first: the failure has marked no parameter as initialized.
        with pytest.raises(SMPPartitionError, match="`scale` was created without memory"):
            smp.DistributedModel(module)
        assert smp.state.model is None
        assert module.inner.weight.is_meta
    module.reset_parameters = lambda: module.scale.data.fill_(2.0)
    model = smp.DistributedModel(module)
    assert smp.state.model is model
    assert torch.equal(module.scale, torch.full((2,), 2.0))
    assert not module.inner.weight.isnan().any()
    for wrong in (module, None, 3):
        with pytest.raises(TypeError, match="takes an optimizer"):
            smp.DistributedOptimizer(wrong)
        assert smp.state.optimizer is None
    broken = torch.optim.SGD(model.parameters(), 0.1)
    broken.param_groups[0].pop("params")
    with pytest.raises(KeyError):
        smp.DistributedOptimizer(broken)
    assert smp.state.optimizer is None
    ours = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    assert smp.state.optimizer is ours


def test_loss_scales_without_effect_warn_once(job):
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    optimizer._warn_of_scales.cache_clear()
    arguments = {"init_scale": 2.0**32, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
    with pytest.warns(UserWarning, match="no effect without the configuration's `fp16`") as found:
        smp.DistributedOptimizer(plain, dynamic_loss_scale=True, dynamic_loss_args=arguments)
    assert [each.filename for each in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        smp.DistributedOptimizer(plain, static_loss_scale=128.0)
        smp.DistributedOptimizer(plain, static_loss_scale=None, dynamic_loss_scale=False)
    with pytest.raises(TypeError, match="no argument `scale`"):
        smp.DistributedOptimizer(plain, dynamic_loss_args={"scale": 2.0})


def test_arguments_of_tensor_parallelism_without_effect_warn_once(job):
    replacement._warn_without_effect.cache_clear()
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float64, flash_attention=True):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.float64
    with pytest.warns(UserWarning, match=r"`flash_attention` of `smp\.tensor_parallelism` has no effect"):
        new = replacement.replace_marked(layer)
    assert type(new) is smp.nn.DistributedLinear
    assert (new.weight.is_meta, new.weight.dtype) == (True, torch.float64)
    with smp.tensor_parallelism(flash=True):
        layer = torch.nn.Linear(2, 2)
    with pytest.raises(smp.exceptions.SMPValidationError, match="no argument `flash`"):
        replacement.replace_marked(layer)
    with pytest.raises(smp.exceptions.SMPValidationError, match="does not inherit from"):
        smp.tp_register(torch.nn.Linear)(_WithoutValues)


def test_the_outermost_supported_module_is_replaced(job):
    class Block(torch.nn.Module):
        def __init__(self, size, factor=2):
            super().__init__()
            self.inner = torch.nn.Linear(size, factor * size)

        def forward(self, x):
            return [x]

    smp.tp_register(
        smp.nn.DistributedTransformerOutputLayer,
        init_hook=lambda size, factor=2: ((size, factor * size, 0.0), {"pre_layernorm": True, "post_layernorm": False}),
        forward_hook=lambda x: ((x,), {}),
        return_hook=lambda x: [x],
    )(Block)
    with smp.tensor_parallelism(activation="relu"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(4, factor=3), torch.nn.Linear(4, 4))
        with smp.tensor_parallelism(enabled=False):
            model.append(torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    weight = torch.nn.Linear(4, 4)
    smp.set_tensor_parallelism(weight)
    model.append(weight)
    with pytest.warns(UserWarning, match="`0` shares a parameter"):
        assert replacement.replace_marked(model) is model
    kinds = [type(each) for each in model]
    assert kinds[0] is kinds[2] is kinds[3] is torch.nn.Linear
    assert kinds[4] is smp.nn.DistributedLinear
    assert torch.equal(model[4].weight, weight.weight)
    assert isinstance(model[1], smp.nn.DistributedTransformerOutputLayer)
    assert (model[1].activation, model[1].dense1.weight.shape) == ("relu", (12, 4))
    assert model[1](torch.zeros(1, 2, 4))[0].shape == (1, 2, 4)


def test_a_step_passes_self_only_if_its_body_accepts_it(job):
    module = torch.nn.Linear(2, 1)
    model = smp.DistributedModel(module)

    @smp.step
    def plain(model, x):
        return model(x).sum()

    class Script:
        attribute = plain
        static = staticmethod(plain)
        factor = 3.0

        @smp.step
        def in_class(model, x, scale=1.0):  # noqa: N805
            return scale * model(x).sum()

        @smp.step(input_split_axes={"x": 0})
        def method(self, model, x):
            return self.factor * model(x).sum()

        @smp.step
        def named_otherwise(script, model, x):  # noqa: N805
            return script.factor * model(x).sum()

        @classmethod
        @smp.step
        def of_class(cls, model, x):
            return cls.factor * model(x).sum()

    script, x = Script(), torch.randn(4, 2)
    once = [float(module(part).detach().sum()) for part in x.chunk(2)]
    cases = [
        (script.attribute, 1),
        (script.static, 1),
        (script.in_class, 1),
        (script.method, 3),
        (script.named_otherwise, 3),
        (functools.partial(script.in_class, scale=2.0), 2),
        (functools.partial(Script.method, script), 3),
        (functools.partial(script.method, script), 3),
        (script.of_class, 3),
        (Script.of_class, 3),
    ]
    for call, factor in cases:
        assert [float(each) for each in call(model, x)] == pytest.approx([factor * each for each in once])
    assert script.method.__name__ == "method"
    assert script.method.__self__ is script
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        script.method(model)


def test_the_signature_decides_whether_self_is_passed():
    def accepts_self(function, *args, **kwargs):
        return binding.binds_instance(inspect.signature(function), object(), args, kwargs)

    assert accepts_self(lambda self, x: 0, 1)
    assert not accepts_self(lambda self, x: 0, 1, 2)
    assert not accepts_self(lambda model, x: 0, 1, 2)
    assert accepts_self(lambda trainer, x: 0, 1)
    assert accepts_self(lambda trainer, x: 0, x=1)
    assert not accepts_self(lambda model, *batch: 0, 1, 2)
    assert accepts_self(lambda self, *batch: 0, 1, 2)
    assert not accepts_self(lambda **batch: 0, x=1)


class _Shared(torch.nn.Module):
    """Like T5: one embedding under three parents."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Embedding(8, 4)
        self.encoder, self.decoder = torch.nn.Module(), torch.nn.Module()
        self.encoder.tokens = self.decoder.tokens = self.shared
        self.register_buffer("offset", torch.ones(4))
        self.encoder.register_buffer("offset", self.offset)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, x):
        return self.head(self.encoder.tokens(x) + self.decoder.tokens(x) + self.encoder.offset)


@pytest.mark.parametrize("measure", [False, True])
def test_a_trace_does_not_change_shared_modules(measure):
    module = _Shared()
    before = [*module.parameters(), *module.buffers()]
    trace = cost_trace.trace(module, (torch.zeros(2, 3, dtype=torch.long),), {}, measure_times=measure)
    assert all(now is then for now, then in zip([*module.parameters(), *module.buffers()], before, strict=True))
    assert type(module.shared.weight) is torch.nn.Parameter
    assert module.head.weight is module.encoder.tokens.weight is module.shared.weight
    assert module.encoder.offset is module.offset
    paths = [each.path for each in trace.modules]
    assert [paths.index("shared"), paths.index("head")] in trace.ties


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(3, 3), 0

    def forward(self, x, *, scale: float = 1.0):
        self.calls += 1
        return torch.tanh(self.linear(x)) * scale


@pytest.mark.parametrize("kind", ["module", "sequential"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights(kind, how):
    model = _Block() if kind == "module" else torch.nn.Sequential(_Block(), _Block(), torch.nn.Tanh())
    options = {} if kind == "module" else {"strategy": "group_2"}
    smp.set_activation_checkpointing(model, **options)
    # A second call changes the settings, but does not checkpoint twice.
    smp.set_activation_checkpointing(model, preserve_rng_state=False, **options)
    x = torch.randn(2, 3)
    expected = model(x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model(x), expected)
    assert torch.equal(other(x), torch.zeros(2, 3))
    blocks = [module for module in other.modules() if isinstance(module, _Block)]
    before = [block.calls for block in blocks]
    other(x.requires_grad_()).sum().backward()
    assert [block.calls - then for block, then in zip(blocks, before, strict=True)] == [2] * len(blocks), (
        "the backward must run each block again"
    )
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    if kind == "module":
        assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
        assert torch.equal(model(x, scale=2.0), 2 * expected)


def test_a_checkpointed_sequential_runs_the_children_that_it_has():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    smp.set_activation_checkpointing(model, strategy="contiguous")
    x = torch.randn(2, 3)
    model(x)
    model[1] = torch.nn.Tanh()
    assert torch.equal(model(x), torch.tanh(model[0](x)))
    assert "_smp_rows" not in model.__dict__


def test_hooks_after_a_step_run_once(job):
    model = smp.DistributedModel(torch.nn.Linear(2, 1))
    ours = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    seen = []

    @smp.step
    def train(model, x, fails=False):
        if fails:
            raise ArithmeticError
        loss = model(x).sum()
        model.backward(loss)
        return loss

    def hook(*arguments):
        # The step is over: gradients are complete, and another step may begin.
        assert next(model.parameters()).grad is not None
        assert model.step_run is None
        seen.append(arguments)

    model.register_post_step_hook(hook)
    model.register_post_step_hook(lambda model: seen.append(model))
    model.register_post_step_hook(lambda: seen.append("never")).remove()
    x = torch.randn(4, 2)
    with pytest.raises(ArithmeticError):
        train(model, x, fails=True)
    assert seen == []
    train(model, x)
    train(model, x)
    assert seen == [(model, ours), model]
    assert smp.state.module_manager.translate_functions == []


def test_a_whole_model_is_read_from_safetensors(job, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    module = _Shared()
    model = smp.DistributedModel(module)
    values = {"shared.weight": torch.randn(8, 4), "offset": torch.full((4,), 5.0)}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    assert smp.resume_from_checkpoint(tmp_path, tag="pytorch_model.bin", partial=False, load_optimizer=False) == {}
    assert torch.equal(module.head.weight, values["shared.weight"])
    assert torch.equal(module.encoder.offset, values["offset"])
    with pytest.raises(SMPCheckpointError, match="neither"):
        smp.resume_from_checkpoint(tmp_path, tag="other.bin", partial=False)
    safetensors.save_file({"offset": values["offset"]}, tmp_path / "model.safetensors")
    with pytest.raises(SMPCheckpointError, match=r"missing .*shared\.weight"):
        smp.resume_from_checkpoint(tmp_path, tag="pytorch_model.bin", partial=False)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(SMPCheckpointError, match="damaged"):
        smp.resume_from_checkpoint(tmp_path, tag="pytorch_model.bin", partial=False)
    assert hugging_face.safetensors_instead(tmp_path / "pytorch_model.bin") == tmp_path / "model.safetensors"
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert hugging_face.safetensors_instead(tmp_path / "pytorch_model.bin") is None


def test_a_distributed_model_is_read_from_the_files_of_transformers(job, tmp_path):
    safetensors, transformers = pytest.importorskip("safetensors.torch"), pytest.importorskip("transformers")
    torch.manual_seed(2)
    with smp.tensor_parallelism():
        sizes = {"vocab_size": 13, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}
        settings = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        theirs = transformers.GPT2LMHeadModel(settings)
    values = {name: torch.randn_like(each) for name, each in theirs.state_dict().items()}
    model = smp.DistributedModel(theirs)
    assert isinstance(model.module, smp.nn.DistributedTransformerLMHead)
    values["lm_head.weight"] = values["transformer.wte.weight"]
    # transformers writes a tied weight once, under one of its two names, or twice.
    for left_out in ("lm_head.weight", "nothing"):
        kept = {name: each.clone() for name, each in values.items() if name != left_out}
        safetensors.save_file(kept, tmp_path / "model.safetensors")
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        assert smp.resume_from_checkpoint(tmp_path, tag="pytorch_model.bin", partial=False, load_optimizer=False) == {}
        found = smp.state.module_manager.to_own_names(model.state_dict())
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], each) for name, each in values.items())


def test_gradients_of_tensor_backward_are_summed_over_microbatches(job):
    """Without replicas, no gradient is reduced, and the gradients equal those of plain PyTorch."""
    model = smp.DistributedModel(torch.nn.Linear(2, 1))

    @smp.step
    def train(model, x):
        model(x).sum().backward()

    x = torch.randn(4, 2)
    train(model, x)
    assert torch.allclose(model.module.weight.grad, x.sum(0, keepdim=True))
    with pytest.raises(SMPUsageError, match="already"):
        smp.DistributedModel(torch.nn.Linear(1, 1))
