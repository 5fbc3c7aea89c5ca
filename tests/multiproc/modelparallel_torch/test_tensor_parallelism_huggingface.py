"""Hugging Face's models under tensor parallelism, compared with the same models in one process."""

from __future__ import annotations

import itertools
import math
import pathlib
import tempfile

import pytest

from support import Forked, run_ranks

NAMES = ["gpt2", "llama", "llama3", "mistral", "mixtral", "qwen2", "gptj", "gptneo", "gptneox", "gptneox-serial"]


def _check_models(names, layout, variants):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.smp.huggingface import causal_configurations, make_causal
    from support.tensor_parallel import close, config, tokens

    torch.set_default_dtype(torch.float64)
    tp, pp, rdp = layout
    tolerance = 1e-10
    for name in names:
        print(name)
        for prescaled, optimize in variants:
            alone = exact(make_causal(causal_configurations()[name]))
            batches = [tokens(0, replica) for replica in range(tp * rdp)]
            # Outputs at masked tokens differ between implementations, so they are not compared.
            masks = [(batch % 11 != 0).long().index_fill_(1, torch.tensor([0]), 1) for batch in batches]
            losses = []
            for ids, mask in zip(batches, masks, strict=True):
                # The loss is computed here, because the models compute theirs in float32.
                output = alone(input_ids=ids, attention_mask=mask)
                logits, labels = output.logits[:, :-1].flatten(0, 1), ids.masked_fill(mask == 0, -100)[:, 1:].flatten()
                losses.append(torch.nn.functional.cross_entropy(logits, labels))
                if name == "mixtral":
                    losses[-1] = losses[-1] + 0.3 * output.aux_loss
            torch.stack(losses).mean().backward()
            gradients = {key: each.grad for key, each in alone.named_parameters()}
            weights = alone.state_dict()

            smp.init(config(tp, pp, prescaled, optimize))
            with smp.tensor_parallelism():
                whole = make_causal(causal_configurations()[name])
            model = smp.DistributedModel(whole)
            assert isinstance(model.module, smp.nn.DistributedTransformerLMHead), type(model.module)
            model.train()

            @smp.step
            def step(model, ids, mask):
                output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
                model.backward(output["loss"])
                return output.loss

            @smp.step
            def evaluate(model, ids, mask):
                return model(ids, attention_mask=mask).logits

            if prescaled:
                place = smp.rdp_rank() * tp
                mine = torch.cat(batches[place : place + tp]), torch.cat(masks[place : place + tp])
            else:
                mine = batches[smp.dp_rank()], masks[smp.dp_rank()]
            if not prescaled and pp == 1:
                loss = step(model, *mine).reduce_mean()
                close(loss, losses[smp.dp_rank()].detach(), tolerance, "loss")
                family = {"llama3": "llama", "gptneox-serial": "gptneox"}.get(name, name)
                module = getattr(smp.nn.huggingface, family)
                to_hf = getattr(module, f"translate_state_dict_to_hf_{family}")
                from support.tensor_parallel import gathered

                heads = {"num_attention_heads": 4} if family == "gptneox" else {}
                found = to_hf(gathered(model, lambda each: each.grad), **heads)
                if "embed_out.weight" in found:
                    found["lm_head.weight"] = found.pop("embed_out.weight")
                for key, gradient in gradients.items():
                    close(found[key], gradient, tolerance, f"gradient of {key}")
                own = model.state_dict()
                theirs = to_hf(own, **heads)
                back = dict(theirs)
                if "embed_out.weight" in back and "embed_out.weight" not in weights:
                    back["lm_head.weight"] = back.pop("embed_out.weight")
                for key, weight in weights.items():
                    if key in back:
                        assert torch.equal(back[key], weight), key
                assert weights.keys() >= back.keys(), back.keys() - weights.keys()
                again = module.translate_hf_state_dict_to_smdistributed(back, **heads)
                assert again.keys() == model.state_dict().keys()
                alone.load_state_dict(back)
                with tempfile.TemporaryDirectory() as folder:
                    folder = smp.allgather(folder, smp.WORLD)[0]
                    smp.save_checkpoint(folder, "whole", partial=False, model=model)
                    saved = torch.load(f"{folder}/whole")
                    assert saved.keys() == theirs.keys()
                    assert smp.resume_from_checkpoint(folder, "whole", partial=False) == {}
                    smp.barrier()
                assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
                model.load_state_dict(theirs)
                assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
            model.eval()
            with torch.no_grad():
                logits = evaluate(model, *mine).concat()
                seen = mine[1].bool()
                close(logits[seen], alone(mine[0], attention_mask=mine[1]).logits[seen], tolerance, "logits")
            smp.shutdown()


