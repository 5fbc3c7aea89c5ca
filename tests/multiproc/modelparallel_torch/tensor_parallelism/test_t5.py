"""T5 under tensor parallelism, compared with Hugging Face's models in one process."""

from __future__ import annotations

import itertools
import math
import pathlib
import tempfile

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(200)


def _check(names, layout, modes):
    import torch

    from support.smp.huggingface import models
    from support.tensor_parallel import compare

    torch.set_default_dtype(torch.float64)
    for name, (prescaled, optimize) in itertools.product(names, modes):
        print(name, prescaled, optimize)
        model = models()[f"t5-{name}"]
        compare(model.make, model.run, model.batch, *layout, prescaled, optimize, steps=5, names=model.names,
                together=model.together)  # fmt: skip


MODES = list(itertools.product((False, True), ("memory", "speed")))


@pytest.mark.parametrize("name", ["relu", "gated", "labels"])
def test_t5_trains_as_one_process(name):
    pytest.importorskip("transformers")
    run_ranks(_check, 2, [name], (2, 1, 1), MODES, launcher=Forked("transformers"), timeout=190)


def test_other_models_of_t5_train_as_one_process():
    pytest.importorskip("transformers")
    names = ["bare", "encoder", "sequences", "tokens"]
    run_ranks(_check, 2, names, (2, 1, 1), [(False, "memory"), (True, "speed")], launcher=Forked("transformers"),
              timeout=190)  # fmt: skip


@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.more)])
def test_t5_on_more_ranks_trains_as_one_process(layout):
    pytest.importorskip("transformers")
    modes = MODES if layout[1] == 1 else [(False, "memory"), (True, "speed")]
    run_ranks(_check, math.prod(layout), ["gated"], layout, modes, launcher=Forked("transformers"), timeout=190)


@pytest.mark.more
@pytest.mark.parametrize("name", ["relu", "labels", "bare", "sequences"])
def test_models_of_t5_on_partitions_train_as_one_process(name):
    pytest.importorskip("transformers")
    run_ranks(_check, 4, [name], (2, 2, 1), MODES, launcher=Forked("transformers"), timeout=190)


def _check_states():
    import safetensors.torch
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import T5_KINDS, make_t5, run_t5
    from support.tensor_parallel import close, config, tokens

    torch.set_default_dtype(torch.float64)
    module = smp.nn.huggingface.t5
    for name, (prescaled, optimize) in zip(T5_KINDS, itertools.cycle(MODES), strict=False):
        print(name, prescaled, optimize)
        smp.init(config(2, 1, prescaled, optimize))
        alone = make_t5(name, seed=1).eval()
        with smp.tensor_parallelism():
            whole = make_t5(name, seed=1 + smp.rank())
        model = smp.DistributedModel(whole).eval()
        found = [each for each in model.modules() if isinstance(each, smp.nn.DistributedEncoderDecoder)]
        assert len(found) == 1
        ids = tokens(0, 0 if prescaled else smp.dp_rank())
        with torch.no_grad():
            for one, other in zip(run_t5(name, model, ids), run_t5(name, alone, ids), strict=True):
                close(one, other, 1e-10, name)
        weights, own = alone.state_dict(), model.state_dict()
        theirs = module.translate_state_dict_to_hf_t5(own)
        assert theirs.keys() == weights.keys(), theirs.keys() ^ weights.keys()
        assert all(torch.equal(theirs[key], each) for key, each in weights.items())
        # A file contains each shared weight once. Old files contain a weight that no model uses.
        with tempfile.TemporaryDirectory() as folder:
            alone.save_pretrained(folder)
            files = [safetensors.torch.load_file(each) for each in pathlib.Path(folder).glob("*.safetensors")]
        saved = smp.allgather(files, smp.WORLD)[0][0]
        saved["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(8, 4)
        has_lm_head = hasattr(alone, "lm_head")
        for state in (theirs, saved):
            back = module.translate_hf_state_dict_to_smdistributed_t5(state, has_lm_head=has_lm_head)
            assert back.keys() == own.keys(), back.keys() ^ own.keys()
            assert all(torch.equal(back[key], each) for key, each in own.items())
        for each in model.local_parameters():
            each.data.zero_()
        model.load_state_dict(theirs)
        assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
        with tempfile.TemporaryDirectory() as folder:
            folder = smp.allgather(folder, smp.WORLD)[0]
            smp.save_checkpoint(folder, "whole", partial=False, model=model)
            assert torch.load(f"{folder}/whole").keys() == weights.keys()
            for each in model.local_parameters():
                each.data.zero_()
            assert smp.resume_from_checkpoint(folder, "whole", partial=False) == {}
            smp.barrier()
        assert all(torch.equal(own[key], each) for key, each in model.state_dict().items())
        smp.shutdown()


def test_states_of_t5_are_translated():
    pytest.importorskip("transformers")
    run_ranks(_check_states, 2, launcher=Forked("transformers"), timeout=190)


def _check_created():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import t5_configuration
    from support.tensor_parallel import config

    smp.init(config(2, 1, False, "memory"))
    torch.manual_seed(smp.rank())
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 256, "vocab_size": 500}
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32):
        import transformers

        whole = transformers.T5ForConditionalGeneration(t5_configuration(**sizes))
    assert all(each.is_meta for each in whole.parameters())
    state = smp.DistributedModel(whole).state_dict()
    alone = transformers.T5ForConditionalGeneration(t5_configuration(**sizes))
    expected = smp.nn.huggingface.t5.translate_hf_state_dict_to_smdistributed(alone.state_dict())
    for name, weight in expected.items():
        if weight.numel() > 500:
            assert abs(math.log(state[name].std().item() / weight.std().item())) < 0.15, name
    smp.shutdown()


