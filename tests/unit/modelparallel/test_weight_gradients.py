"""Gradients of weights that are computed apart from the rest of a backward."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import smdistributed.modelparallel.torch as smp  # noqa: E402, F401
from support.smp.weight_uses import USES  # noqa: E402


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


#: For each kind of layers: the weights whose gradients can be deferred.
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
        assert waiting == (_DEFERRED[kind] if deferred else set())
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
        assert torch.classes.smd.WeightGradients([use(torch.nn.Parameter(torch.randn(4, 5)))], [x]).size() == 0
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


@pytest.mark.parametrize("is_last", [False, True], ids=["input with gradient", "input without"])
@pytest.mark.parametrize("has_other_strides", [False, True], ids=["row-major", "other strides"])
@pytest.mark.parametrize("use", USES)
def test_uses_of_a_weight_have_their_gradient_later(use, has_other_strides, is_last):
    torch.manual_seed(0)
    shape, shape_of_x, function = USES[use]
    dtype = torch.bfloat16 if use.startswith("groups") else torch.float64
    own = torch.randn(shape, dtype=dtype)
    if has_other_strides:
        if use in ("reshaped", "parts", "einsum over heads"):
            pytest.skip("there is no such view of this weight")
        # Those of channels_last, and of a transposed matrix.
        own = own.to(memory_format=torch.channels_last) if own.dim() == 4 else own.mT.contiguous().mT
    weight, expected = nn.Parameter(own), nn.Parameter(own.clone())
    assert weight.stride() == expected.stride()
    waiting, gradients = [], []
    for _ in range(3):
        x = torch.randn(shape_of_x, dtype=dtype)
        ours, theirs = (x.clone().requires_grad_(not is_last) for _ in range(2))
        output, whole = function(weight, ours), function(expected, theirs)
        gradient = torch.randn_like(whole)
        waiting.append(_backward(output, gradient, deferred=True, inputs=[] if is_last else [ours]))
        assert waiting[-1].unsplit_node() == ""
        whole.backward(gradient)
        gradients.append((ours.grad, theirs.grad))
    assert weight.grad is None, "the gradient was not deferred"
    for each in waiting:
        each.run()
    for ours, theirs in gradients if not is_last else ():
        torch.testing.assert_close(ours, theirs)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(weight.grad, expected.grad, **tolerance)
    assert weight.grad.stride() == expected.grad.stride()


def test_a_product_of_two_parts_of_a_weight_is_left_to_pytorch():
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 2)
    expected, gradient = nn.Parameter(weight.detach().clone()), torch.randn(3, 4)
    _backward(x @ (weight[:2, :2] @ weight[2:]), gradient, deferred=True).run()
    (x @ (expected[:2, :2] @ expected[2:])).backward(gradient)
    torch.testing.assert_close(weight.grad, expected.grad)


def test_a_product_with_a_view_that_the_gradient_does_not_have_is_left_to_pytorch():
    # The reshape of a copy of a transposed weight is no view of the gradient.
    weight, x = nn.Parameter(torch.randn(5, 4)), torch.randn(3, 2, requires_grad=True)
    weights = _backward(x @ weight.t().contiguous().view(2, 10), torch.ones(3, 10), deferred=True, inputs=[x])
    assert weights.size() == 0
    torch.testing.assert_close(weight.grad, (x.detach().T @ torch.ones(3, 10)).view(4, 5).T)


def test_the_gradient_of_an_embedding_is_deferred():
    torch.manual_seed(0)
    for options in ({}, {"padding_idx": 1}, {"scale_grad_by_freq": True}):
        table = nn.Embedding(7, 4, **options)
        expected, head = copy.deepcopy(table), nn.Linear(4, 7, bias=False)
        waiting = []
        for _ in range(2):
            numbers, gradient = torch.randint(7, (3, 5)), torch.randn(3, 5, 7)
            waiting.append(_backward(head(table(numbers)), gradient, deferred=True))
            head(expected(numbers)).backward(gradient)
            head.zero_grad()
        assert table.weight.grad is None
        for each in waiting:
            each.run()
        torch.testing.assert_close(table.weight.grad, expected.weight.grad)
    sparse = nn.Embedding(7, 4, sparse=True)
    _backward(sparse(torch.tensor([1, 2])), torch.ones(2, 4), deferred=True)
    assert sparse.weight.grad.is_sparse


def test_a_head_that_is_tied_to_the_embedding_in_one_stage():
    torch.manual_seed(0)
    table, numbers, gradient = nn.Embedding(7, 4), torch.randint(7, (5,)), torch.randn(5, 7)
    expected = copy.deepcopy(table)
    for _ in range(2):
        functional.linear(expected(numbers), expected.weight).backward(gradient)
        weights = _backward(functional.linear(table(numbers), table.weight), gradient, deferred=True)
        # The embedding's gradient is deferred, the head's is not: autograd reaches the weight through the embedding.
        assert weights.size() == 1
        weights.run()
    torch.testing.assert_close(table.weight.grad, expected.weight.grad)


class _OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def test_a_backward_that_cannot_be_split_names_its_node():
    x, layer = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 5)

    def unsplit(output):
        return torch.classes.smd.WeightGradients([output], [x]).unsplit_node()

    assert unsplit(_OwnLinear.apply(x, layer.weight)) == "_OwnLinearBackward, weight of shape [5, 4]"
    assert unsplit(layer(x)) == ""
    # Some small weights may have their gradients within the backward.
    small = nn.Parameter(torch.randn(2, 4))
    assert unsplit(torch.cat([layer(x), _OwnLinear.apply(x, small)], 1)) == ""
    large = nn.Parameter(torch.randn(20, 4))
    assert unsplit(torch.cat([layer(x), _OwnLinear.apply(x, large)], 1)).startswith("_OwnLinearBackward")
    assert unsplit(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)) == "CheckpointFunctionBackward"
    assert unsplit(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)) == ""
    table = nn.Embedding(7, 4, sparse=True)
    assert unsplit(table(torch.tensor([1])) + x) == ""
    layer.weight.register_hook(lambda gradient: gradient)
    assert unsplit(layer(x)) == "AddmmBackward0, weight of shape [5, 4]"


def test_hooks_of_a_layers_node_see_the_gradient_of_the_weight():
    table, x, weight = nn.Embedding(7, 4), torch.randn(3, 4), nn.Parameter(torch.randn(4, 5))
    for output in (table(torch.tensor([1, 2, 1])), x @ weight):
        output.grad_fn.register_hook(lambda inputs, _: tuple(None if each is None else 3 * each for each in inputs))
        weights = _backward(output, torch.ones_like(output), deferred=True)
        assert weights.size() == 0
    torch.testing.assert_close(weight.grad, 3 * x.t() @ torch.ones(3, 5))
    assert table.weight.grad[1].tolist() == [6.0] * 4


def test_sparse_inputs_of_products():
    dense = torch.randn(3, 4).relu()
    for make in (lambda x: x.to_sparse(), lambda x: x.to_sparse_csr()):
        weight = nn.Parameter(torch.randn(5, 4))
        for _ in range(2):
            weights = _backward(make(dense) @ weight.t(), torch.ones(3, 5), deferred=True)
            weights.run()
        torch.testing.assert_close(weight.grad, 2 * torch.ones(3, 5).t() @ dense)
    batches, weight = torch.randn(2, 3, 4).relu(), nn.Parameter(torch.randn(2, 4, 5))
    for _ in range(2):
        _backward(torch.bmm(batches.to_sparse(), weight), torch.ones(2, 3, 5), deferred=True).run()
    torch.testing.assert_close(weight.grad, 2 * batches.mT @ torch.ones(2, 3, 5))
