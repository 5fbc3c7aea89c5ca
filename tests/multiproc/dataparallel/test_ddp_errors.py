"""Errors of DistributedDataParallel: every rank raises promptly and names the cause; no rank hangs."""

from __future__ import annotations

import time

from support import Forked, run_ranks, start_ranks


def _start():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

    dist.init_process_group()
    torch.manual_seed(0)
    return torch, dist, DistributedDataParallel


def _caught(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def _mismatch_body():
    torch, dist, ddp_class = _start()
    nn, rank = torch.nn, dist.get_rank()
    odd = rank == 1
    models = {
        "shape": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if odd else 4)),
        "dtype": nn.Linear(4, 4).double() if odd else nn.Linear(4, 4),
        "count": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=not odd)),
        "options": nn.Linear(4, 4),
    }
    errors = {}
    for name, model in models.items():
        cap = 1 if name == "options" and odd else 25
        errors[name] = _caught(lambda model=model, cap=cap: ddp_class(model, bucket_cap_mb=cap))
    # The job stays usable after the errors.
    ddp_class(nn.Linear(3, 3))(torch.ones(2, 3)).sum().backward()
    return errors


def test_constructor_names_differing_models_on_every_rank():
    outcomes = run_ranks(_mismatch_body, 3, launcher=Forked("torch"))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    errors = outcomes[0]
    assert {kind for kind, _ in errors.values()} == {"MismatchError"}
    assert "`1.weight` has shape [4, 4] on rank 0 and [5, 4] on rank 1" in errors["shape"][1]
    assert "`weight` is float32 on rank 0 and float64 on rank 1" in errors["dtype"][1]
    assert "rank 0 has 4 parameters and rank 1 has 3: `1.bias` is only on rank 0" in errors["count"][1]
    assert "[1048576, 26214400] on rank 0 and [1048576, 1048576] on rank 1" in errors["options"][1]


def _unused_body(cases):
    torch, dist, ddp_class = _start()
    rank = dist.get_rank()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(4, 4)
            self.head = torch.nn.Linear(4, 4)

        def forward(self, x, skip):
            y = self.used(x)
            return y if skip else self.head(y)

    outcomes = []
    for culprits in cases:
        model = ddp_class(Model())
        errors = []
        for step in range(5):
            model.zero_grad()
            skip = rank in culprits and step % 2 == 1
            errors.append(_caught(lambda model=model, skip=skip: model(torch.ones(2, 4), skip).sum().backward()))
        outcomes.append((errors, sum(p.grad.sum() for p in model.parameters()).item()))
    return outcomes


def test_unused_parameters_are_named_on_every_rank_and_the_model_stays_usable():
    cases = [[1], [0, 1, 2]]
    outcomes = run_ranks(_unused_body, 3, cases, launcher=Forked("torch"))
    for case, culprits in enumerate(cases):
        for rank, outcome in enumerate(outcomes):
            errors, total = outcome[case]
            assert [kind for kind, _ in errors[::2]] == [None] * 3, errors
            assert total == outcomes[0][case][1]
            for kind, text in errors[1::2]:
                assert kind in ("RuntimeError", "DistBackendError", "ValueError")
                assert "`head.weight`, `head.bias`" in text, text
                assert "find_unused_parameters=True" in text, text
                named = rank if rank in culprits else culprits[0]
                assert f"on rank {named}" in text or any(f"rank {c} " in text for c in culprits)


def _raising_body(places):
    torch, dist, ddp_class = _start()
    return [_raise_at(torch, dist, ddp_class, where) for where in places]


def _raise_at(torch, dist, ddp_class, where):
    rank = dist.get_rank()

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, armed):
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.armed:
                raise ArithmeticError("a user's own error")
            return gradient, None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, x, armed):
            for index, layer in enumerate(self.layers):
                x = Explode.apply(x, armed and index == where)
                x = layer(x)
            return x

    model = ddp_class(Model(), bucket_cap_mb=16384 / 2**20)
    errors = []
    for step in range(4):
        model.zero_grad()
        x = torch.ones(2, 64, requires_grad=True)
        start = time.monotonic()
        errors.append(_caught(lambda armed=(rank == 1 and step % 2 == 1), x=x: model(x, armed).sum().backward()))
        assert time.monotonic() - start < 5
        # A collective right after the failed backward: it does not match a leftover one of that backward.
        dist.barrier()
    return errors


def test_an_exception_inside_one_ranks_backward_reaches_the_others():
    places = [0, 2, 3]
    outcomes = run_ranks(_raising_body, 2, places, launcher=Forked("torch"))
    cases = [
        (rank, where, errors)
        for rank, outcome in enumerate(outcomes)
        for where, errors in zip(places, outcome, strict=True)
    ]
    for rank, where, errors in cases:
        assert errors[0][0] is None, errors
        assert errors[2][0] is None, errors
        for step in (1, 3):
            if rank == 1:
                assert errors[step] == ("ArithmeticError", "a user's own error")
            elif where > 0 or errors[step][0] is not None:
                # With where == 0 rank 1 has computed all gradients before it raises, so rank 0's backward may succeed.
                assert "rank 1" in errors[step][1], (where, errors)
                assert "its backward ended with an exception" in errors[step][1]


def _uncaught_body():
    torch, dist, ddp_class = _start()
    model = ddp_class(torch.nn.Linear(4, 4))
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            raise ArithmeticError("a user's own error")
        model(torch.ones(2, 4)).sum().backward()


