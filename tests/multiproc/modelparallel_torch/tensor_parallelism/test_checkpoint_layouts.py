"""Checkpoints of a Llama that is trained with tensor parallelism and partitions load at other layouts, in one process,
and by transformers.
"""

from __future__ import annotations

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.timeout(150)

SAVED = (2, 2, {})
#: Layouts of four ranks: tensor-parallel degree, partitions, and further settings.
LOADED = [(1, 4, {}), (4, 1, {}), (1, 1, {"sharded_data_parallel_degree": 4}), (2, 2, {})]
ALONE = [(1, 1, {})]


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    from support.tensor_parallel import VOCABULARY

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def _start(layout, seed):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import config

    tp, pp, more = layout
    smp.init(config(tp, pp, False, "memory", sdp_param_persistence_threshold=9, **more))
    torch.manual_seed(seed)
    with smp.tensor_parallelism():
        module = _llama()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2))

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    return model, optimizer, step


def _state(model, optimizer):
    """Returns tensors by name: the weights under transformers' names, and the states of the optimizer."""
    import smdistributed.modelparallel.torch as smp

    weights = smp.state.module_manager.to_own_names(model.state_dict())
    states = optimizer.state_dict()["state"]
    return dict(weights), {
        (name, key): each for name, state in states.items() for key, each in state.items() if key != "step"
    }


def _save(folder):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of

    torch.set_default_dtype(torch.float64)
    model, optimizer, step = _start(SAVED, 0)
    for number in range(2):
        optimizer.zero_grad()
        step(model, batch_of(number))
        optimizer.step()
    smp.save_checkpoint(folder, "core", user_content={"at": 2}, format="sharded")
    smp.save_checkpoint(folder, "full", partial=False, model=model)
    wanted = _state(model, optimizer)
    if smp.rank() == 0:
        torch.save(wanted, f"{folder}/wanted.pt")
    smp.shutdown()


def _load(folder, layouts):
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of

    torch.set_default_dtype(torch.float64)
    weights, states = torch.load(f"{folder}/wanted.pt")
    for layout in layouts:
        model, optimizer, step = _start(layout, 7)
        assert smp.resume_from_checkpoint(folder, "core") == {"at": 2}
        if layout[1] > 1:
            # The first step divides the model.
            step(model, batch_of(0))
        found, found_states = _state(model, optimizer)
        assert found.keys() == weights.keys(), (layout, found.keys() ^ weights.keys())
        assert all(torch.equal(found[name], each) for name, each in weights.items()), layout
        assert found_states.keys() == states.keys(), (layout, found_states.keys() ^ states.keys())
        assert all(torch.equal(found_states[name], each) for name, each in states.items()), layout
        smp.shutdown()


@pytest.mark.more
def test_a_checkpoint_loads_at_other_layouts_and_by_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = str(tmp_path)
    run_ranks(_save, 4, folder, launcher=Forked("transformers"), timeout=60)
    run_ranks(_load, 4, folder, LOADED, launcher=Forked("transformers"), timeout=60)
    run_ranks(_load, 1, folder, ALONE, launcher=Forked("transformers"), timeout=60)
    weights, _ = torch.load(tmp_path / "wanted.pt")
    whole = torch.load(tmp_path / "full")
    alone = _llama()
    alone.config.save_pretrained(tmp_path / "pretrained")
    torch.save(whole, tmp_path / "pretrained" / "pytorch_model.bin")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained", dtype=torch.float64)
    state = loaded.state_dict()
    assert state.keys() == weights.keys(), state.keys() ^ weights.keys()
    assert all(torch.equal(state[name], each) for name, each in weights.items())