def _check_encoder(layout, variants):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import other_kinds
    from support.tensor_parallel import close, config, gathered, tokens

    torch.set_default_dtype(torch.float64)
    kinds = {name: other_kinds()[name] for name in ("bert", "roberta")}
    for name, (kind, settings) in kinds.items():
        for prescaled, optimize in variants:

            def loss_of(model, ids, mask):
                logits = model(input_ids=ids, attention_mask=mask).logits
                labels = ids.flatten() if logits.dim() == 3 else ids[:, 0] % logits.shape[-1]
                return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels)

            torch.manual_seed(1)
            alone = kind(settings)
            batches = [tokens(0, replica) for replica in range(layout[0] * layout[2])]
            masks = [(batch % 11 != 0).long().index_fill_(1, torch.tensor([0]), 1) for batch in batches]
            losses = [loss_of(alone, *each) for each in zip(batches, masks, strict=True)]
            torch.stack(losses).mean().backward()

            smp.init(config(layout[0], layout[1], prescaled, optimize))
            torch.manual_seed(1)
            with smp.tensor_parallelism():
                whole = kind(settings)
            model = smp.DistributedModel(whole)
            assert any(type(each) is not type(whole) for each in model.distributed_modules())

            @smp.step
            def step(model, ids, mask):
                loss = loss_of(model, ids, mask)
                model.backward(loss)
                return loss

            mine = (torch.cat(batches), torch.cat(masks)) if prescaled else (
                batches[smp.dp_rank()], masks[smp.dp_rank()]
            )  # fmt: skip
            loss = step(model, *mine).reduce_mean()
            loss = torch.stack(smp.allgather(loss, smp.DP_GROUP)).mean()
            close(loss, torch.stack(losses).mean().detach(), 1e-10, "loss")
            module = getattr(smp.nn.huggingface, name)
            to_hf = getattr(module, f"translate_state_dict_to_hf_{name}")
            found = to_hf(gathered(model, lambda each: each.grad))
            for key, each in alone.named_parameters():
                if each.grad is not None:
                    close(found[key], each.grad, 1e-10, f"gradient of {key}")
            state = model.state_dict()
            back = to_hf(state)
            assert back.keys() == alone.state_dict().keys(), back.keys() ^ alone.state_dict().keys()
            assert all(torch.equal(back[key], each) for key, each in alone.state_dict().items())
            assert module.translate_hf_state_dict_to_smdistributed(back).keys() == state.keys()
            smp.shutdown()


@pytest.mark.timeout(200)
def test_encoders_equal_one_process():
    pytest.importorskip("transformers")
    modes = [(False, "memory"), (False, "speed"), (True, "speed")]
    run_ranks(_check_encoder, 2, (2, 1, 1), modes, launcher=Forked("transformers"), timeout=190)


@pytest.mark.more
@pytest.mark.timeout(200)
def test_encoders_on_partitions():
    pytest.importorskip("transformers")
    run_ranks(_check_encoder, 4, (2, 2, 1), [(False, "memory")], launcher=Forked("transformers"), timeout=190)


def _check_trained(name, layout, prescaled=False, optimize="memory"):
    import torch

    from support.smp.huggingface import models
    from support.tensor_parallel import compare

    torch.set_default_dtype(torch.float64)
    model = models()[name]
    compare(model.make, model.run, model.batch, *layout, prescaled, optimize, steps=5, names=model.names,
            together=model.together)  # fmt: skip


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["bart", "vit", "olmoe"])
def test_other_models_equal_one_process(name):
    pytest.importorskip("transformers")
    run_ranks(_check_trained, 2, name, (2, 1, 1), launcher=Forked("transformers"), timeout=190)


