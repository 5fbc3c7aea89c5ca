"""Operations of PyTorch's library on meta tensors, as `torch.compile` and fake tensors call them: they send nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from smdistributed._common import shims  # noqa: E402 - PyTorch may be absent

#: An argument of each type of the schemas.
VALUES = {
    "Tensor": lambda: torch.empty(2, 3, device="meta"),
    "List[Tensor]": lambda: [torch.empty(2, 3, device="meta") for _ in range(2)],
    "List[int]": lambda: [1, 1],
    "int": lambda: 0,
    "str": lambda: "sum",
}


def _blocking():
    """Names of the library's operations that write to existing tensors."""
    shims.load_torch()
    schemas = [each for each in torch._C._jit_get_all_schemas() if each.name.startswith("smd::")]
    names = {each.name.removeprefix("smd::") for each in schemas}
    return sorted(name for name in names if f"{name}_async" in names and name != "barrier")


def test_operations_on_meta_tensors_do_nothing_and_need_no_session():
    names = _blocking()
    assert {"all_reduce_", "all_gather", "all_to_all_single", "send", "recv_"} <= set(names)
    for name in names:
        operation = getattr(torch.ops.smd, name).default
        arguments = [VALUES[str(argument.type)]() for argument in operation._schema.arguments]
        assert operation(*arguments) is None, name
