"""Attention masks that mask nothing: which are dropped, and which are not read."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional  # noqa: E402

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed.modelparallel.torch.nn import scores  # noqa: E402
from smdistributed.modelparallel.torch.nn.options import BlockOptions  # noqa: E402
from smdistributed.modelparallel.torch.nn.relative_bias import RelativeBias  # noqa: E402

EMPTY = torch.zeros(2, 1, 1, 6)
PADDED = EMPTY.index_fill(-1, torch.tensor([5]), torch.finfo(torch.float32).min)


@pytest.fixture
def passed(monkeypatch):
    """For each call of PyTorch's attention: whether it has a mask, is causal, and has grouped heads."""
    found = []
    original = functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        found.append((attn_mask is not None, is_causal, enable_gqa))
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    return found


@pytest.fixture
def read(monkeypatch):
    """The masks that are read; none is known already."""
    found = []
    scores._read.clear()
    original = torch.Tensor.any
    monkeypatch.setattr(torch.Tensor, "any", lambda self: (found.append(self), original(self))[1])
    return found


def _reads(mask, activations=EMPTY):
    return scores.masks_nothing(mask, activations)


def test_the_values_decide():
    assert _reads(EMPTY)
    assert _reads(-EMPTY)
    assert _reads(torch.zeros(2, 1, 6, 6, dtype=torch.float64))
    assert not _reads(PADDED)
    assert not _reads(torch.full((2, 1, 1, 6), torch.nan))


def test_a_mask_of_a_pipeline_is_read_once_and_again_after_a_write(read, monkeypatch):
    monkeypatch.setattr(scores, "layers_drop_masks", lambda: True)
    mask = EMPTY.clone()
    assert _reads(mask)
    assert _reads(mask)
    assert len(read) == 1
    mask[0, 0, 0, 5] = -1e9
    assert not _reads(mask)
    mask.zero_()
    assert _reads(mask)
    assert len(read) == 3


def test_writes_that_no_version_shows_are_seen_without_partitions():
    mask = EMPTY.clone()
    assert _reads(mask)
    mask.numpy()[0, 0, 0, 5] = -1e9
    assert not _reads(mask)


@pytest.mark.parametrize(
    "shape", [(2, 6), (2, 1, 6), (2, 1, 1, 5), (3, 1, 1, 6), (2, 3, 1, 6), (2, 1, 5, 6), (2, 1, 1, 1, 6)]
)
def test_masks_of_other_shapes_are_kept(shape):
    assert not scores.has_attention_shape(torch.zeros(shape), 2, 6, 6)
    assert scores.has_attention_shape(EMPTY, 2, 6, 6)


def test_a_mask_of_the_inference_mode_is_read_again(read):
    with torch.inference_mode():
        mask = EMPTY.clone()
        assert _reads(mask)
        mask.fill_(-1.0)
        assert not _reads(mask)
    assert len(read) == 2


def test_masks_with_gradients_stay():
    assert not _reads(EMPTY.clone().requires_grad_())
    assert not _reads(torch.nn.Parameter(EMPTY.clone(), requires_grad=False))


