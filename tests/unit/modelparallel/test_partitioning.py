"""Models are traced without memory for their tensors, and automatic partitions keep modules together that must not be
separated.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import types
import warnings

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from smdistributed import _core  # noqa: E402
from smdistributed.modelparallel import partition_file  # noqa: E402
from smdistributed.modelparallel.torch.partitioning import assignment, cost_trace, shared_memory  # noqa: E402
from smdistributed.modelparallel.torch.partitioning.materialize import (  # noqa: E402
    delay_param_initialization,
    materialize,
)


def _config(partitions, **more):
    known = {
        "memory_weight": 0.8,
        "auto_partition": True,
        "default_partition": 0,
        "skip_tracing": False,
        "microbatches": 4,
        "active_microbatches": partitions + 2,
        "pipeline": "interleaved",
    }
    return types.SimpleNamespace(partitions=partitions, **{**known, **more})


def _mlp():
    layers = [nn.Flatten(), *(part for _ in range(6) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 10)]
    return nn.Sequential(*layers), (torch.randn(4, 4, 8),), {}


class _Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += skip
        return self.relu(x)


def _resnet():
    widths = [16, 16, 32, 64, 128]
    blocks = [_Block(a, b, 1 + (a < b)) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    return model, (torch.randn(2, 3, 32, 32),), {}


def _gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=6, n_embd=64, n_head=4, vocab_size=500, n_positions=64)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": tokens, "labels": tokens}


def _t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        num_layers=3,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_heads=4,
        vocab_size=500,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return transformers.T5ForConditionalGeneration(config), (), {"input_ids": tokens, "labels": tokens}


def _line(tree):
    """Modules that have a cost, in the order of their first run, except modules with shared parameters."""
    tied = {at for tie in tree.ties for at in tie}
    ran = [at for at, part in enumerate(tree.modules) if part.first_run is not None and at not in tied]
    return sorted(ran, key=lambda at: tree.modules[at].first_run)


@pytest.mark.parametrize("partitions", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [_mlp, _resnet, _gpt2, _t5])
def test_partitions_are_contiguous_and_all_used(model, partitions):
    module, args, kwargs = model()
    config = _config(partitions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = assignment.auto_partition(module, args, kwargs, config, {})
    assert found == assignment.auto_partition(module, args, kwargs, config, {})
    assert list(found) == [path for path, _ in module.named_modules()]
    assert set(found.values()) == set(range(partitions))
    tree = cost_trace.trace(module, args, kwargs)
    places = [found[tree.modules[at].path] for at in _line(tree)]
    assert places == sorted(places)
    for tie in tree.ties:
        assert len({found[tree.modules[at].path] for at in tie}) == 1


def test_a_trace_leaves_the_model_as_it_is():
    module, args, kwargs = _resnet()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    cost_trace.trace(module, args, kwargs)
    cost_trace.trace(module, args, kwargs, measure_times=True)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


class _Stateful(nn.Module):
    """Changes all kinds of attributes, and draws."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("lazy", None)
        self.calls, self.last, self.table, self.seen = 0, None, {"calls": 0}, torch.ones(4)
        self.parts = [torch.ones(2, 4)]
        self.is_hooked = False

    def forward(self, x, kept):
        if not self.is_hooked:
            self.is_hooked = True
            self.linear.register_forward_hook(lambda module, args, output: None)
        h = self.linear(x)
        kept["cache"].append(h)
        self.calls += 1
        self.last = h
        self.table["calls"] += 1
        self.table["last"] = h.detach()
        self.lazy = h.detach()
        self.register_buffer("new", h.detach(), persistent=False)
        self.seen.mul_(0.5).add_(h.mean(0))
        self.parts[0][1].uniform_()
        return h * random.random() + self.parts[0].sum()


