"""Compares models under tensor parallelism with the same models in one process."""

from __future__ import annotations

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.checkpoint import slices

VOCABULARY, LENGTH, WIDTH = 53, 6, 16
#: Norm to which `compare` clips gradients.
COMPARED_CLIP = 0.5


def config(tp, pp, prescaled, optimize, **more):
    return {
        "tensor_parallel_degree": tp,
        "partitions": pp,
        "ddp": True,
        "prescaled_batch": prescaled,
        "optimize": optimize,
        "microbatches": 2 if pp > 1 else 1,
        **more,
    }


def _adamw(parameters):
    """Returns the optimizer of `compare`. In float32, a large epsilon keeps the rounding of gradients near 0 small."""
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-8 if torch.get_default_dtype() == torch.float64 else 0.1)


def reference(make, run, batches, steps):
    """Trains in one process; returns losses, first outputs, first gradients, their norm, and the final parameters."""
    smp.init({})
    torch.manual_seed(0)
    model = make()
    smp.shutdown()
    optimizer = _adamw(model.parameters())
    losses, outputs, first = [], None, None
    for step in range(steps):
        optimizer.zero_grad()
        parts = [run(model, *batch) for batch in batches(step)]
        loss = torch.stack([each[0] for each in parts]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), COMPARED_CLIP)
        losses.append(loss.item())
        if first is None:
            first = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            outputs, first_norm = [each[1].detach() for each in parts], norm
        optimizer.step()
    return losses, outputs, first, first_norm, {name: each.detach() for name, each in model.named_parameters()}


def gathered(model, tensors):
    """Gathers tensors of the parameters of all ranks and merges their shards; returns them by name as in one
    process.
    """
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    parts = smp.allgather(
        {names[id(each)]: tensors(each).detach() for each in model.local_parameters() if tensors(each) is not None},
        smp.MP_GROUP,
    )
    return slices.merge(parts, slices.named_shards(model.module))


def close(one, other, tolerance, what):
    # The scale has a lower bound because some gradients are 0 except for rounding: softmax does not depend on the bias
    # of the keys.
    one, other = one.cpu(), other.cpu()
    scale = max(other.abs().max().item(), 1e-4)
    difference = (one - other).abs().max().item() / scale
    assert one.shape == other.shape, (what, one.shape, other.shape)
    assert difference <= tolerance, (what, difference, one.flatten()[:4], other.flatten()[:4])


