"""Parts of the capture of stages that need no GPU: the memory of inputs, the number of copies, excluded options."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed.modelparallel import config  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPConfigError  # noqa: E402
from smdistributed.modelparallel.torch.runtime import stage_capture  # noqa: E402


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(4.0).view(1, 1, 4).expand(2, 3, 4),
        torch.arange(2).bool().view(2, 1, 1).expand(2, 3, 4),
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
    ids=["contiguous", "transposed", "expanded", "mask", "scalar", "empty"],
)
def test_memory_for_inputs_keeps_strides_and_its_address(tensor):
    memory = stage_capture.Buffer.like(tensor)
    address = memory.tensor.data_ptr()
    for _ in range(2):
        memory.tensor.as_strided(memory._memory.shape, memory._memory.stride()).zero_()
        memory.fill(tensor)
        assert torch.equal(memory.tensor, tensor)
        assert memory.tensor.stride() == tensor.stride()
        assert memory.tensor.data_ptr() == address


def test_as_many_copies_as_microbatches_are_active():
    one = [("F", 0, 0, None), ("F", 0, 1, None), ("B", 0, 0, None), ("F", 0, 2, None), ("B", 0, 1, None)]
    assert stage_capture._most_active(one, 0) == 2
    # A split backward ends with the gradients of weights.
    split = [("F", 1, 0, None), ("I", 1, 0, None), ("F", 1, 1, None), ("W", 1, 0, None), ("F", 1, 2, None)]
    assert stage_capture._most_active(split, 1) == 2
    assert stage_capture._most_active(split, 0) == 0


def test_state_of_modules_notices_attributes_and_hooks():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    states = [stage_capture._state([module])]
    assert stage_capture._state([module]) == states[0]
    module[1].eps = 0.5
    states.append(stage_capture._state([module]))
    module[0].register_forward_hook(lambda *_: None)
    states.append(stage_capture._state([module]))
    module.eval()
    states.append(stage_capture._state([module]))
    assert len(set(states)) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"offload_activations": True},
        {"shard_optimizer_state": True, "ddp": True},
        {"tensor_parallel_degree": 2, "ddp": True},
    ],
)
def test_options_that_exclude_graphs_are_refused(other):
    with pytest.raises(SMPConfigError, match=f"`cuda_graphs` and `{next(iter(other))}` exclude each other"):
        config.read({"cuda_graphs": True, **other})
