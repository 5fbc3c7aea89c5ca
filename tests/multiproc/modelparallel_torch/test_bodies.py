"""Step bodies on partitions give the results of plain PyTorch, or raise: random programs, and programs for regressions.

`parity/step_bodies.py` runs thousands of random programs.
"""

from __future__ import annotations

from typing import Any

import pytest

from parity.step_bodies import DEFECTS, run_all
from support import more
from support.step_bodies import Program, draw

#: Seeds of the random programs, by the number of partitions.
SEEDS = {
    2: [5, 8, 19, 24, 42, 47, 49, 71, 85, 91, 515042, 616165, 717088, 717354, 2000523, 2000608],
    3: [12, 14, 17, 29, 30, 33, 2040535, 3010126, 3040018],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("partitions", [2, more(3)])
def test_random_bodies_equal_plain_pytorch_or_raise(partitions):
    results = run_all({seed: draw(seed, partitions) for seed in SEEDS[partitions]}, partitions)
    assert sorted(results) == sorted(SEEDS[partitions])
    wrong = [
        f"seed {seed}: {kind}: {description}"
        for seed, (kind, description) in results.items()
        if kind in (*DEFECTS, "invalid")
    ]
    assert not wrong, "\n".join(wrong)


def _program(
    partitions: int, layers: dict[str, str], places: dict[str, int] | None, body: list[str], **parts: Any
) -> Program:
    given = {"schedule": "interleaved", "dtype": "float64", "prepare": [], "forward": [], "result": "loss, h", **parts}
    return Program(seed=1, partitions=partitions, layers=layers, places=places, body=body, **given)


#: Partitions of the layers `begin` and `a`.
_TWO = {"begin": 0, "a": 1}
#: Layers on one partition that may share state, and a layer on the other partition that uses their results.
_TABLES = {"a": "Table", "b": "Table", "d": "Mode"}
_SHARING = {"begin": 0, "a": 1, "b": 1, "d": 0}
#: Regressions: programs that once gave results that differ from plain PyTorch, or raised. Layers are classes of
#: `support/step_layers.py`.
EQUAL = {
    "a call reads the buffer that a later stage writes": _program(
        2, {"a": "Momentum"}, _TWO, ["net.a.eval()", "h = net.a(y)"], forward=["f1 = net.a(h)", "h = h + f1"]
    ),
    "the body reads a buffer that a call in a later stage writes": _program(
        2, {"a": "Momentum"}, _TWO, ["t1 = net.a(h)", "h = h + t1 + net.a.running"]
    ),
    "a submodule is called after its parent": _program(
        2, {"a": "Mode"}, _TWO, ["t1 = net.a(h)", "h = net.a.linear(h) + t1"]
    ),
    "batch-norm statistics are updated in the order of the microbatches": _program(
        2, {"a": "Norm"}, _TWO, ["h = h * h.mean().item()", "h = net.a(h)"], forward=["h = net.a(h)"]
    ),
    "a call reads the attribute that the previous call has set": _program(
        2, {"a": "Last"}, {"begin": 0, "a": 0}, ["h = net.a(h)", "h = net.a(h)"]
    ),
    "`storage_offset()` of an argument of the body": _program(2, {"a": "Mode"}, _TWO, ["h = net.a(y + 0.01 * y.storage_offset())"]),
    "a module returns its argument": _program(
        2, {"a": "Mode"}, _TWO, ["net.a.eval()", "t1 = net.a(h)", "h = t1 + net.a(y)"]
    ),
    "`_version` of arguments of the body": _program(2, {"a": "Mode"}, _TWO, ["y.add_(1)", "h = net.a(y * (1 + x._version + y._version))"]),
    "a tensor that an earlier task reads changes in inference mode": _program(
        2, {"a": "Mode"}, _TWO, ["t1 = net.a(y)", "with torch.inference_mode():\n    y.clamp_(min=0)", "h = net.a(y)"]
    ),
    "a view that was taken under `no_grad` has no gradient": _program(
        2,
        {"a": "Mode"},
        _TWO,
        ["with torch.no_grad():\n    t1 = h[0]", "h = net.a(y) + t1.mean()"],
        forward=["f1 = net.a(h)"],
    ),
    "a write under `no_grad` keeps the autograd graph": _program(
        2, {"a": "Mlp"}, {"begin": 1, "a": 0}, ["with torch.no_grad():\n    h.mul_(2)", "h = net.a(h)"], schedule="zero_bubble"
    ),
    "a view that was taken under `no_grad`, of a tensor that changes later": _program(
        3,
        {"a": "Mlp", "b": "Cut"},
        {"begin": 2, "a": 1, "b": 1},
        ["with torch.no_grad():\n    t1 = h.t()", "if h.sum() > 0:\n    h = h * 2", "h = h + t1.mean()"],
        forward=["f1 = F.pad(net.b(h), (1, 1))", "h = net.a(h)", "F.relu(f1[:, :2], inplace=True)"],
    ),
    "a tensor of the previous microbatch or step is used": _program(
        2, {"a": "Mode"}, _TWO, ["h = net.a(h if keep.last is None else h + keep.last)", "keep.last = h.detach()"]
    ),
    "a running sum over microbatches, read with `item()`": _program(
        2,
        {"a": "Mode"},
        _TWO,
        ["h = net.a(h)", "keep.count = keep.count * 0.5 + h.detach().mean()", "h = h * (keep.count.item() + keep.count)"],
        schedule="zero_bubble",
    ),
    "a running sum over microbatches that is updated in place": _program(
        2,
        {"a": "Norm"},
        _TWO,
        ["keep.last = h.detach().clone() if keep.last is None else keep.last.mul_(0.5).add_(h.detach())", "h = net.a(h) + keep.last"],
    ),
    "tensors of earlier microbatches are detached in a later one": _program(
        3,
        {"a": "Mode", "b": "Last"},
        {"begin": 2, "a": 0, "b": 1},
        ["keep.seen.append(h)", "h = net.a(h) + net.b(x) + sum(each.detach() for each in keep.seen[:2])"],
        result="{'loss': loss, 'values': [keep.seen[0], h]}",
    ),
    "a buffer is sent before a call of its module changes it": _program(
        2, {"a": "Momentum"}, _TWO, ["t2 = net.a(h)", "h = h + net.a.running", "t3 = net.a(y)", "h = h + t2 + t3"]
    ),
    "a parameter is sent before the body changes it": _program(
        2,
        {"a": "Mode"},
        _TWO,
        ["h = h + net.a.linear.bias", "with torch.no_grad():\n    net.a.linear.bias.mul_(0.5)", "h = h + net.a(y)"],
    ),
    "`item()` of a buffer after a call that changes it": _program(
        2, {"a": "Norm"}, _TWO, ["h = net.a(h)", "h = h * 0.01 * net.a.norm.num_batches_tracked.item()"]
    ),
    "a module keeps its output, which a later call in the same stage changes in place": _program(
        2, {"a": "Last", "b": "Writer"}, {"begin": 0, "a": 0, "b": 0}, ["t1 = net.a(h)", "t2 = net.b(t1)", "h = net.a(h) + t2"]
    ),
    "a call that draws is scheduled before an earlier one that waits for its input": _program(
        3,
        {"a": "Drop", "b": "Mode"},
        {"begin": 0, "a": 2, "b": 1},
        ["torch.manual_seed(1)\nt1 = net.a(h)", "torch.manual_seed(3)\nh = net.a(y) + net.b(t1)"],
    ),
    "the body changes its microbatch in place while tasks of other microbatches read slices of the same batch": _program(
        2,
        {"a": "Mode", "b": "Pair"},
        {"begin": 1, "a": 0, "b": 1},
        ["y.add_(0.5)", "h = net.b(x)['left']"],
        forward=["h = net.a(h)"],
    ),
    "modes of modules that are set back between a checkpoint and the backward": _program(
        2, {"a": "Mode"}, _TWO,
        [
            "h = torch.utils.checkpoint.checkpoint(lambda t: net.a(t), h, use_reentrant=True)",
            "net.train(False)", "h = net.a(h)", "net.train(True)",
        ],
    ),
    "a reentrant checkpoint of an input that requires no gradient": _program(
        2,
        {"a": "Mlp"},
        _TWO,
        ["t1 = torch.utils.checkpoint.checkpoint(lambda t: net.a(t) * t, x, use_reentrant=True)", "h = net.a(h) + t1"],
    ),
    "each microbatch adds values of a partition to a tensor from outside the step": _program(
        2,
        {"a": "Mode"},
        _TWO,
        ["h = net.a(h) + keep.total", "keep.total.add_(h.detach().mean())"],
        prepare=["keep.total = torch.zeros(())"],
    ),
    "a call changes a slice of the batch after autograd has saved another slice": _program(
        2, {"a": "Writer"}, {"begin": 1, "a": 0}, ["t1 = torch.vmap(lambda row: row * 2)(h)", "h = net.a(x)"]
    ),
    "ranks run the same plan although they estimate different costs for a call": _program(
        2,
        {"a": "Masked", "c": "Last"},
        _TWO | {"c": 1},
        ["model.backward(h.mean())", "h = net.begin(h.detach())", "h = net.c(y)"],
        forward=["random.seed(3)", "f1 = h * random.random()", "h = torch.tanh(h)", "h = h * 1.5", "h = h * 2", "net.eval()", "h = net.a(h)"],
    ),
    "calls write to a slice of the batch that autograd has saved": _program(
        2, {"a": "Writer"}, _TWO, ["with torch.no_grad():\n    t1 = net.a(y)", "h = net.a(y)"]
    ),
    "a call under `no_grad` changes a tensor of another partition before a call with gradients": _program(
        2, {"a": "Writer", "c": "Writer"}, _TWO | {"a": 1, "c": 0, "begin": 1},
        ["with torch.no_grad():\n    t1 = net.c(h)", "t2 = net.a(h)", "h = h + t1 + t2"],
    ),
    "the body reads an attribute that a call in the previous step has set": _program(
        2, {"a": "Auxiliary"}, _TWO,
        ["if net.a.penalty is not None:\n    h = h + net.a.penalty", "with torch.no_grad():\n    t1 = net.a(y)", "h = h + t1"],
    ),
    "a module changes its own parameter, which is frozen for another call": _program(
        2, {}, {"begin": 0},
        ["net.begin.weight.requires_grad_(False)", "h = net.begin(h)", "net.begin.weight.requires_grad_(True)"],
        forward=["with torch.no_grad():\n    net.begin.weight.mul_(0.9)"],
    ),
    "the body changes a parameter in place before a later stage of the same partition uses it": _program(
        2, {"a": "Mode"}, _TWO, ["with torch.no_grad():\n    net.begin.weight.mul_(0.9)", "h = F.linear(net.begin(net.a(h)), net.begin.weight)"],
        dtype="float32",
    ),
    "a write to a view under `no_grad` after values were read with `tolist()`": _program(
        2, {"b": "Norm"}, {"begin": 0, "b": 1},
        [
            "t1 = net.b(h)", "keep.seen.extend(t1.detach().mean(1).tolist())", "h = h + sum(keep.seen) * 0.1",
            "with torch.set_grad_enabled(False):\n    h[0].mul_(0.0)",
        ],
    ),
    "the body changes the contents of attributes between calls and restores them": _program(
        2, {"a": "Scaled"}, _TWO,
        [
            "net.a.options['shift'] = 0.5\nh = net.a(h)\nnet.a.options['shift'] = 0.0\nh = net.a(h)",
            "net.a.config.inner.power = 2\nnet.a.table.append(0.25)\nh = net.a(torch.tanh(h))",
            "net.a.config.inner.power = 1\nnet.a.table.pop()\nh = net.a(torch.tanh(h))",
        ],
        forward=["f1 = net.a(h)"], schedule="zero_bubble",
    ),
    "the body changes the contents of attributes and reads values with `item()`": _program(
        2, {"a": "Scaled"}, _TWO,
        [
            "h = net.a(h)\nnet.a.options['shift'] = 0.5\nnet.a.table[0] = 2.0",
            "h = net.a(h * (1 + h.detach().mean().item()))\nnet.a.table.clear()\nh = h + net.a(h)",
            "net.a.options['shift'] = y.abs().mean()\nh = h + net.a(h)\nnet.a.table += [1.0, 0.5]\nnet.a.options['shift'] = 0.0",
        ],
    ),
    "the body changes a list that it has put into a list in an attribute": _program(
        2, {"c": "Nested"}, {"begin": 1, "c": 0},
        ["net.c.settings['levels'][1] = [-1.0]", "h = net.c(x)", "net.c.settings['levels'][1][0] = 0.5", "h = h + net.c(h)"],
    ),
    "the body appends to a list that it has assigned to an attribute": _program(
        2, {"a": "Scaled"}, _TWO,
        ["net.a.table = keep.seen", "keep.seen.append(0.5)\nh = net.a(h)", "keep.seen.append(0.25)\nh = h + net.a(y)"],
    ),
    "the body changes a tensor in an attribute in place between calls": _program(
        2, {"a": "Offset"}, _TWO, ["h = net.a(h)", "net.a.offset.add_(1)", "h = net.a(h)", "net.a.offset[:2].mul_(0.5)"],
    ),
    "the body changes a tensor in an attribute through `.data`, then assigns another one": _program(
        2, {"a": "Offset"}, _TWO,
        ["h = net.a(h)", "net.a.offset.data.add_(1)", "h = net.a(h)", "t1 = y * 1.0", "net.a.offset = t1[0]", "h = net.a(h)", "t1.mul_(0.5)"],
    ),
    "calls write to a tensor in an attribute, with a call on another partition between them": _program(
        2, {"a": "Seen", "b": "Mode"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)", "h = net.a(h)"],
    ),
    "a call writes to a tensor in an attribute of a module that enters the second step in evaluation mode": _program(
        2, {"a": "Seen", "b": "Noise"}, _TWO | {"b": 1}, ["net.a.train(False)", "h = net.a(h) + net.b(y)"],
    ),
    "the first call creates a buffer, and all calls count in tensors": _program(
        2, {"a": "Lazy"}, _TWO, ["h = net.a(h)", "net.a.eval()", "h = h + net.a(y)"],
    ),
    "automatic partitioning of a model whose calls change attributes": _program(
        2, {"a": "Seen", "b": "Last", "c": "Table", "d": "Lazy"}, None, ["h = net.a(h)", "h = net.b(h) + net.b(y)"],
        forward=["h = net.a(h)", "h = net.b(h)", "h = net.c(h)", "h = net.d(h)"],
    ),
    "automatic partitioning of a model whose forward stores a tensor and whose hook counts calls": _program(
        2, {"a": "Mode", "b": "Mode"}, None, ["h = net.a(h)", "h = net.b(h) * (1 + keep.count * 0.01)"],
        forward=["h = net.a(h)", "h = h * 1.0 if keep.last is None else h + keep.last", "keep.last = h.detach()"],
        prepare=["net.a.register_forward_hook(lambda module, args, output: setattr(keep, 'count', keep.count + 1))"],
    ),
    "calls count in a dictionary, with a call on another partition between them": _program(
        2, {"a": "Table", "b": "Mode"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)", "h = net.a(h)"],
    ),
    "calls store their input's mean in a dictionary": _program(
        2, {"a": "Memo", "b": "Mode"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)", "h = net.a(h)"],
    ),
    "modules on two partitions share a dictionary, to which they add entries that depend on shapes only": _program(
        2, {"a": "Memo", "b": "Memo"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)", "h = net.a(h)"],
        prepare=["net.eval()", "net.a.table = net.b.table"],
    ),
    "the body sets an attribute that calls set": _program(
        2, {"a": "Last", "b": "Mode"}, _TWO | {"b": 0},
        [
            "net.a.last = None\nh = net.a(h)\nh = net.a(h)", "net.a.last = torch.zeros(3, 4)", "net.b.eval()",
            "h = net.a(net.b(h))", "h = h + net.a.last", "net.a.last = x",
        ],
    ),
    "the body sets an attribute that calls set, before a call of another module": _program(
        2, {"b": "Momentum", "c": "Last"}, {"begin": 1, "b": 0, "c": 0},
        ["t1 = net.c(y)", "net.c.last = torch.ones(3, 4)", "h = net.b(h)", "h = net.c(t1) + h"],
    ),
    "the script sets tensors in attributes between steps (not in the body)": _program(
        2, {"a": "Offset", "b": "Seen"}, _TWO | {"b": 0}, ["h = net.b(net.a(h))", "h = net.b(h)"],
        between=["net.a.offset = torch.ones(3, 4) * step", "net.a.more[0] = torch.ones(4)", "if step == 1:\n    net.b.seen = torch.ones(4)"],
    ),
    "the body sets an attribute that calls set, before it reads a value with `item()`": _program(
        2, {"a": "Last"}, _TWO,
        ["h = net.a(h)", "net.a.last = None", "h = h * (1 + h.detach().mean().item())", "h = net.a(h)", "h = net.a(h)"],
    ),
    "a tensor is overwritten through its `detach()`": _program(
        2, {"a": "Mode", "b": "Mode"}, _TWO | {"b": 0}, ["t2 = net.b(y)", "h = net.a(h) + 2", "h.detach().copy_(t2)"],
    ),
    "a detached tensor requires a gradient after a write": _program(
        2, {"a": "Mode", "b": "Mode"}, _TWO | {"b": 0},
        [
            "t2 = net.b(y)", "t = net.a(h).detach() + 2", "d = t.detach()", "v = d[0]", "d.add_(t2)", "h = d + v",
            "h = h + t if t.requires_grad else h * 2", "h = h if v.requires_grad else h * 2", "h = h if d.is_leaf else h * 3",
        ],
    ),
    "a replicated tensor requires a gradient after a write": _program(
        2, {"a": "Mode"}, _TWO,
        ["t1 = x * 1.0", "t1.add_(net.a(y))", "h = h + t1 if t1.requires_grad else h", "h = h if t1.grad_fn is None else h * 2"],
    ),
    "one of two outputs of a module that share a storage changes in place": _program(
        2, {"a": "Mode", "e": "Pair"}, _TWO | {"e": 0},
        ["t1 = net.e(h)['left']", "t2 = t1.data[1:]", "t2 += net.a(y)[1:].detach()", "h = net.a(h) + t1"],
    ),
    "the body changes nested lists of an attribute, which it has put there between calls": _program(
        2, {"a": "Nested"}, _TWO,
        [
            "h = torch.tanh(net.a(net.a(h)))", "net.a.settings['levels'][1] = [0.75]", "h = net.a(h)",
            "net.a.settings['levels'][1][0] = 0.5", "h = torch.tanh(net.a(net.a(h)))",
            "net.a.settings['levels'][1] = [0.0]", "h = net.a(h)", "net.a.settings['inner'].shifts = ([2.0], [0.125])",
            "h = net.a(h)", "net.a.settings['inner'].shifts[1][0] = -1.0", "h = net.a(h)",
        ],
    ),
    "the body changes a list while it is in no attribute": _program(
        2, {"a": "Nested"}, _TWO,
        [
            "t1 = net.a.settings['levels'][1] = [3.0]", "h = net.a(h)", "net.a.settings['levels'][1] = [0.0]",
            "h = net.a(net.a(h))", "t1[0] = 2.0", "net.a.settings['levels'][1] = t1", "h = net.a(h)", "t1[0] = 1.0", "h = torch.tanh(net.a(h))",
        ],
    ),
    "calls of two modules change one dictionary": _program(
        2, _TABLES, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"],
        prepare=["net.b.table = net.a.table"], schedule="simple",
    ),
    "calls of three modules change one dictionary": _program(
        2, _TABLES | {"c": "Table"}, _SHARING | {"c": 1},
        ["h = net.b(h)", "t1 = net.c(x)", "h = net.d(h) + net.d(net.a(y)) * net.d(t1)"],
        prepare=["net.b.table = net.c.table = net.a.table"], schedule="simple",
    ),
    "calls of two modules change one dictionary from the second step on": _program(
        2, _TABLES, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"],
        between=["if step == 1:\n    net.b.table = net.a.table"], schedule="simple",
    ),
    "calls of two modules change one dictionary until the second step": _program(
        2, _TABLES, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"], prepare=["net.b.table = net.a.table"],
        between=["if step == 1:\n    net.b.table = {'calls': 1}"], schedule="simple",
    ),
    "calls of two modules change one dictionary, in a body that reads values with `item()`": _program(
        2, _TABLES, _SHARING, ["h = net.b(h)", "h = h * h.mean().item()", "h = net.d(h) + net.d(net.a(y))"],
        prepare=["net.b.table = net.a.table"], schedule="simple",
    ),
    "calls of two modules write to one tensor in an attribute": _program(
        2, {"a": "Seen", "b": "Seen", "d": "Mode"}, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"],
        prepare=["net.b.seen = net.a.seen"], schedule="simple",
    ),
    "calls write to a tensor of which another module has a view": _program(
        2, {"a": "Seen", "b": "Offset", "d": "Mode"}, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"],
        prepare=["net.b.more[0] = net.a.seen[:]"], schedule="simple",
    ),
    "calls of two modules write to one buffer": _program(
        2, {"a": "Momentum", "b": "Momentum", "d": "Mode"}, _SHARING, ["h = net.b(h)", "h = net.d(h) + net.d(net.a(y))"],
        prepare=["net.b.running = net.a.running"], schedule="simple",
    ),
    "the result of a call is used after later calls that change the module's buffer": _program(
        2, {"a": "Momentum", "d": "Mode"}, _SHARING, ["t1 = net.a(y)", "h = net.d(net.a(h))", "h = net.a(h) + t1"],
    ),
    "the result of a call is used after calls of another module that change its dictionary": _program(
        2, _TABLES, _SHARING, ["t1 = net.a(y)", "h = net.d(net.b(h))", "h = net.a(h) + t1"],
        prepare=["net.b.table = net.a.table"],
    ),
    "an operation with a buffer is used after a call that changes the buffer": _program(
        2, {"a": "Momentum", "d": "Mode"}, _SHARING, ["t1 = net.a.running * 2", "h = net.d(net.a(h))", "h = net.a(h) + t1"],
    ),
    "the body reads a buffer to which it and then a call have written": _program(
        2, {"a": "Momentum", "d": "Mode"}, _SHARING,
        ["net.a.running.add_(1)", "h = torch.tanh(net.d(net.a(h)))", "h = net.d(h) + net.a.running"],
    ),
    "the body reads running statistics to which it and then a call have written": _program(
        2, {"a": "Norm", "d": "Mode"}, _SHARING,
        ["net.a.norm.running_mean.add_(1)", "h = torch.tanh(net.d(net.a(h)))", "h = net.d(h) + net.a.norm.running_mean"],
    ),
    "the body writes to a tensor that two modules have in attributes": _program(
        2, {"a": "Offset", "b": "Offset"}, _SHARING | {"b": 0}, ["h = net.b(h)", "net.a.offset.copy_(x.mean(0))", "h = h + net.a(y)"],
        prepare=["net.b.offset = net.a.offset"],
    ),
    "the body writes to two tensors in attributes, one after the other": _program(
        2, {"a": "Offset", "b": "Offset"}, _SHARING | {"b": 0},
        ["h = net.b(net.a(h))", "net.a.offset.copy_(x.mean(0))", "net.b.offset.copy_(y.mean(0))", "h = net.b(net.a(h))"],
    ),
    "a call takes a buffer that another call has returned and changes in the next microbatch": _program(
        2, {"a": "Own", "b": "Mode"}, _SHARING, ["h = net.b(net.a(h)['mean'])"], schedule="zero_bubble",
    ),
    "an operation takes a buffer that a call has returned and changes in the next microbatch": _program(
        2, {"a": "Own", "b": "Mode"}, _SHARING, ["h = net.b(h) * net.a(y)['mean']"],
    ),
    "a write in a later stage to a view of a detached tensor": _program(
        2, {"a": "Mode"}, _TWO, ["t1 = net.a(h)", "t2 = (h * 1.0).detach()", "t3 = t2[0]", "t3.mul_(t1[0])", "h = h + t2"],
    ),
}  # fmt: skip
#: Programs that raise an error of the library, with a part of its message.
REFUSED = {
    "a write through `.data` to a tensor that a module has saved, when its forward reads values with `tolist()`": (
        _program(
            2, {}, {"begin": 0}, ["x.data.add_(h)"],
            forward=["keep.seen.extend(h.detach().mean(1).tolist())", "h = h + sum(keep.seen) * 0.1"],
        ),
        "through `.data` to a tensor that autograd has saved for the backward of `Model`",
    ),
    "a change of an argument of a checkpoint in the body": (
        _program(
            2, {"a": "Mode"}, _TWO,
            ["h = torch.utils.checkpoint.checkpoint(lambda t: net.a(torch.tanh(t)), y, use_reentrant=False)", "y.data.mul_(0.0)"],
        ),
        "changes a tensor in place that the function of a `torch.utils.checkpoint.checkpoint` reads",
    ),
    "`set_` gives a slice of the batch another storage": (
        _program(2, {"a": "Mode"}, _TWO, ["h = net.a(y)"], forward=["x.t().set_(x)"]),
        "`set_` replaces the storage of a tensor",
    ),
    "`_version` of a tensor whose storage tasks write to": (
        _program(2, {"a": "Mode"}, _TWO, ["x[:, h.argmax() % 4] = 2.0", "h = net.a(x * 0.5) * y._version"]),
        "`_version` of a tensor, inside of a `smp.step` function, whose storage",
    ),
    "a write after `model.backward` to a tensor that the backward needs": (
        _program(
            2, {"a": "Writer"}, {"begin": 0, "a": 0},
            ["model.backward(F.mse_loss(net.a(x), y))", "x[:, y.argmax() % 4] = 2.0", "h = net.a(x * 0.5)"],
        ),
        "after `model.backward` changes in place a tensor that autograd has saved for the backward of `a`",
    ),
    "a module that changes its own parameter, in a body that reads values with `item()`": (
        _program(
            2, {"a": "Mode"}, {"begin": 0, "a": 0}, ["keep.seen.append(F.mse_loss(h, h).item())"],
            forward=["with torch.no_grad():\n    net.begin.weight.mul_(0.9)"],
        ),
        "changes the parameter",
    ),
    "a write through `.data` to a tensor that a module has saved": (
        _program(2, {"a": "Norm"}, _TWO, ["t1 = net.a(h)", "h.data.mul_(2)", "h = h + t1"]),
        "through `.data` to a tensor that autograd has saved for the backward of `a`",
    ),
    "a write through `.data` to a saved argument": (
        _program(2, {"a": "Mode"}, _TWO, ["t1 = net.a(x)", "x.data[x > 0] = 0.5", "h = h + t1"]),
        "through `.data` to a tensor that autograd has saved for the backward of `begin`",
    ),
    "an assignment to `.data` of a saved argument": (
        _program(2, {"a": "Mode"}, _TWO, ["t1 = net.a(x)", "x.data = y", "h = h + t1"]),
        "through `.data` to a tensor that autograd has saved for the backward of `begin`",
    ),
    "a write of a partition's values through `.data`": (
        _program(2, {"a": "Mode"}, _TWO, ["t1 = net.a(x)", "x.data.copy_(h)", "h = h + t1"]),
        "through `.data` to a tensor that autograd has saved for the backward of `begin`",
    ),
    "a write through `.data` after a write to another slice of the same storage": (
        _program(
            2,
            {"a": "Norm"},
            _TWO,
            ["h = Through.apply(y)", "with torch.no_grad():\n    y[2].clamp_(min=0)", "h = net.a(h)", "x.data.clamp_(-0.5, 0.5)"],
        ),
        "`clamp_` writes in place through `.data` to a tensor that autograd has saved for the backward of `begin`",
    ),
    "a view of a buffer that a call changes": (
        _program(2, {"a": "Momentum"}, _TWO, ["t1 = net.a.running[:2]", "t2 = net.a(h)", "h = h + t1.sum() + t2"]),
        "`a` on partition 1 changed `a.running` in place, and this tensor is a view of it",
    ),
    "a view of running statistics that a call changes": (
        _program(2, {"a": "Norm"}, _TWO, ["t1 = net.a.norm.running_mean[:2]", "t2 = net.a(h)", "h = h + t1.sum() + t2"]),
        "`a` on partition 1 changed `a.norm.running_mean` in place, and this tensor is a view of it",
    ),
    "a call changes running statistics that the backward of the microbatch before needs": (
        _program(
            2, {"a": "Norm", "d": "Mode"}, _SHARING,
            ["h = net.d(net.a(h))", "net.a.eval()", "h = net.d(net.a(h)) * h.mean().item()", "net.a.train()"],
        ),
        "`a` changes the parameter `a.norm.running_mean` in place, and the `smp.step` function reads values",
    ),
    "a call on another partition changes the tensor that a module keeps": (
        _program(2, {"a": "Last", "b": "Writer"}, {"begin": 0, "a": 0, "b": 1}, ["t1 = net.a(h)", "t2 = net.b(t1)", "h = net.a(h) + t2"]),
        "the tensor in `a.last` was changed in place",
    ),
    "the body writes values of another partition to the tensor that a module keeps": (
        _program(2, {"a": "Last", "b": "Mode"}, _TWO | {"a": 0, "b": 1}, ["t1 = net.a(h)", "t1.add_(net.b(y))", "h = net.a(h) + t1"]),
        "the tensor in `a.last` was changed in place",
    ),
    "the body reads a count that a call changes": (
        _program(2, {"a": "Counter"}, _TWO, ["h = net.a(h)", "h = h * 0.01 * net.a.calls"]),
        "uses the attribute `a.calls`, which a call of its module changes",
    ),
    "the body sets a count that a call changes": (
        _program(2, {"a": "Counter"}, _TWO, ["net.a.calls = 1", "h = net.a(h)"]),
        "uses the attribute `a.calls`, which a call of its module changes",
    ),
    "the body changes a parameter in place and reads a value with `item()`": (
        _program(
            2,
            {"a": "Mode"},
            _TWO,
            ["with torch.no_grad():\n    net.a.linear.weight.mul_(0.9)", "h = net.a(h)", "h = h * (1 + h.sum().item() * 0.01)"],
        ),
        "`mul_` changes the parameter `a.linear.weight` in place, and the `smp.step` function reads values",
    ),
    "the body changes a parameter in place before another partition uses it": (
        _program(2, {"a": "Mode"}, _TWO, ["with torch.no_grad():\n    net.begin.weight.mul_(0.9)", "h = F.linear(net.a(h), net.begin.weight)"]),
        "uses the parameter `begin.weight` of partition 0 after the `smp.step` function has changed it",
    ),
    "`_version` of a tensor on a partition": (
        _program(2, {"a": "Mode"}, _TWO, ["h = net.a(h) * h._version"]),
        "`_version` of a tensor on a partition",
    ),
    "an in-place change of a tensor that an earlier microbatch has returned": (
        _program(
            2, {"a": "Mode"}, _TWO, ["keep.last = h.detach() if keep.last is None else keep.last.add_(1)"], result="loss, keep.last"
        ),
        "a tensor of an earlier microbatch or step is changed in place",
    ),
    "a write through `.data` to a slice of the batch, after another slice was written with its values": (
        _program(
            2, {"a": "Mlp"}, _TWO,
            ["t1 = net.a(y)", "x.index_put_((torch.tensor([0, 2]),), y[:2].detach(), accumulate=True)", "h = net.begin(x * 0.5)", "y.data.masked_fill_(x > 0, 3.0)"],
        ),
        "`masked_fill_` writes in place through `.data` to a tensor that autograd has saved for the backward of `a`",
    ),
    "modules on two partitions share a dictionary that calls change": (
        _program(2, {"a": "Table", "b": "Table"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)"], prepare=["net.a.table = net.b.table"]),
        "a call of `a` on partition 1 changes the content of `a.table`; modules on other partitions have",
    ),
    "modules on two partitions share a dictionary in which calls store their input's mean": (
        _program(2, {"a": "Memo", "b": "Memo"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)"], prepare=["net.a.table = net.b.table"]),
        "changes the content of `a.table`; modules on other partitions have",
    ),
    "modules on two partitions share a tensor to which calls write": (
        _program(2, {"a": "Seen", "b": "Offset"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)"], prepare=["net.b.offset = net.a.seen"]),
        "a call of `a` on partition 1 changes the content of `a.seen`; modules on other partitions have",
    ),
    "modules on two partitions share a tensor to which calls write, from the second step on": (
        _program(
            2, {"a": "Seen", "b": "Offset"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)"],
            between=["if step == 1:\n    net.b.offset = net.a.seen"],
        ),
        "a call of `a` on partition 1 changes the content of `a.seen`; modules on other partitions have",
    ),
    "modules on two partitions share a dictionary that calls change, from the second step on": (
        _program(
            2, {"a": "Table", "b": "Table"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h)"],
            between=["if step == 1:\n    net.b.table = net.a.table"],
        ),
        "a call of `a` on partition 1 changes the content of `a.table`; modules on other partitions have",
    ),
    "the body reads a tensor that the script has assigned to an attribute to which calls write": (
        _program(
            2, {"a": "Seen", "b": "Mode"}, _TWO | {"b": 0}, ["h = net.a(h)", "h = net.b(h) + keep.one"],
            prepare=["keep.one = torch.zeros(4)"], between=["if step == 1:\n    net.a.seen = keep.one = torch.zeros(4)"],
        ),
        "this tensor was changed in place with values of a partition",
    ),
    "the body reads an entry that a call stores in a dictionary": (
        _program(2, {"a": "Memo"}, _TWO, ["h = net.a(h)", "h = h + net.a.table['last']"]),
        "uses the attribute `a.table`, which a call of its module changes",
    ),
    "the body reads a tensor in an attribute to which calls write": (
        _program(2, {"a": "Seen"}, _TWO, ["t1 = net.a.seen", "h = net.a(h) + t1"], prepare=["keep.one = net.a.seen"]),
        "this tensor was changed in place with values of a partition",
    ),
    "the body writes values of a partition to a tensor in an attribute": (
        _program(2, {"a": "Offset"}, _TWO, ["net.a.offset.copy_(h.detach().mean(0))", "h = net.a(h)"]),
        "writes values of a partition to the tensor in `a.offset`, and then calls the module",
    ),
    "the body writes to a tensor in a list in an attribute": (
        _program(2, {"a": "Offset"}, _TWO, ["h = net.a(h)", "net.a.more[0].add_(1)", "h = net.a(h)"]),
        "`add_` changes the tensor in `a.more` in place, inside of a `smp.step` function",
    ),
    "the body sets an attribute that calls read to a tensor on a partition": (
        _program(2, {"a": "Last"}, _TWO, ["h = net.a(h)", "net.a.last = h.detach()", "h = net.a(h)"]),
        "sets `a.last` to a tensor on a partition, and a call of the module reads the attribute",
    ),
    "a buffer that a call has returned changes in the next call": (
        _program(2, {"a": "Own"}, _TWO, ["t1 = net.a(h)['mean']", "t2 = net.a(y)['mean']", "h = h + t1 + t2"]),
        "`a` on partition 1 changed `a.mean` in place, and this tensor is a view of it",
    ),
    "a buffer that a call has returned is kept for the next microbatch": (
        _program(2, {"a": "Own"}, _TWO, ["t1 = net.a(h)['mean']", "h = h + t1 if keep.last is None else h + keep.last", "keep.last = t1"]),
        "a tensor of an earlier microbatch or step is `a.mean`, or a view of it, which changes in place",
    ),
    "a change of the mode of a module after a checkpoint that calls it": (
        _program(
            2, {"a": "Mode"}, _TWO,
            ["h = torch.utils.checkpoint.checkpoint(lambda t: net.a(t), h, use_reentrant=True)", "net.train(False)"],
        ),
        "is changed after a `torch.utils.checkpoint.checkpoint` whose function calls the module",
    ),
    "a change of a tensor that the function of a checkpoint reads from its closure": (
        _program(
            2, {"a": "Mode"}, _TWO,
            ["t1 = x * 1.0", "h = torch.utils.checkpoint.checkpoint(lambda u: net.a(u) * t1, h, use_reentrant=False)", "t1.mul_(2)"],
        ),
        "`mul_` changes a tensor in place that the function of a `torch.utils.checkpoint.checkpoint` reads",
    ),
    "the body reads a dictionary that calls change through the attribute of another module": (
        _program(
            2, _TABLES | {"b": "Memo"}, _SHARING, ["h = net.a(h)", "h = h * (1 + net.b.table['calls'])"],
            prepare=["net.b.table = net.a.table"],
        ),
        "uses the attribute `b.table`, which a call of its module changes",
    ),
    "a module gets a dictionary that calls on another partition have changed in the step before": (
        _program(
            2, _TABLES | {"b": "Nested"}, _SHARING | {"b": 0},
            ["h = net.a(h) if keep.count < 4 else net.b(h)", "keep.count += 1"], prepare=["net.a.table['gain'] = 0.5"],
            between=["if step == 1:\n    net.b.settings['levels'][0] = net.a.table"],
        ),
        "a call on partition 1 has changed the content of `a.table`; a module on partition 0 has it now",
    ),
    "a module gets a tensor to which calls on another partition have written in the step before": (
        _program(
            2, {"a": "Seen", "b": "Offset"}, _TWO | {"b": 0}, ["h = net.a(h) if keep.count < 4 else net.b(h)", "keep.count += 1"],
            between=["if step == 1:\n    net.b.offset = net.a.seen"],
        ),
        "a call on partition 1 has changed the content of `b.offset`; a module on partition 0 has it now",
    ),
}  # fmt: skip


@pytest.mark.timeout(240)
@pytest.mark.parametrize("partitions", [2, 3])
def test_regressions_equal_plain_pytorch(partitions):
    names = [name for name, program in EQUAL.items() if program.partitions == partitions]
    results = run_all({number: EQUAL[name] for number, name in enumerate(names)}, partitions)
    wrong = [
        f"{name}: {': '.join(results[number])}" for number, name in enumerate(names) if results[number][0] != "equal"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(240)
def test_unsupported_bodies_raise():
    results = run_all({number: program for number, (program, _) in enumerate(REFUSED.values())}, 2)
    for number, (name, (_, text)) in enumerate(REFUSED.items()):
        kind, description = results[number]
        assert kind == "raises", f"{name}: {kind}: {description}"
        assert text in description, name