def compare(
    make, run, batch, tp, pp, rdp, prescaled, optimize, *, steps=2, tolerance=1e-10, more=None, dtype=None, names=None,
    together=False, recompute=False,
):  # fmt: skip
    """Trains in one process and with this layout, and compares losses, outputs, gradients, norms and parameters.

    Args:
        make: Makes the model.
        run: `run(model, *batch)` returns loss and output.
        batch: `batch(step, replica)` returns the batch of one data-parallel rank, as a tuple of tensors.
        names: Translates gathered tensors to the names in one process, for models whose modules are replaced by others.
        together: Whether the loss of a microbatch is not the mean over its samples. One process then computes the same
            microbatches.
        recompute: Whether the blocks of the model compute their activations again in the backward.
    """
    torch.set_default_dtype(dtype or torch.float64)
    dp = tp * rdp
    more = more or {}
    is_sharded = "sharded_data_parallel_degree" in more
    if is_sharded:
        # The step clips by itself, and most parameters are sharded.
        more = {"sdp_gradient_clipping": COMPARED_CLIP, "sdp_param_persistence_threshold": 9, **more}
    settings = config(tp, pp, prescaled, optimize, **more)

    def batches(step):
        return [batch(step, replica) for replica in range(dp)]

    def microbatches(step):
        found, joined = batches(step), tp if prescaled else 1
        wholes = [
            [torch.cat(parts) for parts in zip(*found[at : at + joined], strict=True)] for at in range(0, dp, joined)
        ]
        return [
            each
            for whole in wholes
            for each in zip(*(part.chunk(settings["microbatches"]) for part in whole), strict=True)
        ]

    losses, outputs, gradients, norm, parameters = reference(make, run, microbatches if together else batches, steps)
    smp.init(settings)
    assert (smp.tp_size(), smp.pp_size(), smp.rdp_size(), smp.dp_size()) == (tp, pp, rdp, dp)
    torch.manual_seed(0)
    model = smp.DistributedModel(make())
    assert tp == 1 or any(each.shards for each in model.distributed_modules())
    for each in _blocks(model.module) if recompute else ():
        smp.set_activation_checkpointing(each)
    optimizer = smp.DistributedOptimizer(_adamw(model.parameters())) if is_sharded else None

    @smp.step
    def step_function(model, *inputs):
        loss, output = run(model, *inputs)
        model.backward(loss)
        return loss, output

    for step in range(steps):
        everything = batches(step)
        if prescaled:
            mine = everything[smp.rdp_rank() * tp : (smp.rdp_rank() + 1) * tp]
            inputs = tuple(torch.cat(parts) for parts in zip(*mine, strict=True))
        else:
            inputs = everything[smp.dp_rank()]
        found, output = step_function(model, *inputs)
        loss = found.reduce_mean()
        mean = torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item()
        assert abs(mean - losses[step]) <= tolerance * max(1, abs(losses[step])), (step, mean, losses[step])
        if step == 0:
            # The number of reference outputs that this rank's batch covers, and the index of this batch.
            count, place = 1, smp.dp_rank()
            if together:
                count, place = settings["microbatches"], smp.rdp_rank() if prescaled else smp.dp_rank()
            elif prescaled:
                count, place = tp, smp.rdp_rank()
            own = outputs[place * count : (place + 1) * count]
            expected = own[0] if count == 1 else torch.cat(own)
            close(output.concat(), expected, tolerance, "output")
        if optimizer is None:
            optimizer = smp.DistributedOptimizer(_adamw(model.parameters()))
        if not is_sharded:
            found_norm = smp.clip_grad_norm_(model.local_parameters(), COMPARED_CLIP)
        own = gathered(model, lambda each: each.grad) if step == 0 and not is_sharded else None
        optimizer.step()
        if step == 0:
            if is_sharded:
                found_norm, own = optimizer._global_grad_norm, _averaged_gradients(optimizer)
            if names is not None:
                own = names(own)
            assert own.keys() >= gradients.keys(), gradients.keys() - own.keys()
            assert names is not None or is_sharded or own.keys() == gradients.keys(), own.keys() ^ gradients.keys()
            assert abs(found_norm.item() - norm.item()) <= tolerance * norm.item(), (found_norm, norm)
            for name, gradient in gradients.items():
                close(own[name], gradient, tolerance, f"gradient of {name}")
        optimizer.zero_grad()
    state = model.state_dict()
    ours = state if is_sharded else gathered(model, lambda each: each)
    whole = ours if names is None else names(ours)
    for name, parameter in parameters.items():
        close(whole[name], parameter, tolerance * 100, f"parameter {name}")
    for name, parameter in ours.items():
        assert torch.equal(state[name].cpu(), parameter.cpu()), name
    smp.shutdown()