@pytest.mark.parametrize("measure_times", [False, True])
def test_a_trace_leaves_attributes_and_generators_as_they_are(measure_times):
    module = _Stateful()
    torch.manual_seed(1)
    random.seed(1)
    drawn = torch.get_rng_state(), random.getstate()
    part, before, kept, seen = module.parts[0], set(vars(module)), {"cache": []}, []
    module.linear.register_forward_hook(lambda module, args, output: seen.append(output))
    module.register_forward_pre_hook(lambda module, args: seen.append(args))
    cost_trace.trace(module, (torch.ones(3, 4),), {"kept": kept}, measure_times=measure_times)
    assert (kept, seen) == ({"cache": []}, [])
    assert len(module._forward_pre_hooks) == len(module.linear._forward_hooks) == 1
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert (module.calls, module.last, module.table, module.lazy) == (0, None, {"calls": 0}, None)
    assert set(vars(module)) == before
    assert "new" not in module._buffers
    assert (module.is_hooked, module._non_persistent_buffers_set) == (False, set())
    assert module.parts[0] is part
    assert part.tolist() == [[1.0] * 4] * 2
    assert module.seen.tolist() == [1.0] * 4
    assert not module.seen.requires_grad
    assert module.seen._version == part._version == 0


def test_outputs_for_which_softmax_is_undefined_are_accepted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return torch.view_as_complex(self.layer(x))

    tree = cost_trace.trace(Model(), (torch.randn(3, 4),), {})
    assert [part.path for part in tree.modules if part.time] == ["layer"]
    cost_trace._take(torch.eye(3).to_sparse().requires_grad_())


def test_costs_are_those_of_the_layers():
    module = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50, bias=False))
    tree = cost_trace.trace(module, (torch.randn(8, 100),), {})
    _, first, relu, second = tree.modules
    assert first.parameter_bytes == 4 * (100 * 200 + 200)
    assert second.parameter_bytes == 4 * 200 * 50
    assert first.state_bytes == 3 * first.parameter_bytes
    # The layer's input, and the output of ReLU, which ReLU and the next layer keep.
    assert first.activation_bytes == 4 * 8 * (100 + 200)
    # The output, which the loss keeps.
    assert second.activation_bytes == 4 * 8 * 50
    assert relu.follows == 1
    assert tree.values == [(1, [3], 4 * 8 * 200)]
    # The assumed loss begins with a softmax, whose time counts for the last layer.
    launch = 3 * int(_core.operation_nanoseconds(0.0, 0))
    assert (first.time, relu.time, second.time) == (2 * launch, 0, 2 * launch)
    # One task for each of the three calls.
    task = _core.task_nanoseconds()
    assert tree.tasks == [(0, 1, 2 * task), (0, 3, task)]


class _Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_a_module_split_over_partitions_costs_a_task_for_each_operation():
    tree = cost_trace.trace(nn.Sequential(_Residual(16), _Residual(16)), (torch.randn(4, 16),), {})
    paths = [part.path for part in tree.modules]
    counts = {(paths[module], paths[at]): time // _core.task_nanoseconds() for module, at, time in tree.tasks}
    block = {"0.up": 2, "0.down": 2, "1.up": 2, "1.down": 2}
    assert counts == {("", "0.up"): 1, ("", "1.up"): 1, **{(at[0], at): count for at, count in block.items()}}


def test_casts_of_parameters_by_autocast_are_counted_once():
    module = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False))
    with torch.autocast("cpu", torch.bfloat16):
        tree = cost_trace.trace(module, (torch.randn(8, 1000),), {})
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            without = cost_trace.trace(module, (torch.randn(8, 1000),), {})
    assert [part.state_bytes for part in tree.modules[1:]] == [(3 * 4 + 2) * 1000**2] * 2
    assert [part.state_bytes for part in without.modules[1:]] == [3 * 4 * 1000**2] * 2
    # The first layer's input needs no gradient, so the layer does not keep its cast weight.
    more = [b.activation_bytes - a.activation_bytes for a, b in zip(tree.modules, without.modules, strict=True)]
    assert more == [0, 0, 2 * 1000**2]
    assert all(a.time < b.time for a, b in zip(tree.modules[1:], without.modules[1:], strict=True))