def _check_vit():
    import safetensors.torch
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import other_kinds, run_other
    from support.tensor_parallel import config, tokens

    torch.set_default_dtype(torch.float64)
    kind, settings = other_kinds()["vit"]
    module = smp.nn.huggingface.vit
    for prescaled, optimize in [(False, "speed"), (True, "speed"), (True, "memory")]:
        torch.manual_seed(1)
        alone = kind(settings).eval()
        smp.init(config(2, 1, prescaled, optimize))
        torch.manual_seed(1)
        with smp.tensor_parallelism():
            whole = kind(settings)
        model = smp.DistributedModel(whole).eval()
        layers = [each for each in model.modules() if isinstance(each, smp.nn.DistributedTransformerLayer)]
        assert len(layers) == 2
        ids = tokens(0, 0 if prescaled else smp.dp_rank())
        with torch.no_grad():
            difference = run_other("vit", model, ids)[1] - run_other("vit", alone, ids)[1]
        assert difference.abs().max().item() <= 1e-10
        weights, own = alone.state_dict(), model.state_dict()
        theirs = module.translate_state_dict_to_hf_vit(own)
        assert theirs.keys() == weights.keys(), theirs.keys() ^ weights.keys()
        assert all(torch.equal(theirs[key], each) for key, each in weights.items())
        # States are translated from the names of transformers 5, and from those in its files, which are transformers
        # 4's.
        with tempfile.TemporaryDirectory() as folder:
            alone.save_pretrained(folder)
            files = [safetensors.torch.load_file(each) for each in pathlib.Path(folder).glob("*.safetensors")]
        # Only the first rank writes.
        saved = smp.allgather(files, smp.WORLD)[0][0]
        assert any(".encoder.layer.0.attention.attention.query" in key for key in saved)
        for state in (theirs, saved):
            back = module.translate_hf_state_dict_to_smdistributed_vit(state)
            assert back.keys() == own.keys(), back.keys() ^ own.keys()
            assert all(torch.equal(back[key], each) for key, each in own.items())
        for each in model.local_parameters():
            each.data.zero_()
        model.load_state_dict(theirs)
        assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
        smp.shutdown()


@pytest.mark.timeout(100)
def test_states_of_vit_are_translated():
    pytest.importorskip("transformers", minversion="5")
    run_ranks(_check_vit, 2, launcher=Forked("transformers"), timeout=90)


LAYOUTS = [(2, 1, 1), (2, 2, 1), (2, 2, 2)]


@pytest.mark.more
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["bart", "vit", "olmoe"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_other_models_on_partitions(name, layout):
    pytest.importorskip("transformers")
    run_ranks(_check_trained, math.prod(layout), name, layout, launcher=Forked("transformers"), timeout=190)


def _by_default(name, layout):
    return () if (name, layout) == ("llama", (2, 2, 2)) else pytest.mark.more


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*each, marks=_by_default(*each)) for each in itertools.product(NAMES, LAYOUTS)]
)
def test_causal_models_train_as_one_process(name, layout):
    pytest.importorskip("transformers")
    run_ranks(_check_trained, math.prod(layout), name, layout, launcher=Forked("transformers"), timeout=190)


def _created_body():
    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import causal_configurations
    from support.tensor_parallel import config, tokens

    found = []
    for name in ("gpt2", "llama"):
        smp.init(config(2, 2, False, "memory"))
        torch.manual_seed(smp.rank())
        with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
            whole = transformers.AutoModelForCausalLM.from_config(causal_configurations()[name])
        assert all(each.is_meta for each in whole.parameters())
        model = smp.DistributedModel(whole)

        @smp.step
        def step(model, ids):
            loss = model(input_ids=ids, labels=ids).loss
            model.backward(loss)
            return loss

        loss = step(model, tokens(0, smp.dp_rank())).reduce_mean()
        deviation = model.state_dict()["transformer.seq_layers.0.output.dense1.weight"].std().item()
        found.append((loss.item(), deviation, sum(each.numel() for each in model.local_parameters())))
        smp.shutdown()
    return found


@pytest.mark.timeout(150)
def test_models_are_created_in_slices():
    pytest.importorskip("transformers")
    for rank in run_ranks(_created_body, 4, launcher=Forked("transformers"), timeout=140):
        for loss, deviation, held in rank:
            assert 3.0 < loss < 5.0
            assert 0.015 < deviation < 0.025, "expected about the configuration's `initializer_range`, 0.02"
            assert held < 4000


@pytest.mark.timeout(200)
def test_causal_models_equal_one_process():
    pytest.importorskip("transformers")
    run_ranks(_check_models, 2, NAMES, (2, 1, 1), [(False, "speed")], launcher=Forked("transformers"), timeout=190)


@pytest.mark.timeout(200)
def test_causal_models_in_other_modes():
    pytest.importorskip("transformers")
    modes = [(False, "memory"), (True, "memory")]
    run_ranks(_check_models, 2, ["gpt2", "llama"], (2, 1, 1), modes, launcher=Forked("transformers"), timeout=190)


@pytest.mark.timeout(200)
def test_causal_models_on_partitions():
    pytest.importorskip("transformers")
    run_ranks(
        _check_models,
        4,
        ["gpt2", "llama"],
        (2, 2, 1),
        [(False, "memory")],
        launcher=Forked("transformers"),
        timeout=190,
    )