def _blocks(module):
    """Returns the modules that recomputation is applied to: the members of lists and sequences, or the children of a
    model that has neither.
    """
    lists = [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    return [child for each in lists for child in each] or list(module.children()) or [module]


def _averaged_gradients(optimizer):
    """Returns the gradients, after clipping, that AdamW has averaged in its first step."""
    first_beta = optimizer.param_groups[0]["betas"][0]
    states = optimizer.state_dict()["state"]
    return {name: state["exp_avg"] / (1 - first_beta) for name, state in states.items() if "exp_avg" in state}


def tokens(step, replica, batch=4):
    """Token ids of one data-parallel rank, on the default device. They do not depend on the device."""
    generator = torch.Generator("cpu").manual_seed(100 * step + replica)
    drawn = torch.randint(VOCABULARY, (batch, LENGTH), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def states(step, replica, batch=4, length=LENGTH):
    """Activations of one data-parallel rank, on the default device. They do not depend on the device."""
    generator = torch.Generator("cpu").manual_seed(100 * step + replica)
    return torch.randn(batch, length, WIDTH, generator=generator, device="cpu").to(torch.get_default_device())


#: Norm to clip to; small enough that every step is clipped.
CLIP = 0.05


def gpt_between_layers(**more):
    """A GPT that tensor parallelism shards, followed by layers that it does not shard."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = smp.nn.DistributedTransformerLMHead(
                **{"num_positions": 8, **more}, num_layers=2, num_attention_heads=4, attention_head_size=4, hidden_size=16,
                intermediate_size=24, vocab_size=53, attention_dropout_prob=0.0, hidden_dropout_prob=0.0,
                causal_mask_size=8, pre_layernorm=True, post_layernorm=False,
            )  # fmt: skip
            self.head = nn.Linear(53, 7)
            self.norm = nn.LayerNorm(7)

        def forward(self, ids):
            logits = self.body((ids, None, None, None))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            return loss + self.norm(torch.tanh(self.head(logits))).square().mean() * self.head.weight.sum()

    return Model()


def start(settings, seed=0, make=gpt_between_layers, passes=1, **scales):
    """Initializes; returns the wrapped model, its optimizer and the step function."""
    smp.init(settings)
    torch.manual_seed(seed)
    model = smp.DistributedModel(make(), backward_passes_per_step=passes)
    wrapped = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), **scales)

    @smp.step
    def step(model, ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    return model, wrapped, step


def batch_of(step, prescaled=False):
    """Returns this rank's tokens of a step."""
    if not prescaled:
        return tokens(step, smp.dp_rank())
    tp = smp.tp_size()
    return torch.cat([tokens(step, smp.rdp_rank() * tp + at) for at in range(tp)])


def reference_states(dp, steps, passes, make):
    """Trains in one process; returns losses, norms, parameters and optimizer states."""
    smp.init({})
    torch.manual_seed(0)
    model = make()
    smp.shutdown()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            loss = torch.stack([model(tokens(step * passes + part, replica)) for replica in range(dp)]).mean()
            loss.backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(each)]: content for each, content in optimizer.state.items()}
    return losses, norms, model.state_dict(), states


def compare_sharded(
    tp, pp, rdp, *, steps=3, passes=1, tolerance=1e-10, dtype=None, prescaled=False, optimize="memory",
    recompute=False, make=gpt_between_layers, **more,
):  # fmt: skip
    """Trains in one process and with sharded parameters or states; compares losses, norms, parameters and states."""
    torch.set_default_dtype(dtype or torch.float64)
    losses, norms, weights, states = reference_states(tp * rdp, steps, passes, make)
    settings = config(tp, pp, prescaled, optimize, sdp_param_persistence_threshold=9, sdp_gradient_clipping=CLIP,
                      **more)  # fmt: skip
    model, optimizer, step = start(settings, make=make, passes=passes)
    if recompute:
        for layer in model.module.body.transformer.seq_layers:
            smp.set_activation_checkpointing(layer)
    for number in range(steps):
        optimizer.zero_grad()
        for at in range(number * passes, (number + 1) * passes):
            loss = step(model, batch_of(at, prescaled)).reduce_mean()
            mean = torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean().item()
            assert abs(mean - losses[at]) <= tolerance * abs(losses[at]), (at, mean, losses[at])
        if model.sharded is None:
            clip = smp.clip_grad_norm_ if number % 2 else torch.nn.utils.clip_grad_norm_
            norm = clip(model.parameters(), CLIP)
        else:
            whole = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
            assert abs(whole.item() - norms[number]) <= tolerance * norms[number], (number, whole, norms[number])
        optimizer.step()
        norm = norm if model.sharded is None else optimizer._global_grad_norm
        assert norms[number] > CLIP
        assert abs(norm.item() - norms[number]) <= tolerance * norms[number], (number, norm, norms[number])
    whole, found = model.state_dict(), optimizer.state_dict()["state"]
    assert whole.keys() == weights.keys()
    assert found.keys() == states.keys()
    for name, weight in weights.items():
        close(whole[name], weight, tolerance * 100, f"parameter {name}")
    for name, content in states.items():
        for key, value in content.items():
            if value.dim():
                close(found[name][key], value, tolerance * 100, f"{key} of {name}")