def test_masks_whose_values_cannot_be_read_stay(read):
    assert not _reads(EMPTY.to("meta"), EMPTY.to("meta"))
    # PyTorch raises the error for a mask on another device than the activations, whatever its values are.
    assert not _reads(EMPTY, EMPTY.to("meta"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert not _reads(mode.from_tensor(EMPTY))
        # Activations are fake, and the mask is a tensor from outside.
        assert not _reads(EMPTY, mode.from_tensor(EMPTY))
    assert read == []


def _without_empty(mask):
    return EMPTY + (1.0 if _reads(mask) else 2.0)


TRANSFORMS = {
    "vmap": torch.vmap(_without_empty),
    "jvp": lambda mask: torch.func.jvp(_without_empty, (mask,), (mask,))[0],
    "jit": lambda mask: torch.jit.trace(_without_empty, mask, check_trace=False)(mask),
    "make_fx": lambda mask: make_fx(_without_empty)(mask)(mask),
    "fx": lambda mask: torch.fx.symbolic_trace(_without_empty)(mask),
    "compile": torch.compile(_without_empty, backend="eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_masks_stay_where_code_is_traced_or_transformed(name):
    assert (TRANSFORMS[name](EMPTY) == 2.0).all()


def test_a_cuda_graph_keeps_its_mask_with_a_warning(monkeypatch, read):
    class OnDevice:
        """What is read of a tensor on a GPU before its values are."""

        requires_grad, is_cuda, device = False, True, torch.device("cuda:0")

    scores._warn_of_bias.cache_clear()
    monkeypatch.setattr(scores.torch, "Tensor", OnDevice)
    monkeypatch.setattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(
        UserWarning, match="because it has a mask in a CUDA graph, where values cannot be read"
    ) as caught:
        assert not any(_reads(OnDevice(), OnDevice()) for _ in range(2))
    assert len(caught) == 1


def _stack(**more):
    torch.manual_seed(0)
    sizes = {
        "num_layers": 2, "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24,
        "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
    }  # fmt: skip
    return smp.nn.DistributedTransformer(**sizes | more)


HIDDEN = torch.linspace(-1, 1, 2 * 6 * 16).view(2, 6, 16).sin()


@pytest.mark.parametrize(
    ("more", "expected", "reads"),
    [
        ({"causal_mask_size": 6}, (False, True, False), 1),
        ({}, (False, False, False), 1),
        ({"causal_mask_size": 6, "options": {"num_key_value_heads": 2}}, (False, True, True), 1),
        ({"causal_mask_size": 6, "options": {"windows": (6,)}}, (False, True, False), 1),
        # A bias is needed in any case, so that the mask is not read.
        ({"causal_mask_size": 6, "options": {"windows": (5,)}}, (True, False, False), 0),
        ({"causal_mask_size": 6, "options": {"use_alibi": True}}, (True, False, False), 0),
        ({"options": {"relative_bias": RelativeBias()}}, (True, False, False), 0),
    ],
    ids=["causal", "bidirectional", "grouped", "wide window", "window", "alibi", "relative bias"],
)
def test_a_stack_drops_its_mask_where_no_bias_is_left(more, expected, reads, passed, read):
    more = {**more, "options": BlockOptions(**more.get("options", {}))}
    stack = _stack(**more)
    outputs = [stack((HIDDEN, mask))[0] for mask in (None, EMPTY)]
    assert passed == [expected] * 4
    assert len(read) == reads
    assert torch.equal(*outputs)


def test_windows_of_some_layers_keep_their_bias(passed):
    stack = _stack(causal_mask_size=6, options=BlockOptions(windows=(None, 3)))
    stack((HIDDEN, EMPTY))
    assert passed == [(False, True, False), (True, False, False)]


def test_a_padded_mask_masks(passed):
    stack, changed = _stack(), HIDDEN.clone()
    changed[:, 5] += 1.0
    outputs = [stack((hidden, PADDED))[0][:, :5] for hidden in (HIDDEN, changed)]
    assert passed == [(True, False, False)] * 4
    assert torch.equal(*outputs)
    assert not torch.allclose(stack((HIDDEN, EMPTY))[0][:, :5], outputs[0])


def test_cross_attention_drops_its_mask(passed, read):
    stack = _stack(causal_mask_size=6, add_cross_attention=True)
    other = torch.linspace(-1, 1, 2 * 3 * 16).view(2, 3, 16).cos()
    stack((HIDDEN, other, EMPTY, torch.zeros(2, 1, 1, 3)))
    assert passed == [(False, True, False), (False, False, False)] * 2
    assert len(read) == 2


def test_single_layers_drop_their_masks(passed):
    layer = _stack(causal_mask_size=6).seq_layers[0]
    layer.is_inside = False
    layer((HIDDEN, EMPTY))
    layer.attention((HIDDEN, EMPTY))
    assert passed == [(False, True, False)] * 2


@pytest.mark.filterwarnings("error")
def test_recomputed_layers_read_no_mask_again(passed, read):
    stack = _stack(causal_mask_size=6)
    for layer in stack.seq_layers:
        smp.set_activation_checkpointing(layer)
    stack((HIDDEN.clone().requires_grad_(), EMPTY))[0].sum().backward()
    assert passed == [(False, True, False)] * 4
    assert len(read) == 1