def test_equal_blocks_before_a_large_head_are_not_split():
    with torch.device("meta"):
        blocks = [_Residual(2048) for _ in range(32)]
        module = nn.Sequential(nn.Embedding(50_304, 2048), *blocks, nn.Linear(2048, 50_304, bias=False))
    tokens = torch.zeros(2, 1024, dtype=torch.long)
    found = assignment.auto_partition(module, (tokens,), {}, _config(4, memory_weight=0.2, microbatches=16), {})
    assert all(found[f"{place}.up"] == found[f"{place}.down"] for place in range(1, 33))


def test_memory_counts_only_where_it_is_scarce():
    """The first of two ranks keeps the activations of two microbatches, so balancing memory costs time."""
    with torch.device("meta"):
        module = nn.Sequential(*[_Residual(1024) for _ in range(16)])
    inputs = torch.empty(8, 1024, 1024, device="meta")

    def blocks_of_the_first(memory_bytes):
        found = assignment.auto_partition(module, (inputs,), {}, _config(2), {}, memory_bytes=memory_bytes)
        return sum(found[str(place)] == 0 for place in range(16))

    weighted = blocks_of_the_first(None)
    assert weighted < 8
    assert blocks_of_the_first(1 << 60) == 8
    assert blocks_of_the_first(1) == weighted


class _Clip(nn.Module):
    def forward(self, x):
        return x / 2 if x.abs().max().item() > 1e6 else x


class _Stack(nn.Module):
    """Layers whose own forward reads values, itself or in a submodule."""

    def __init__(self, layers, clip=None, width=32):
        super().__init__()
        self.layers, self.clip = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)), clip

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return _Clip.forward(self, x) if self.clip is None else self.clip(x)


def _partitioned(monkeypatch, module, partitions=2, manual=None, **config):
    """Returns the partitions of parameters, the warnings and the counted fallbacks."""
    noted = []
    monkeypatch.setattr(_core, "note_fallback", noted.append)
    config, manual = _config(partitions, **{"load_partition": False, **config}), manual or {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = assignment.auto_partition(module, (torch.randn(4, 32),), {}, config, manual)
        found = assignment.with_manual(module, found, manual, config)
    homes = {index for path, index in found.items() if dict(module.named_modules())[path]._parameters}
    return homes, [str(one.message) for one in caught], noted


def test_a_large_module_that_cannot_be_divided_is_told(monkeypatch):
    homes, (undivided, empty), noted = _partitioned(monkeypatch, _Stack(4))
    assert homes == {0}
    assert noted == ["undivided_module"]
    assert undivided.startswith("the model, with 100% of the parameters, is put on one partition as a whole: its own ")
    assert "DataDependentOutputException: aten._local_scalar_dense.default. Move reads of values" in undivided
    assert "leaves partition 1 of 2 without parameters" in empty
    module = nn.Sequential(nn.Linear(32, 32), _Stack(3), _Stack(4))
    homes, (text,), noted = _partitioned(monkeypatch, module)
    assert homes == {0, 1}
    assert noted == ["undivided_module"] * 2
    assert text.startswith("`2`, with 50% of the parameters, is put on one partition as a whole (1 more, too): ")


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (lambda: _Stack(4, _Clip()), {}),
        (lambda: _Stack(4), {"skip_tracing": True}),
        (lambda: _Stack(4), {"manual": {"layers.2": 1, "layers.3": 1}}),
        # Less than a quarter of a partition.
        (lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)), _Stack(2)), {}),
        # A partition cannot divide a single weight.
        (lambda: nn.Sequential(nn.Linear(32, 32), _Stack(1), nn.Linear(32, 32)), {}),
    ],
    ids=["small submodule", "by sizes", "by hand", "small module", "one weight"],
)
def test_modules_that_are_divided_or_small_are_not_told(module, config, monkeypatch):
    assert _partitioned(monkeypatch, module(), **config) == ({0, 1}, [], [])


def test_empty_partitions_of_an_automatic_partition_are_told(monkeypatch):
    homes, (text,), _ = _partitioned(monkeypatch, nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)), 4)
    assert homes == {0, 1}
    assert "leaves partitions 2, 3 of 4 without parameters" in text
    # Nor does a model without parameters have any, nor must the script's own partitions be complete.
    assert _partitioned(monkeypatch, nn.Sequential(nn.ReLU(), nn.ReLU()))[1] == []
    assert _partitioned(monkeypatch, nn.Sequential(nn.Linear(32, 32)), auto_partition=False)[1] == []