def test_t5_is_created_with_its_own_initial_weights():
    pytest.importorskip("transformers")
    run_ranks(_check_created, 2, launcher=Forked("transformers"), timeout=100)


def _check_dropout():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import t5_configuration
    from support.tensor_parallel import config, tokens

    for optimize in ("memory", "speed"):
        smp.init(config(2, 1, True, optimize))
        with smp.tensor_parallelism():
            import transformers

            whole = transformers.T5ForConditionalGeneration(t5_configuration(dropout_rate=0.3))
        model = smp.DistributedModel(whole)

        @smp.step
        def step(model, ids):
            output = model(input_ids=ids, decoder_input_ids=ids)
            loss = output.logits.square().mean()
            model.backward(loss)
            return output.logits

        logits = [step(model, tokens(0, 0)).concat() for _ in range(2)]
        # All ranks drop the same elements of replicated activations, and other ones in the next step.
        for each in logits:
            assert torch.equal(*smp.allgather(each, smp.TP_GROUP))
        assert not torch.allclose(*logits)
        smp.shutdown()


def test_ranks_drop_the_same_elements():
    pytest.importorskip("transformers")
    run_ranks(_check_dropout, 2, launcher=Forked("transformers"), timeout=100)


def _refused():
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.smp.huggingface import make_t5
    from support.tensor_parallel import config, tokens

    smp.init(config(2, 1, False, "memory"))
    with smp.tensor_parallelism():
        whole = make_t5("relu")
    model = smp.DistributedModel(whole).eval()
    ids = tokens(0, 0)
    errors = []
    for arguments in (
        {"inputs_embeds": torch.zeros(4, 6, 16)},
        {"input_ids": ids, "decoder_input_ids": ids, "output_attentions": True},
        {"input_ids": ids, "decoder_input_ids": ids, "encoder_outputs": (torch.zeros(4, 6, 16),)},
        {"input_ids": ids},
    ):
        with pytest.raises((smp.exceptions.SMPUnsupportedError, smp.exceptions.SMPValidationError)) as caught:
            model(**arguments)
        errors.append(str(caught.value))
    smp.shutdown()
    return errors


def test_unsupported_arguments_of_t5_raise():
    pytest.importorskip("transformers")
    for errors in run_ranks(_refused, 2, launcher=Forked("transformers"), timeout=100):
        assert [each[:60] for each in errors] == [
            "a distributed T5 does not take `inputs_embeds`",
            "a distributed T5 does not take `output_attentions`",
            "a distributed T5 does not take `encoder_outputs`",
            "a decoder needs `decoder_input_ids` or labels",
        ]
