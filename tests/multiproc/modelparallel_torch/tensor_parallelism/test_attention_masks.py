"""Attention masks of Hugging Face's models under tensor parallelism: those that mask nothing are dropped."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(200)

MODES = list(itertools.product((False, True), ("memory", "speed")))


class Attention:
    """Replaces PyTorch's attention. Layers read the masks that they would read on a GPU.

    Attributes:
        calls: For each call: whether it has a mask, is causal, and has grouped heads.
        reads: Number of masks whose values were read.
    """

    def __init__(self):
        import torch

        from smdistributed.modelparallel.torch.nn import attention as layers
        from smdistributed.modelparallel.torch.nn import scores

        self.calls, self.reads = [], 0
        attend, read = torch.nn.functional.scaled_dot_product_attention, torch.Tensor.any

        def attention(
            query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
        ):  # fmt: skip
            if type(query) is torch.Tensor:
                # Fake tensors pass through each layer when it is recorded.
                self.calls.append((attn_mask is not None, is_causal, enable_gqa))
            return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        def any_of(mask):
            self.reads += mask.dim() == 4
            return read(mask)

        torch.nn.functional.scaled_dot_product_attention, torch.Tensor.any = attention, any_of
        layers.may_read = lambda mask, is_shared: is_shared and scores.layers_drop_masks()

    def taken(self):
        """Returns the calls and the number of reads so far, and forgets them."""
        found = self.calls, self.reads
        self.calls, self.reads = [], 0
        return found


def _own(prescaled, batches):
    """Returns the batch of this rank, from those of the ranks of the only tensor-parallel group."""
    import torch

    import smdistributed.modelparallel.torch as smp

    return torch.cat(batches) if prescaled else batches[smp.tp_rank()]


def _check_calls(modes):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.smp.huggingface import causal_configurations, make_causal
    from support.tensor_parallel import close, config, tokens

    torch.set_default_dtype(torch.float64)
    attention = Attention()
    #: By model, the calls of attention without padding and with it, and the number of masks that are read.
    expected = {
        "gpt2": ((False, True, False), (True, False, False), 1),
        # Two heads of each rank share one of keys.
        "llama": ((False, True, True), (True, False, False), 1),
        # Tokens attend to three others at most, so that there is a bias in any case.
        "mistral": ((True, False, False), (True, False, False), 0),
    }
    for name, (prescaled, optimize) in itertools.product(expected, modes):
        without, padded, reads = expected[name]
        alone = exact(make_causal(causal_configurations()[name])).eval()
        smp.init(config(2, 1, prescaled, optimize))
        with smp.tensor_parallelism():
            whole = make_causal(causal_configurations()[name])
        model = smp.DistributedModel(whole).eval()
        batches = [tokens(0, replica) for replica in range(2)]
        ids = _own(prescaled, batches)
        attention.taken()
        with torch.no_grad():
            plain = model(input_ids=ids).logits
            assert attention.taken() == ([without] * 2, 0)
            masked = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            assert attention.taken() == ([without] * 2, reads), (name, prescaled, optimize)
            assert torch.equal(plain, masked)
            with torch.inference_mode():
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
            assert attention.taken() == ([without] * 2, reads)
            # Only the second rank's batch has padding, and both ranks compute the attention of both batches.
            masks = [torch.ones_like(each) for each in batches]
            masks[1][0, 4:] = 0
            mask = _own(prescaled, masks)
            found = model(input_ids=ids, attention_mask=mask).logits
            assert attention.taken() == ([padded] * 2, reads)
            seen = mask.bool()
            close(found[seen], alone(input_ids=ids, attention_mask=mask).logits[seen], 1e-10, name)
        smp.shutdown()


@pytest.mark.parametrize("modes", [MODES[:2], MODES[2:]], ids=["own batches", "prescaled"])
def test_masks_without_padding_are_dropped(modes):
    pytest.importorskip("transformers")
    run_ranks(_check_calls, 2, modes, launcher=Forked("transformers"), timeout=190)


def _check_other_models():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import make_t5, other_kinds
    from support.tensor_parallel import close, config, tokens

    torch.set_default_dtype(torch.float64)
    attention = Attention()
    kind, settings = other_kinds()["bert"]
    for prescaled, optimize in MODES:
        print(prescaled, optimize)
        torch.manual_seed(1)
        alone = kind(settings).eval()
        smp.init(config(2, 1, prescaled, optimize))
        torch.manual_seed(1)
        with smp.tensor_parallelism():
            whole = kind(settings)
        model = smp.DistributedModel(whole).eval()
        batches = [tokens(0, replica) for replica in range(2)]
        ids = _own(prescaled, batches)
        masks = [torch.ones_like(each) for each in batches]
        with torch.no_grad():
            attention.taken()
            logits = model(input_ids=ids, attention_mask=_own(prescaled, masks)).logits
            # Without padding, transformers passes no mask, but those of the group are gathered.
            assert attention.taken()[0] == [(False, False, False)] * 2
            close(logits, alone(ids).logits, 1e-10, "without padding")
            masks[1][0, 4:] = 0
            mask = _own(prescaled, masks)
            attention.taken()
            logits = model(input_ids=ids, attention_mask=mask).logits
            assert attention.taken()[0] == [(True, False, False)] * 2
            seen = mask.bool()
            close(logits[seen], alone(ids, attention_mask=mask).logits[seen], 1e-10, "with padding")
        smp.shutdown()
    smp.init(config(2, 1, False, "memory"))
    alone = make_t5("relu", seed=1).eval()
    with smp.tensor_parallelism():
        whole = make_t5("relu", seed=1)
    model = smp.DistributedModel(whole).eval()
    ids = tokens(0, smp.tp_rank())
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :3]}
    with torch.no_grad():
        attention.taken()
        logits = model(**arguments).logits
        # Of two layers of the encoder and three of the decoder, only the cross attention has no position bias.
        biased, cross = (True, False, False), (False, False, False)
        assert attention.taken() == ([biased] * 2 + [biased, cross] * 3, 1)
        close(logits, alone(**arguments).logits, 1e-10, "T5")
    smp.shutdown()


def test_masks_of_encoders_and_cross_attention_are_dropped():
    pytest.importorskip("transformers")
    run_ranks(_check_other_models, 2, launcher=Forked("transformers"), timeout=190)


def _check_routers():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import causal_configurations, make_causal
    from support.tensor_parallel import config, tokens

    torch.set_default_dtype(torch.float64)
    for prescaled, optimize in MODES:
        settings = causal_configurations()["mixtral"]
        settings.sliding_window = None
        smp.init(config(2, 1, prescaled, optimize))
        with smp.tensor_parallelism():
            whole = make_causal(settings)
        model = smp.DistributedModel(whole)
        ids = _own(prescaled, [tokens(0, replica) for replica in range(2)])

        @smp.step
        def step(model, ids, mask):
            output = model(input_ids=ids, attention_mask=mask, labels=ids)
            model.backward(output.loss)
            return output.loss, output.aux_loss

        found = []
        for mask in (None, torch.ones_like(ids)):
            model.zero_grad()
            losses = [each.reduce_mean() for each in step(model, ids, mask)]
            found.append([*losses, *(each.grad.clone() for each in model.local_parameters())])
        assert all(map(torch.equal, *found))
        smp.shutdown()


def test_losses_of_routers_do_not_depend_on_a_dropped_mask():
    pytest.importorskip("transformers")
    run_ranks(_check_routers, 2, launcher=Forked("transformers"), timeout=190)


MICROBATCHES = 4


def _check_pipeline(modes, recompute):
    """Trains on microbatches with padding and without it; in step 1 none has padding, in the other steps every second."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from smdistributed import _core
    from support.exact_models import exact
    from support.smp.huggingface import causal_configurations, make_causal, translated
    from support.tensor_parallel import close, config, gathered, tokens

    torch.set_default_dtype(torch.float64)
    attention, fallbacks = Attention(), []
    note, settings = _core.note_fallback, causal_configurations()["llama"]
    settings.num_hidden_layers = 3
    _core.note_fallback = lambda reason: (fallbacks.append(reason), note(reason))[1]

    def padded(step, microbatch):
        return step != 1 and (step + microbatch) % 2 == 0

    def batch(step, replica):
        ids = tokens(step, replica, batch=2 * MICROBATCHES)
        mask = torch.ones_like(ids)
        for microbatch in filter(lambda each: padded(step, each), range(MICROBATCHES)):
            mask[2 * microbatch + replica, 4:] = 0
        return ids, mask

    def make():
        return exact(make_causal(copy.deepcopy(settings)))

    def loss_of(model, ids, mask):
        # The loss is computed here, because Hugging Face's models compute it in float32.
        logits = model(input_ids=ids, attention_mask=mask).logits
        labels = ids.masked_fill(mask == 0, -100)[:, 1:]
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())

    for prescaled, optimize in modes:
        print(prescaled, optimize)
        alone = make()
        smp.init(config(2, 2, prescaled, optimize, microbatches=MICROBATCHES))
        with smp.tensor_parallelism():
            whole = make()
        model = smp.DistributedModel(whole)
        for layer in model.module.transformer.seq_layers if recompute else ():
            smp.set_activation_checkpointing(layer)

        @smp.step
        def step_function(model, ids, mask):
            loss = loss_of(model, ids, mask)
            model.backward(loss)
            return loss

        layers = 0
        for step in range(4):
            batches = [batch(step, replica) for replica in range(2)]
            parts = [[each.chunk(MICROBATCHES) for each in own] for own in batches]
            # The microbatches of one process: those of a rank, or of the group.
            microbatches = [
                [torch.cat([own[kind][place] for own in parts]) for kind in range(2)]
                if prescaled
                else [[own[kind][place] for kind in range(2)] for own in parts]
                for place in range(MICROBATCHES)
            ]
            losses = [
                [loss_of(alone, *each)] if prescaled else [loss_of(alone, *own) for own in each]
                for each in microbatches
            ]
            alone.zero_grad()
            torch.stack([loss for each in losses for loss in each]).mean().backward()
            if prescaled:
                mine = [torch.cat([each[kind] for each in microbatches]) for kind in range(2)]
            else:
                mine = batches[smp.tp_rank()]
            model.zero_grad()
            attention.taken()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = list(step_function(model, *mine))
            assert [str(each.message) for each in caught] == []
            own = [each[0 if prescaled else smp.tp_rank()] for each in losses]
            close(torch.stack(found), torch.stack(own).detach(), 1e-10, f"losses of step {step}")
            gradients = translated("llama", gathered(model, lambda each: each.grad))
            for name, each in alone.named_parameters():
                close(gradients[name], each.grad, 1e-10, f"gradient of {name} in step {step}")
            calls, reads = attention.taken()
            layers = layers or len(calls) // MICROBATCHES // (1 + recompute)
            number = sum(padded(step, each) for each in range(MICROBATCHES))
            assert calls.count((True, False, False)) == number * layers * (1 + recompute), (step, calls)
            without = (MICROBATCHES - number) * layers * (1 + recompute)
            assert calls.count((False, True, True)) == without, (step, calls)
            # One of the layers of a rank reads the mask of a microbatch.
            assert reads == MICROBATCHES
        assert sum(smp.allgather(layers, smp.PP_GROUP)) == settings.num_hidden_layers
        smp.shutdown()
    assert fallbacks == []


@pytest.mark.parametrize("modes", [[MODES[0]], [MODES[3]], pytest.param(MODES[1:3], marks=pytest.mark.more)], ids=str)
def test_microbatches_with_and_without_padding_share_a_pipeline(modes):
    pytest.importorskip("transformers")
    run_ranks(_check_pipeline, 4, modes, False, launcher=Forked("transformers"), timeout=190)


def test_recomputed_layers_of_a_pipeline_choose_alike():
    pytest.importorskip("transformers")
    run_ranks(_check_pipeline, 4, [MODES[0]], True, launcher=Forked("transformers"), timeout=190)
