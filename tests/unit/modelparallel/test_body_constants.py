"""Values of tensors that the bodies of all microbatches compute from the same constants, such as positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from smdistributed.modelparallel.torch.tracing.constants import Constants  # noqa: E402
from smdistributed.modelparallel.torch.tracing.encoder import Encoder  # noqa: E402


class _Body(TorchFunctionMode):
    """Routes calls through the constants, as a step's body does. `asked` counts the reads of values that reach a
    tensor.
    """

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self._constants, self.reads = constants, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        encoder = Encoder({})
        encoder.encode(args)
        encoder.encode(kwargs)

        def compute() -> Any:
            self.reads += func in (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.tolist)
            return func(*args, **kwargs)

        key = None if encoder.unknown else encoder.key()
        return self._constants.call(func, lambda: key, encoder.leaves, compute)


def _run(*bodies: Callable[[], Any]) -> tuple[list[Any], int]:
    constants, values, reads = Constants(("cpu",)), [], 0
    for body in bodies:
        with _Body(constants) as mode:
            values.append(body())
        constants.end_of_body()
        reads += mode.reads
    return values, reads


def test_a_value_computed_from_positions_is_read_once() -> None:
    def is_one_sequence() -> bool:
        positions = torch.arange(6).unsqueeze(0).expand(2, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        return bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())

    assert _run(is_one_sequence, is_one_sequence, is_one_sequence) == ([True] * 3, 1)


def test_other_arguments_are_read_again() -> None:
    values, reads = _run(*(lambda n=n: (torch.arange(n) * 2).sum().item() for n in (3, 4, 3)))
    assert values == [6, 12, 6]
    assert reads == 2


def test_dtypes_are_distinguished() -> None:
    values, _ = _run(lambda: torch.arange(1, 2).item(), lambda: torch.arange(1.0, 2.0).item())
    assert [type(value) for value in values] == [int, float]
    values, _ = _run(
        *(lambda dtype=dtype: (torch.arange(3).to(dtype) / 2)[1].item() for dtype in (torch.half, torch.int))
    )
    assert values == [0.5, 0.5]


def test_data_of_the_microbatch_is_read_each_time() -> None:
    data = [torch.tensor([1]), torch.tensor([2])]
    values, reads = _run(*(lambda x=x: (x + torch.arange(1)).item() for x in data))
    assert values == [1, 2]
    assert reads == 2


def test_random_numbers_are_read_each_time() -> None:
    torch.manual_seed(0)
    assert _run(*[lambda: torch.rand(1).item()] * 3)[1] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1),
        lambda x: x[1:].fill_(7),
        lambda x: x.__setitem__(0, 5),
        lambda x: torch.add(x, 1, out=x),
        lambda x: x.data.add_(1),
        lambda x: x.detach().mul_(2),
        lambda x: setattr(x, "data", x.data + 3),
        lambda x: x.untyped_storage().fill_(1),
        lambda x: x.storage().fill_(1),
        lambda x: x.numpy().fill(4),
    ],
)
def test_a_tensor_that_was_written_to_is_not_constant(change: Callable[[Any], Any]) -> None:
    def body(is_changed: bool) -> list[int]:
        x = torch.arange(3)
        view = x[:]
        if is_changed:
            change(x)
        return [int(each.sum()) for each in (view, view + 0, x)]

    (before, after), _ = _run(lambda: body(False), lambda: body(True))
    assert before == [3] * 3
    assert after == body(True)


def test_the_caller_may_modify_a_list_of_values() -> None:
    def body() -> list[int]:
        found = torch.arange(2).tolist()
        found.append(9)
        return found

    assert _run(body, body)[0] == [[0, 1, 9]] * 2


def test_a_tensor_that_a_collective_writes_to_is_not_constant() -> None:
    others = [7, 12]

    def body(other: int) -> int:
        x = torch.full((1,), 1)
        # Written as a process group writes: the tensor's version does not change.
        x.numpy()[0] += other
        return x.item()

    assert _run(*(lambda other=other: body(other) for other in others))[0] == [8, 13]


def test_values_of_a_subclass_of_int_are_distinguished() -> None:
    class Length(int):
        pass

    assert _run(*(lambda n=n: torch.arange(Length(n)).sum().item() for n in (3, 4)))[0] == [3, 6]
