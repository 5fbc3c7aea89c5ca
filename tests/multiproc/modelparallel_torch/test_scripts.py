"""Calls of published scripts around and inside a step: Trainer, backward calls, warnings, activation checkpointing."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from support import Forked, run_ranks

WORDS = 32


def _shared_embedding(torch):
    """Returns a model with one embedding in three modules and tied to the head, as T5 in older versions of
    transformers."""
    from torch import nn

    class Stack(nn.Module):
        def __init__(self, embedding):
            super().__init__()
            self.tokens = embedding
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

        def forward(self, tokens, start):
            hidden = self.tokens(tokens) + start
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return hidden

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Embedding(WORDS, 16)
            self.encoder, self.decoder = Stack(self.shared), Stack(self.shared)
            self.head = nn.Linear(16, WORDS, bias=False)
            self.head.weight = self.shared.weight

        def forward(self, tokens, labels):
            logits = self.head(self.decoder(labels, self.encoder(tokens, 0).mean(1, keepdim=True)))
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}

    torch.manual_seed(4)
    return Model()


def _trainer_body(torch, smp, folder):
    """Makes the calls of the SageMaker branch of Hugging Face's Trainer: training, saving and resuming."""
    import safetensors.torch

    @smp.step()
    def forward_backward(model, inputs, gradient_accumulation_steps=1):
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        loss /= gradient_accumulation_steps
        model.backward(loss)
        return loss

    def start():
        smp.init({"partitions": 2, "microbatches": 2})
        model = smp.DistributedModel(_shared_embedding(torch), backward_passes_per_step=1)
        return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    def train(model, optimizer, steps):
        losses = []
        for number in steps:
            tokens = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(number))
            loss = forward_backward(model, {"tokens": tokens, "labels": tokens.roll(1, 1)})
            losses.append(loss.reduce_mean().item())
            optimizer.step()
            model.zero_grad()
        return losses

    model, optimizer = start()
    train(model, optimizer, range(3))
    state_dict = model.state_dict()
    if smp.rank() == 0:
        # The Trainer saves a shared tensor under one of its names.
        assert state_dict["head.weight"] is not None
        kept = {name: value for name, value in state_dict.items() if "tokens" not in name and name != "head.weight"}
        for to_theirs, _ in smp.state.module_manager.translate_functions:
            kept = to_theirs(kept)
        safetensors.torch.save_file(kept, folder / "model.safetensors")
    (folder / "user_content.pt").touch()
    state = optimizer.local_state_dict(gather_if_shard=False)
    smp.barrier()
    if smp.rdp_rank() == 0 or smp.state.cfg.shard_optimizer_state:
        smp.save(state, f"{folder}/optimizer.pt", partial=True, v3=smp.state.cfg.shard_optimizer_state)
    smp.barrier()
    expected = train(model, optimizer, range(3, 6))
    smp.shutdown()

    model, optimizer = start()
    smp.resume_from_checkpoint(path=str(folder), tag="pytorch_model.bin", partial=False, load_optimizer=False)
    loads = []

    def load_optimizer(model, optimizer):
        loads.append(model)
        optimizer.load_state_dict(smp.load(f"{folder}/optimizer.pt", partial=True))

    model.register_post_step_hook(load_optimizer)
    assert train(model, optimizer, range(3, 6)) == expected
    assert loads == [model]
    smp.shutdown()


def _backward_body(torch, smp):
    """Gradients are averaged over replicas, by whichever call the step function computes them."""
    smp.init({"microbatches": 2, "ddp": True})
    torch.manual_seed(2)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    model = smp.DistributedModel(module)
    reference = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    reference.load_state_dict(module.state_dict())
    scaler = smp.amp.GradScaler(8.0, device="cpu")
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def by_hand(model, loss):
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    backward_calls = {
        "tensor": (lambda model, loss: loss.backward(), 1),
        "function": (lambda model, loss: torch.autograd.backward([loss]), 1),
        "scaler": (lambda model, loss: scaler.scale(loss).backward(), 8),
        "by hand": (by_hand, 1),
        "penalty": (
            lambda model, loss: (
                torch.autograd.grad(loss, model.module[0].weight, create_graph=True)[0].sum().backward()
            ),
            None,
        ),
        "model": (lambda model, loss: model.backward(loss), 0.5),
        "scaled model": (lambda model, loss: model.backward(scaler.scale(loss)), 4),
    }
    for name, (backward, factor) in backward_calls.items():

        @smp.step
        def train(model, x, backward=backward):
            loss = model(x).square().mean()
            backward(model, loss)
            return loss

        # In the second round gradients accumulate to those of the first one; replicas have to stay equal.
        for accumulated in (1, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                train(model, batches[smp.rank()])
            gradients_of_ranks = smp.allgather([parameter.grad for parameter in model.parameters()], smp.WORLD)
            assert all(torch.equal(a, b) for a, b in zip(*gradients_of_ranks, strict=True)), name
            if factor is None or accumulated == 2:
                continue
            losses = [reference(part).square().mean() for batch in batches for part in batch.chunk(2)]
            expected = torch.autograd.grad(sum(losses) * factor / 2, list(reference.parameters()))
            for ours, theirs in zip(gradients_of_ranks[0], expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12), name
        model.zero_grad()

    @smp.step
    def evaluate(model, x):
        return model(x)

    # A step without a backward may run on one replica only, because it reduces nothing.
    if smp.rank() == 0:
        evaluate(model, batches[0])
    with pytest.raises(smp.exceptions.SMPUsageError, match=r"inside of `smp\.step` functions"):
        model.eval().backward(model(batches[0]).sum())
    model.train()

    @smp.step(detach_outputs=False)
    def attached(model, x):
        return model(x)

    outputs = attached(model, batches[smp.rank()])
    with pytest.raises(smp.exceptions.SMPUsageError, match="after that function has ended"):
        outputs.concat().mean().backward()

    @smp.step
    def late(model, output):
        output.mean().backward(retain_graph=True)

    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        late(model, attached(model, batches[smp.rank()]).concat())
    gradients_of_ranks = smp.allgather([parameter.grad for parameter in model.parameters()], smp.WORLD)
    assert all(torch.equal(a, b) for a, b in zip(*gradients_of_ranks, strict=True))
    torch.distributed.destroy_process_group()
    smp.shutdown()


def _warning_body(torch, smp):
    """The warnings that gradients are sums over microbatches, and that they are reduced late, appear once."""
    from smdistributed import _core
    from smdistributed.modelparallel.torch.runtime.gradients import warn_of_sums
    from smdistributed.modelparallel.torch.runtime.replicas import _warn_of_one_partition

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(2, 1))

    @smp.step
    def train(model, x):
        model(x).sum().backward()

    def late_reductions():
        return dict(_core.running_fallbacks(os.getpid())[0][2])["reduced_after_backward"]

    before = late_reductions()
    warn_of_sums.cache_clear()
    _warn_of_one_partition.cache_clear()
    with pytest.warns(UserWarning, match="summed over microbatches") as found:
        train(model, torch.ones(2, 2))
    assert [each.filename for each in found] == [__file__] * 2
    assert "reduced when a step has ended, not during its backward" in str(found[1].message)
    assert late_reductions() == before + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, torch.ones(2, 2))
    torch.distributed.destroy_process_group()
    smp.shutdown()