def test_a_model_larger_than_memory():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(100_000, 100_000) for _ in range(8)))  # 320 GB
    found = assignment.auto_partition(module, (torch.randn(1, 100_000),), {}, _config(4), {})
    assert [found[str(layer)] for layer in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    tree = cost_trace.structure(module)
    assert sum(part.parameter_bytes for part in tree.modules) > 300e9
    with pytest.raises(cost_trace.TraceError, match="some have none yet"):
        cost_trace.trace(module, (torch.randn(1, 100_000),), {}, measure_times=True)


def test_measured_times_follow_the_work_of_layers():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(700, 700), nn.Linear(4, 4))
    module.forward = lambda x: module[2](module[0](x)) + module[1](torch.zeros(300, 700)).sum()
    tree = cost_trace.trace(module, (torch.randn(1, 4),), {}, measure_times=True)
    assert tree.modules[2].time > tree.modules[1].time + tree.modules[3].time


class _Reaching(nn.Module):
    """`nn.MultiheadAttention` uses the weights of a submodule that it never calls, and the root uses the embedding's
    weight.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([nn.MultiheadAttention(16, 2) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return nn.functional.linear(x * self.scale, self.embedding.weight)


def test_modules_that_use_weights_of_others_stay_together():
    module = _Reaching()
    found = assignment.auto_partition(module, (torch.zeros(2, 8, dtype=torch.long),), {}, _config(3), {})
    for layer in range(4):
        assert found[f"layers.{layer}"] == found[f"layers.{layer}.out_proj"]
    assert len(set(found.values())) == 3


def test_models_with_compiled_and_scripted_modules_are_partitioned():
    module = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert cost_trace.trace(module, (torch.randn(2, 8),), {}).values
    module[1] = torch.jit.script(nn.Linear(8, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = assignment.auto_partition(module, (torch.randn(2, 8),), {}, _config(3), {})
    assert [found[str(layer)] for layer in range(3)] == [0, 1, 2], caught


class _DependsOnValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x):
        return self.layers(x) if x.sum().item() > 0 else x


def test_without_a_trace_parameter_sizes_decide():
    with pytest.warns(UserWarning, match="partitioned by the sizes of parameters alone: DataDependentOutputException"):
        found = assignment.auto_partition(_DependsOnValues(), (torch.randn(2, 8),), {}, _config(2), {})
    assert [found[f"layers.{layer}"] for layer in range(4)] == [0, 0, 1, 1]
    found = assignment.auto_partition(_DependsOnValues(), (), {}, _config(2, skip_tracing=True), {})
    assert [found[f"layers.{layer}"] for layer in range(4)] == [0, 0, 1, 1]


def _bart():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=64, **sizes, **heads))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return model, (), {"input_ids": tokens, "labels": tokens}


class _Unused(nn.Module):
    """The forward uses the shared weight under one of its names. The other module that holds it is never called and
    sits among modules of another partition.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.part = nn.Module()
        self.part.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.part.embedding = nn.Embedding(50, 16)
        self.part.embedding.weight = self.embedding.weight

    def forward(self, tokens):
        return self.part.layers(self.layers(self.embedding(tokens)))


def _unused():
    return _Unused(), (torch.zeros(2, 8, dtype=torch.long),), {}


@pytest.mark.parametrize("skip_tracing", [False, True])
@pytest.mark.parametrize("partitions", [2, 3, 4])
@pytest.mark.parametrize("model", [_t5, _bart, _unused])
def test_modules_that_share_a_parameter_are_on_one_partition(model, partitions, skip_tracing):
    module, args, kwargs = model()
    found = assignment.auto_partition(module, args, kwargs, _config(partitions, skip_tracing=skip_tracing), {})
    assert set(found.values()) == set(range(partitions))
    tree = cost_trace.structure(module)
    assert tree.ties
    for tie in tree.ties:
        assert len({found[tree.modules[at].path] for at in tie}) == 1


