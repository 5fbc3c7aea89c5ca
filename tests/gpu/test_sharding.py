"""Tensor parallelism, sharded parameters, sharded optimizer states and 16-bit training on GPUs, compared with one
process on a GPU.
"""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import NUM_RANKS, needs_one

pytestmark = [pytest.mark.timeout(280), needs_one]


def _begin():
    """Selects this rank's GPU and makes it the default device of new tensors."""
    import torch

    torch.cuda.set_device(devices.own())
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))


def _check_tensor_parallelism(names):
    _begin()
    from support.smp.models import models
    from support.tensor_parallel import compare

    layouts = [(NUM_RANKS, 1, 1)] + ([(2, 2, 1), (2, 1, 2)] if NUM_RANKS == 4 else [(1, 2, 1), (1, 1, 2)])
    for number, name in enumerate(names):
        # Each comparison makes NCCL groups, which takes seconds. So each model runs with two of the variants only;
        # models alternate among layouts and batches.
        layout, is_plain = layouts[number % len(layouts)], number % 2 == 0
        variants = {(layouts[0], False, "memory"), (layout, layout[0] > 1 and not is_plain, "speed")}
        for layout, prescaled, optimize in sorted(variants):
            try:
                compare(*models()[name][:3], *layout, prescaled, optimize)
            except Exception as error:
                raise AssertionError(f"{name}, {layout}, {prescaled}, {optimize}") from error


@pytest.mark.parametrize(
    "names",
    [
        ["ends", "gpt", "llama", "bert", "mqa"],
        ["gptj", "alibi", "output", "layer", "stack"],
        ["flash", "attention", "cross", "experts"],
    ],
    ids=" ".join,
)
def test_tensor_parallelism_trains_as_one_process(names):
    run_ranks(_check_tensor_parallelism, NUM_RANKS, names, timeout=260)


#: Degrees of tensor and pipeline parallelism, with further settings. The remaining ranks are replicas.
SHARDED = [
    ((1, 1), {"sharded_data_parallel_degree": 2}),
    ((1, 1), {"sharded_data_parallel_degree": 2, "recompute": True, "passes": 2}),
    ((1, 1), {"shard_optimizer_state": True}),
    ((2, 1), {"sharded_data_parallel_degree": 2, "prescaled": True}),
    ((2, 1), {"shard_optimizer_state": True, "optimize": "speed"}),
    ((1, 2), {"sharded_data_parallel_degree": 2, "recompute": True}),
    ((2, 2), {"shard_optimizer_state": True}),
]


def _sharded_body():
    _begin()
    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import compare_sharded

    ran = 0
    for (tp, pp), more in SHARDED:
        rdp = NUM_RANKS // (tp * pp)
        if tp * rdp < more.get("sharded_data_parallel_degree", 2):
            continue
        try:
            compare_sharded(tp, pp, rdp, **more)
        except Exception as error:
            raise AssertionError(f"{(tp, pp, rdp)}, {more}") from error
        smp.shutdown()
        ran += 1
    return ran


def test_sharded_parameters_and_states_train_as_one_process():
    assert min(run_ranks(_sharded_body, NUM_RANKS, timeout=260)) >= 5


def _check_precision():
    _begin()
    from support.smp.precision import compare

    last = NUM_RANKS - 1
    compare(
        [
            ({"fp16": True, "partitions": 2, "ddp": True}, last, 0.0),
            ({"fp16": True, "partitions": NUM_RANKS, "pipeline": "zero_bubble"}, 1, 0.5),
            ({"fp16": True, "partitions": 1, "ddp": True}, last, 0.5),
            ({"bf16": True, "partitions": 2, "ddp": True}, last, 0.5),
        ]
    )


def test_all_ranks_skip_the_step_in_which_one_rank_overflows():
    run_ranks(_check_precision, NUM_RANKS, timeout=200)


def _memory_body(settings):
    _begin()
    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp

    smp.init({"ddp": True, "sdp_param_persistence_threshold": 10_000, **settings})
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816,
    )  # fmt: skip
    whole = "shard_optimizer_state" in settings
    torch.cuda.reset_peak_memory_stats()
    with smp.delay_param_initialization(not whole):
        module = transformers.LlamaForCausalLM(config)
    model = smp.DistributedModel(module)
    made = torch.cuda.max_memory_allocated()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(8192, (2, 64))
    for _ in range(2):
        # Gradients exist until the next step begins, so they count.
        optimizer.zero_grad()
        step(model, ids).reduce_mean().item()
        optimizer.step()
    torch.cuda.synchronize()
    # The workspaces of cuBLAS are PyTorch's, about 30 MiB for each stream.
    torch._C._cuda_clearCublasWorkspaces()
    numels = [getattr(each, "ds_numel", each.numel()) for each in module.parameters()]
    return made, torch.cuda.memory_allocated(), 4 * sum(numels)


def test_a_rank_allocates_only_its_shard():
    pytest.importorskip("transformers")
    for made, allocated, parameters in run_ranks(
        _memory_body, NUM_RANKS, {"sharded_data_parallel_degree": NUM_RANKS}, timeout=120
    ):
        # Parameters, gradients and two states of Adam. Other memory, such as gathered parameters, is no more than one
        # layer.
        assert allocated <= 1.08 * 4 * parameters / NUM_RANKS, (allocated, parameters)
        assert made <= 1.08 * parameters / NUM_RANKS + parameters / 6, (made, parameters)
    for _made, allocated, parameters in run_ranks(
        _memory_body, NUM_RANKS, {"shard_optimizer_state": True}, timeout=120
    ):
        # Only the two states are sharded; parameters and gradients are whole.
        assert allocated <= 1.08 * (2 + 2 / NUM_RANKS) * parameters, (allocated, parameters)