def _spread_body(torch, smp):
    """Activation checkpointing of a module that is spread over partitions: the modules in it are recomputed."""
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensor

    calls = []

    class Part(nn.Module):
        def __init__(self, name, size):
            super().__init__()
            self.name, self.layer = name, nn.Linear(size, size) if size else None

        def forward(self, x):
            if not isinstance(x, FakeTensor):
                calls.append(self.name)
            return torch.sin(x if self.layer is None else self.layer(x)).square()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.light, self.others = Part("first", 4), Part("light", 0), nn.ModuleList([Part("other", 4)])
            self.plain, self.alone = nn.Linear(4, 4), Part("alone", 0)

        def forward(self, x):
            return self.plain(self.others[0](self.light(self.first(x)))) + x

    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    for kind in ("module", "light", "function"):
        torch.manual_seed(6)
        whole = nn.Sequential(nn.Linear(4, 4), Block(), Part("alone", 0))
        alone = nn.Sequential(nn.Linear(4, 4), Block(), Part("alone", 0))
        alone.load_state_dict(whole.state_dict())
        smp.set_partition(whole[1].others[0], 1)
        model = smp.DistributedModel(whole)
        if kind == "module":
            smp.set_activation_checkpointing(whole[1])
        elif kind == "light":
            smp.set_activation_checkpointing(whole[2])

        @smp.step
        def train(model, x, kind=kind):
            y = model(x)
            if kind == "function":
                y = smp.patches.checkpoint.checkpoint(model.module[1].alone, y)
            loss = y.sum()
            model.backward(loss)
            return loss

        for number in range(2):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
            calls.clear()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                losses = train(model, x)
            warned = [each for each in found if "is checkpointed and spread over partitions" in str(each.message)]
            assert len(warned) == (kind == "module" and number == 0)
            ours = sorted(calls)
            mine = {0: [], 1: []}
            again = {"module": 2, "light": 1, "function": 1}[kind]
            mine[0] += ["first"] * 2 * again
            mine[1] += ["other"] * 2 * again
            # A module without parameters runs on the partition of its input.
            mine[0] += ["light"] * 2 * again
            mine[0] += ["alone"] * {"module": 2, "light": 4, "function": 6}[kind]
            calls.clear()
            expected = []
            for piece in x.chunk(2):
                y = alone(piece)
                expected.append((alone[1].alone(y) if kind == "function" else y).sum())
                (expected[-1] / 2).backward()
            assert torch.allclose(torch.stack(losses.outputs), torch.stack(expected))
            # A recorded module runs its `forward` on every rank. Only a module that is one task runs on one rank alone.
            counted = {name: ours.count(name) for name in set(ours)}
            wanted = {name: mine[smp.pp_rank()].count(name) for name in set(mine[smp.pp_rank()])}
            for name in ("first", "other"):
                assert counted.get(name, 0) == wanted.get(name, 0), (kind, number, counted, wanted)
            light = {"module": "light", "light": "alone"}.get(kind)
            if light is not None:
                assert counted.get(light, 0) == wanted.get(light, 0), (kind, number, counted, wanted)
        reference = dict(alone.named_parameters())
        for name, parameter in model.local_named_parameters():
            assert torch.allclose(parameter.grad, reference[name].grad, rtol=1e-10, atol=1e-12), name
        smp.shutdown()
        smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 0})
    smp.shutdown()


def _check_models(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    _trainer_body(torch, smp, Path(folder))
    torch.set_default_dtype(torch.float64)
    _spread_body(torch, smp)
    _backward_body(torch, smp)
    _warning_body(torch, smp)


@pytest.mark.timeout(200)
def test_calls_of_published_scripts(tmp_path):
    pytest.importorskip("safetensors")
    run_ranks(_check_models, 2, str(tmp_path), launcher=Forked("torch"), timeout=180)