def test_an_uncaught_exception_on_one_rank_ends_the_others():
    with start_ranks(_uncaught_body, 2, timeout=60) as job:
        outcome = job.wait()
    assert not outcome.timed_out
    assert "rank 1" in outcome.ranks[0].error
    assert "a user's own error" in outcome.ranks[0].error


def _killed_body():
    import os
    import signal

    torch, dist, ddp_class = _start()
    model = ddp_class(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))))
    for step in range(20):
        if step == 10 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        kind, text = _caught(lambda: model(torch.ones(2, 256)).sum().backward())
        if kind:
            return step, time.monotonic() - start, text
    return None


def test_backward_names_a_killed_rank():
    with start_ranks(_killed_body, 3, timeout=60) as job:
        outcome = job.wait()
    for rank in (0, 2):
        step, seconds, text = outcome.ranks[rank].value
        assert step == 10, text
        assert seconds < 5, text
        assert "rank 1 died" in text, text


def _gradient_body():
    torch, _dist, ddp_class = _start()
    errors = {}
    model = ddp_class(torch.nn.Linear(4, 4))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    embedding = ddp_class(torch.nn.Embedding(5, 4))
    embedding.module.sparse = True  # after the wrap: the reducer expects a dense gradient
    errors["sparse"] = _caught(lambda: embedding(torch.tensor([1, 2])).sum().backward())
    frozen = ddp_class(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    frozen.module[0].requires_grad_(False)
    errors["frozen"] = _caught(lambda: frozen(x).sum().backward())
    thawed = ddp_class(torch.nn.Sequential(torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)))
    thawed.module[0].requires_grad_(True)
    errors["thawed"] = _caught(lambda: thawed(x).sum().backward())
    added = ddp_class(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    added.module.append(torch.nn.Linear(4, 4))
    errors["added"] = _caught(lambda: added(x).sum().backward())
    changing = ddp_class(torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)), static_graph=True)
    changing.module.forward = lambda x, which: changing.module[which](x)
    changing(x, 0).sum().backward()
    errors["static"] = _caught(lambda: changing(x, 1).sum().backward())
    taken = ddp_class(torch.nn.Linear(4, 4))
    taken.module.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    errors["taken"] = _caught(lambda: taken(x).sum().backward())
    moved = ddp_class(torch.nn.Linear(4, 4))
    moved.double()
    errors["moved"] = _caught(lambda: moved(x.double()).sum().backward())
    return errors


def test_gradients_that_cannot_be_reduced_are_named():
    for errors in run_ranks(_gradient_body, 2, launcher=Forked("torch")):
        assert "`weight` has layout Sparse" in errors["sparse"][1]
        assert "`sparse=True`" in errors["sparse"][1]
        assert "`0.weight`, `0.bias`; they were frozen" in errors["frozen"][1], errors["frozen"]
        assert "`0.weight` was frozen when" in errors["thawed"][1], errors["thawed"]
        assert "`1.weight` was added after" in errors["added"][1], errors["added"]
        assert "`1." in errors["static"][1], errors["static"]
        assert "the graph is not static" in errors["static"][1], errors["static"]
        assert "`weight`" in errors["taken"][1]
        assert "was removed before it was reduced" in errors["taken"][1]
        assert "it is a Double tensor on cpu" in errors["moved"][1]


def _arguments_body():
    import torch

    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch import parallel

    ddp_class = parallel.DistributedDataParallel
    model = torch.nn.Linear(2, 2)
    errors = {"before": _caught(lambda: ddp_class(model))}
    dist.init_process_group()
    calls = {
        "fraction": {"bucket_cap_mb": 1.00001},
        "zero": {"bucket_cap_mb": 0},
        "text": {"bucket_cap_mb": "25"},
        "steps": {"gradient_accumulation_steps": 0},
        "output": {"output_device": 0},
        "devices": {"device_ids": [0, 1]},
        "device": {"device_ids": [0]},
        "unknown": {"bucket_size": 3},
        "mixed": {"mixed_precision": object()},
        "delay": {"delay_all_reduce_named_params": [("weight", model.weight)]},
        "mesh": {"device_mesh": object(), "process_group": dist.group.WORLD},
    }
    for name, keywords in calls.items():
        errors[name] = _caught(lambda keywords=keywords: ddp_class(model, **keywords))
    errors["module"] = _caught(lambda: ddp_class("model"))
    errors["frozen"] = _caught(lambda: ddp_class(torch.nn.Linear(2, 2).requires_grad_(False)))
    for keywords in ({"device_ids": []}, {"bucket_cap_mb": 0.5}, {"dim": 0}, {"process_group": dist.group.WORLD}):
        ddp_class(model, **keywords)
    return {name: kind for name, (kind, _) in errors.items()}


def test_arguments_are_checked():
    assert run_ranks(_arguments_body, 1, launcher=Forked("torch")) == [
        {
            "before": "SMDDPNotInitializedError",
            "fraction": "ValueError",
            "zero": "ValueError",
            "text": "ValueError",
            "steps": "ValueError",
            "output": "ValueError",
            "devices": "ValueError",
            "device": "ValueError",
            "unknown": "TypeError",
            "mixed": "TypeError",
            "delay": "ValueError",
            "mesh": "RuntimeError",
            "module": "TypeError",
            "frozen": "RuntimeError",
        }
    ]
