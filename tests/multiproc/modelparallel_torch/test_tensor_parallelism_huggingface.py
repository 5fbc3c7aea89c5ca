"""Hugging Face's models under tensor parallelism, compared with the same models in one process."""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
import tempfile

import pytest

from support import Forked, run_ranks

NAMES = ["gpt2", "llama", "llama3", "mistral", "mixtral", "qwen2", "gptj", "gptneo", "gptneox", "gptneox-serial"]


def _models():
    import transformers

    gpt2 = {"vocab_size": 53, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12}
    small = {
        "vocab_size": 53, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
        "max_position_embeddings": 12,
    }  # fmt: skip
    grouped = {**small, "num_key_value_heads": 2}
    return {
        "gpt2": transformers.GPT2Config(**gpt2, scale_attn_by_inverse_layer_idx=True),
        "llama": transformers.LlamaConfig(**grouped),
        "llama3": transformers.LlamaConfig(
            **{**grouped, "num_key_value_heads": 1},
            tie_word_embeddings=True,
            rope_scaling={
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4, "rope_theta": 10000.0,
            },
        ),
        "mistral": transformers.MistralConfig(**grouped, sliding_window=3),
        "mixtral": transformers.MixtralConfig(
            **grouped, num_local_experts=4, experts_implementation="eager", output_router_logits=True,
            router_aux_loss_coef=0.3, pad_token_id=3,
        ),
        "qwen2": transformers.Qwen2Config(**grouped),
        "gptj": transformers.GPTJConfig(**gpt2, rotary_dim=2),
        "gptneo": transformers.GPTNeoConfig(
            vocab_size=53, hidden_size=16, num_layers=2, num_heads=4, max_position_embeddings=12, window_size=3,
            attention_types=[[["global", "local"], 1]],
        ),
        "gptneox": transformers.GPTNeoXConfig(**small, rotary_pct=0.5),
        "gptneox-serial": transformers.GPTNeoXConfig(**small, use_parallel_residual=False),
    }  # fmt: skip


def _make(config):
    import torch
    import transformers

    for name in list(vars(config)):
        if "drop" in name or name.endswith("pdrop"):
            setattr(config, name, 0.0)
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        return transformers.AutoModelForCausalLM.from_config(config).double()
    finally:
        torch.set_default_dtype(before)


def _check_models(names, layout, variants):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.tensor_parallel import close, config, tokens

    torch.set_default_dtype(torch.float64)
    tp, pp, rdp = layout
    for name in names:
        print(name)
        # GPT-J and GPT-Neo compute scores in float32.
        tolerance = 1e-5 if name in ("gptj", "gptneo") else 1e-10
        for prescaled, optimize in variants:
            alone = exact(_make(_models()[name]))
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
                whole = _make(_models()[name])
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
    import transformers

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import VOCABULARY, close, config, gathered, tokens

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0,
    }  # fmt: skip
    torch.set_default_dtype(torch.float64)
    kinds = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**sizes)),
        "roberta": (transformers.RobertaForSequenceClassification, transformers.RobertaConfig(**sizes)),
    }
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


def _other_kinds():
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "bart": (
            transformers.BartForConditionalGeneration,
            transformers.BartConfig(
                vocab_size=53, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=12,
                dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
            ),
        ),
        "vit": (
            transformers.ViTForImageClassification,
            transformers.ViTConfig(
                **sizes, image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            ),
        ),
        "olmoe": (
            transformers.OlmoeForCausalLM,
            transformers.OlmoeConfig(
                **sizes, vocab_size=53, num_experts=4, num_experts_per_tok=2, experts_implementation="eager"
            ),
        ),
    }  # fmt: skip


def _run_other(name, model, ids):
    """Returns the loss and the output of a model."""
    import torch

    if name == "vit":
        pixels = (ids[:, :1, None, None].double() * torch.linspace(-1, 1, 192).view(3, 8, 8)).sin()
        logits = model(pixel_values=pixels).logits
        return torch.nn.functional.cross_entropy(logits, ids[:, 0] % 2), logits
    more = {"decoder_input_ids": ids.flip(1)} if name == "bart" else {}
    logits = model(input_ids=ids, **more).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


def _check_others(names, layout, optimize):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.tensor_parallel import compare, tokens

    torch.set_default_dtype(torch.float64)
    for name in names:
        kind, settings = _other_kinds()[name]
        settings.use_cache = False

        def make(kind=kind, settings=settings):
            with smp.tensor_parallelism():
                return exact(kind(settings))

        run = functools.partial(_run_other, name)
        # Layers of ViT are replaced by distributed ones, which have other names.
        names = smp.nn.huggingface.vit.translate_state_dict_to_hf_vit if name == "vit" else None
        compare(
            make, run, lambda step, replica: (tokens(step, replica),), *layout, False, optimize, steps=5, names=names
        )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["bart", "vit", "olmoe"])
def test_other_models_equal_one_process(name):
    pytest.importorskip("transformers")
    run_ranks(_check_others, 2, [name], (2, 1, 1), "memory", launcher=Forked("transformers"), timeout=190)


def _check_vit():
    import safetensors.torch
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config, tokens

    torch.set_default_dtype(torch.float64)
    kind, settings = _other_kinds()["vit"]
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
            difference = _run_other("vit", model, ids)[1] - _run_other("vit", alone, ids)[1]
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
    run_ranks(_check_others, math.prod(layout), [name], layout, "memory", launcher=Forked("transformers"), timeout=190)


def _run_causal(model, ids):
    import torch

    output = model(input_ids=ids)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    # Models with experts have an auxiliary loss that balances them.
    balancing = getattr(output, "aux_loss", None)
    return loss if balancing is None else loss + 0.3 * balancing, output.logits


def _check_trained(names, layout, prescaled=False, optimize="memory"):
    import smdistributed.modelparallel.torch as smp
    from support.exact_models import exact
    from support.tensor_parallel import compare, tokens

    for name in names:

        def make(name=name):
            with smp.tensor_parallelism():
                return exact(_make(_models()[name]))

        family = {"llama3": "llama", "gptneox-serial": "gptneox"}.get(name, name)
        to_hf = getattr(getattr(smp.nn.huggingface, family), f"translate_state_dict_to_hf_{family}")
        heads = {"num_attention_heads": 4} if family == "gptneox" else {}
        translate = functools.partial(_named, to_hf, heads)
        compare(make, _run_causal, lambda step, replica: (tokens(step, replica),), *layout, prescaled, optimize,
                steps=5, tolerance=1e-5 if name in ("gptj", "gptneo") else 1e-10, names=translate,
                together=name == "mixtral")  # fmt: skip


def _named(to_hf, options, found):
    result = to_hf(found, **options)
    if "embed_out.weight" in result:
        result["lm_head.weight"] = result["embed_out.weight"]
    return result


def _by_default(name, layout):
    return () if (name, layout) == ("llama", (2, 2, 2)) else pytest.mark.more


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "layout"), [pytest.param(*each, marks=_by_default(*each)) for each in itertools.product(NAMES, LAYOUTS)]
)
def test_causal_models_train_as_one_process(name, layout):
    pytest.importorskip("transformers")
    run_ranks(_check_trained, math.prod(layout), [name], layout, launcher=Forked("transformers"), timeout=190)


def _created_body():
    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config, tokens

    found = []
    for name in ("gpt2", "llama"):
        smp.init(config(2, 2, False, "memory"))
        torch.manual_seed(smp.rank())
        with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
            whole = transformers.AutoModelForCausalLM.from_config(_models()[name])
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
