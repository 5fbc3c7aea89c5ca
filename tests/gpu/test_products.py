"""Products of tensor parallelism on GPUs, which run while their inputs and results are exchanged."""

from __future__ import annotations

import pytest

from support import devices, run_ranks
from support.devices import needs_one

pytestmark = [pytest.mark.timeout(150), needs_one]


def _check_chunks(optimize):
    import torch
    from torch.nn import functional

    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel.torch.nn import layout, products

    torch.cuda.set_device(devices.own())
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "optimize": optimize})
    batch, length = 3, 7
    generator = torch.Generator().manual_seed(smp.tp_rank())
    inner, weight = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).cuda().requires_grad_()
        for shape in ((batch, length, 16), (24, 16))
    )
    wanted = layout.leave_product(functional.linear(inner, weight))
    wanted = [wanted, *torch.autograd.grad(wanted.square().sum(), (inner, weight))]
    # The trial takes 5 steps, 3 steps for each number of chunks, and one more.
    numbers = []
    for call in range(20):
        torch.ops.smd.begin_step_of_products()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = products.row_product(inner, weight)
        numbers.append(sum(event.name in {"aten::mm", "aten::bmm"} for event in profile.events()))
        found = [found, *torch.autograd.grad(found.square().sum(), (inner, weight))]
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(
                other, one, rtol=1e-12, atol=1e-12, msg=lambda text, call=call: f"{call}: {text}"
            )
    assert numbers[:14] == [1] * 5 + [1, 2, 4] * 3
    assert len(set(numbers[14:])) == 1, numbers


@pytest.mark.parametrize("optimize", ["speed", "memory"])
def test_products_are_equal_in_any_number_of_chunks(optimize):
    run_ranks(_check_chunks, 2, optimize, timeout=100)


def _check_compiled_layers():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import smdistributed.modelparallel.torch as smp

    torch.cuda.set_device(devices.own())
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True, "microbatches": 1})
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101,
    )  # fmt: skip
    torch.manual_seed(3)
    with smp.tensor_parallelism():
        module = LlamaForCausalLM(config)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def run():
        model.zero_grad(set_to_none=True)
        loss = step(model, ids).reduce_mean()
        return [loss, *(parameter.grad.clone() for parameter in model.parameters())]

    ids = torch.randint(101, (2, 16), generator=torch.Generator().manual_seed(1)).cuda()
    plain = run()
    for layer in model.get_module().transformer.seq_layers:
        # Raises if a compiler cannot take a layer as a whole.
        layer.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(plain, run(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_compiled_layers_are_one_graph_each():
    pytest.importorskip("transformers")
    run_ranks(_check_compiled_layers, 2, timeout=100)
