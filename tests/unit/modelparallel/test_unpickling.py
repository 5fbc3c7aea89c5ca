"""Unpickling of objects from other ranks: data is restored, and pickles that could run code are rejected."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import os
import pathlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest

from smdistributed._common import unpickling
from smdistributed._common.unpickling import UnsafeObjectError

torch = pytest.importorskip("torch")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rows: int
    name: str = "x"


@dataclasses.dataclass
class Nested:
    parts: list


class Flag(enum.Flag):
    A = 1
    B = 2


Pair = collections.namedtuple("Pair", "left right")


class Named(Pair):
    pass


class Rows(list):
    pass


class Plain:
    def __init__(self):
        self.loss = 0.5
        self.more = {"a": [1, 2]}


class Slots:
    __slots__ = ("rank",)


class Restored:
    def __setstate__(self, state):
        raise AssertionError("it ran")

    def __getstate__(self):
        return {"rank": 1}


class Called:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return Called, (1, 2)


class Ending:
    def __del__(self):
        pass


class Making:
    def __new__(cls):
        return super().__new__(cls)


def _trip(value, **options):
    return unpickling.loads(unpickling.dumps(value), "rank 1", **options)


VALUES = [
    1,
    "a",
    [1, (2.5, None, True)],
    {"a": {1, 2}, b"b": frozenset([3])},
    bytearray(b"x"),
    range(3),
    slice(1, 2),
    complex(1, 2),
    ValueError("bad"),
    OSError(2, "missing"),
    int,
    np.arange(6).reshape(2, 3),
    np.float32(3),
    np.array([{"a": 1}, None], dtype=object),
    np.dtype([("a", "f4"), ("b", "i8")]),
    np.float32,
    torch.float32,
    torch.strided,
    torch.Size([1, 2]),
    torch.device("cpu"),
    collections.OrderedDict(a=1),
    collections.defaultdict(list, {1: [2]}),
    collections.Counter("aab"),
    collections.deque([1], 3),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    datetime.timedelta(1),
    pathlib.Path("/x"),
    decimal.Decimal("1.5"),
    argparse.Namespace(rate=0.1),
    types.SimpleNamespace(a=1),
    Frozen(3),
    Nested([Frozen(1), Flag.A | Flag.B, Named(1, 2), Rows([1])]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_data_is_restored(value):
    found = _trip(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_objects_of_the_script_get_their_attributes():
    assert vars(_trip(Plain())) == {"loss": 0.5, "more": {"a": [1, 2]}}
    slots = Slots()
    slots.rank = 3
    assert _trip(slots).rank == 3


TENSORS = [
    torch.arange(3),
    torch.ones(2, dtype=torch.bfloat16),
    torch.ones(2, requires_grad=True),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.eye(2).to_sparse(),
    torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.layout}-{tensor.dtype}")
def test_tensors_are_restored(tensor):
    found = _trip({"state": tensor})["state"]
    assert type(found) is type(tensor)
    assert (found.dtype, found.requires_grad) == (tensor.dtype, tensor.requires_grad)
    dense = (lambda one: one.dequantize()) if tensor.is_quantized else (lambda one: one.to_dense())
    assert torch.equal(dense(found), dense(tensor))


class _Reduced:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


REFUSED = {
    "posix.system": lambda path: _Reduced(os.system, f"touch {path}"),
    "builtins.eval": lambda path: _Reduced(eval, f"open({str(path)!r}, 'w')"),
    "subprocess.Popen": lambda path: _Reduced(subprocess.Popen, ["touch", str(path)]),
    "_io.FileIO": lambda path: _Reduced(io.FileIO, str(path), "w"),
    "builtins.type": lambda path: _Reduced(type, "Name", (), {}),
    "numpy.ndarray": lambda path: _Reduced(np.ndarray, (2,), "u1"),
    f"{__name__}.Restored": lambda path: Restored(),
    f"{__name__}.Called": lambda path: Called(),
    f"{__name__}.Ending": lambda path: Ending(),
    f"{__name__}.Making": lambda path: Making(),
    "torch.nn.modules.linear.Linear": lambda path: torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_may_run_code_are_refused_by_name(name, tmp_path):
    evidence = tmp_path / "evidence"
    data = pickle.dumps(REFUSED[name](evidence))
    with pytest.raises(UnsafeObjectError) as caught:
        unpickling.loads(data, "rank 7")
    text = str(caught.value)
    assert text.startswith(f"rank 7 sent an object of `{name}`, which is not unpickled: "), text
    assert f"SMD_SAFE_GLOBALS={name}" in text
    assert not evidence.exists()


FORGED = {
    "an attribute of a module": b"\x80\x04cbuiltins\ngetattr\n\x8c\x01a\x8c\x03get\x86R.",
    "a module's contents by a dotted name": b"\x80\x04\x8c\x08__main__\x8c\x09os.system\x93\x8c\x04true\x85R.",
    "another module's function by a module that imports it": b"\x80\x04c" + f"{__name__}\nos\n".encode() + b".",
    "a class that is changed": b"\x80\x04cargparse\nNamespace\nN}\x8c\x01x\x8c\x01ys\x86b.",
    "an object that is called": b"\x80\x04]\x8c\x04true\x85R.",
    "an old form of a call": b"(cposix\nsystem\n\x8c\x04trueo.",
    "an array without numbers": b"\x80\x04cnumpy\nndarray\n\x8c\x01a\x85\x81.",
    "a module that is not imported": b"\x80\x04cantigravity\nFlyer\n)\x81.",
    "a rebuilt tensor of another function": (
        b"\x80\x04ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nlist\nctorch\nTensor\n)}tR."
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_pickles_are_refused(name):
    with pytest.raises(UnsafeObjectError, match="rank 1 sent a"):
        unpickling.loads(FORGED[name], "rank 1")
    assert "antigravity" not in sys.modules


def test_the_bytes_of_a_storage_are_not_unpickled_either():
    inner = pickle.dumps(_Reduced(os.system, "true"))
    data = b"\x80\x04ctorch.storage\n_load_from_bytes\nC" + bytes([len(inner)]) + inner + b"\x85R."
    with pytest.raises(UnsafeObjectError, match="rank 1 sent an object that is not unpickled"):
        unpickling.loads(data, "rank 1")


def test_objects_of_a_class_that_the_receiver_supplies():
    class Local:
        def __init__(self):
            self.number = 3

    class Ending(Local):
        def __del__(self):
            pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return "class" if isinstance(value, type) else None

    def trip(value):
        file = io.BytesIO()
        Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        return unpickling.loads(file.getvalue(), "rank 1", lambda key: type(value))

    found = trip(Local())
    assert type(found) is Local
    assert found.number == 3
    with pytest.raises(UnsafeObjectError, match="rank 1 sent a pickle that calls type objects"):
        trip(Ending())


@pytest.fixture
def no_added_globals(monkeypatch):
    monkeypatch.setattr(unpickling, "_added", {})


def test_the_user_can_allow_classes(no_added_globals, monkeypatch):
    with pytest.raises(UnsafeObjectError):
        _trip(Called())
    unpickling.add_safe_globals([Called])
    assert _trip(Called()).arguments == (1, 2)
    assert unpickling.get_safe_globals() == [Called]
    unpickling.add_safe_globals([(len, "elsewhere.length")])
    assert unpickling.loads(b"\x80\x04celsewhere\nlength\n\x8c\x03abc\x85R.", "rank 1") == 3
    with pytest.raises(TypeError, match="a safe global is 'text'"):
        unpickling.add_safe_globals(["text"])


def test_safe_globals_of_torch_are_allowed_too(no_added_globals):
    with torch.serialization.safe_globals([Called]):
        assert _trip(Called()).arguments == (1, 2)
    with pytest.raises(UnsafeObjectError):
        _trip(Called())


def test_a_setting_allows_names(no_added_globals, monkeypatch):
    monkeypatch.setenv("SMD_SAFE_GLOBALS", f"other.Name, {__name__}.Call*")
    assert _trip(Called(), trusts=lambda: False).arguments == (1, 2)
    with pytest.raises(UnsafeObjectError):
        _trip(Restored())
    monkeypatch.setenv("SMD_SAFE_GLOBALS", "*")
    assert _trip(_Reduced(os.getcwd)) == os.getcwd()
    with pytest.raises(UnsafeObjectError, match="this job is open to the network: set SMD_SECRET"):
        _trip(_Reduced(os.getcwd), trusts=lambda: False)


def test_functions_without_a_name_are_sent_by_value_and_refused(no_added_globals):
    pytest.importorskip("cloudpickle")
    with pytest.raises(UnsafeObjectError, match=r"cloudpickle\.cloudpickle\._make_function"):
        _trip(lambda: 1)