@pytest.mark.parametrize("share", ["parameters", "list", "view", "buffers"])
def test_modules_that_share_memory_are_tied(share):
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(4)))
    assert not cost_trace.structure(module).ties
    one, other = module[0], module[2]
    if share == "parameters":
        other.weight = nn.Parameter(one.weight.data[:])
    elif share == "list":
        other.kept = [{"weight": one.weight}]
    elif share == "view":
        other.kept = one.weight.data[1:]
    else:
        other.running_mean = one.running_mean[:]
    # The forward of the model itself runs on all ranks.
    module.kept = list(module.parameters())
    # Buffers often do not change.
    module[3].kept = module[1].running_mean
    assert cost_trace.structure(module).ties == [[1, 3]]


def test_tensors_share_elements_or_only_a_storage():
    whole = torch.zeros(4, 6)
    left, right = whole[:, :3], whole[:, 3:]
    assert not shared_memory.shares_elements(left, right)
    assert shared_memory.shares_elements(left, whole[:, 2:])
    assert shared_memory.shares_elements(left, whole)
    assert not shared_memory.shares_elements(whole[:2], whole[2:])
    assert shared_memory.shares_elements(whole.view(torch.int32)[:, 1], left)
    assert not shared_memory.shares_elements(whole[:0], whole)


def test_views_of_delayed_parameters_share_their_memory():
    with delay_param_initialization():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        module[1].weight = nn.Parameter(module[0].weight[1:3])
    shared = shared_memory.find(module)
    assert [(each.path, each.other_path) for each in shared] == [("0.weight", "1.weight")]
    materialize(module, types.SimpleNamespace(of=lambda part: 0), 0, torch.device("cpu"), shared)
    assert torch.equal(module[0].weight[1:3], module[1].weight)
    assert shared_memory.shares_elements(module[0].weight, module[1].weight)


def test_manual_partitions_and_partition_files(tmp_path):
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    file = str(tmp_path / "partition.json")
    config = _config(3, auto_partition=False, default_partition=1)
    found = assignment.auto_partition(module, (), {}, config, {"1": 2, "0": 0})
    assert found == {"": 1, "0": 0, "1": 2, "1.0": 2, "1.1": 2, "2": 1}
    partition_file.write(file, found)
    assert assignment.auto_partition(module, (), {}, _config(3, load_partition=True, partition_file=file), {}) == found
    with pytest.raises(ValueError, match="`1` is put on partition 3, but there are 3"):
        assignment.by_hand(module, {"1": 3}, 0, 3)
    with pytest.raises(ValueError, match=r"names modules that the model does not have: 1\.0, 1\.1"):
        assignment.load(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)), file, 3)
    module[2].weight = module[0].weight
    with pytest.raises(
        ValueError, match="share a parameter, or are one unit, lie on different partitions: `0` on 0, `2` on 1"
    ):
        assignment.by_hand(module, {"0": 0}, 1, 3)


def test_the_table_of_partitions_is_shown_with_and_without_a_logging_setup(monkeypatch, capsys, caplog):
    caplog.set_level(logging.INFO, "smdistributed.modelparallel")
    partition_file.log_table("one  0\n")
    assert caplog.messages == ["Partition assignments:\none  0"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    partition_file.log_table("one  0\n")
    assert capsys.readouterr().err == "Partition assignments:\none  0\n"


def test_ranks_in_different_containers_can_write_partition_files_at_once(tmp_path):
    # With PID namespaces, another rank may have the same process id, and so the same temporary file name.
    other = tmp_path / f".decision.json.{os.getpid()}"
    other.write_text("another rank is writing this")
    partition_file.write(str(tmp_path / "decision.json"), {"": 0, "one": 1})
    assert partition_file.read(str(tmp_path / "decision.json"), 2) == {"": 0, "one": 1}
    assert other.read_text() == "another rank is writing this"
    assert len(list(tmp_path.iterdir())) == 2
    # A failed write leaves no temporary file.
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        partition_file.write(str(tmp_path / "folder"), {"": 0})
    assert len(list(tmp_path.iterdir())) == 3
