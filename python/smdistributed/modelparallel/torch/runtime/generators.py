"""The random number generators of this process whose state a step restores and sends."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from array import array
from typing import Any

import torch

from smdistributed.modelparallel.torch.device import current_device

#: The end of the states of NumPy's global generator and of Python's: the position, whether a normal number is
#: cached, and that number.
_TAIL = struct.Struct("<q?d")


class Generator:
    """One generator.

    Attributes:
        kind: ``cpu`` or ``cuda``: PyTorch's generator of that device; ``python``: that of the module ``random``;
        ``numpy``: NumPy's global generator.
    """

    kind = ""

    def state(self) -> bytes:
        """Return the current state."""
        raise NotImplementedError

    def set_state(self, state: bytes) -> None:
        """Set the state."""
        raise NotImplementedError

    def jump(self) -> None:
        """Move to another state, which is determined by the current one."""
        raise NotImplementedError


class _Torch(Generator):
    def __init__(self, kind: str, generator: torch.Generator) -> None:
        self.kind, self._generator = kind, generator

    def state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    def set_state(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def jump(self) -> None:
        digest = hashlib.blake2b(self.state(), digest_size=8).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little") >> 2)


class _Python(Generator):
    kind = "python"

    def state(self) -> bytes:
        version, numbers, normal = random.getstate()
        return array("I", numbers).tobytes() + _TAIL.pack(version, normal is not None, normal or 0.0)

    def set_state(self, state: bytes) -> None:
        version, has_normal, normal = _TAIL.unpack(state[-_TAIL.size :])
        numbers = array("I", state[: -_TAIL.size])
        random.setstate((version, tuple(numbers), normal if has_normal else None))

    def jump(self) -> None:
        random.seed(random.getrandbits(62))


class _NumPy(Generator):
    kind = "numpy"

    def __init__(self, numpy: Any) -> None:
        self._numpy = numpy

    def state(self) -> bytes:
        _, numbers, place, has_normal, normal = self._numpy.random.get_state()
        return numbers.tobytes() + _TAIL.pack(place, bool(has_normal), normal)

    def set_state(self, state: bytes) -> None:
        place, has_normal, normal = _TAIL.unpack(state[-_TAIL.size :])
        numbers = self._numpy.frombuffer(state[: -_TAIL.size], dtype=self._numpy.uint32)
        self._numpy.random.set_state(("MT19937", numbers, place, int(has_normal), normal))

    def jump(self) -> None:
        self._numpy.random.seed(self._numpy.random.randint(1 << 31))


def generators() -> list[Generator]:
    """Return the generators: PyTorch's of CPUs and of this rank's device, Python's, and NumPy's if it is imported."""
    found: list[Generator] = [_Torch("cpu", torch.default_generator), _Python()]
    device = current_device()
    if device.type == "cuda":
        torch.cuda.init()
        found.append(_Torch("cuda", torch.cuda.default_generators[device.index]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy.random.get_state()[0] == "MT19937":
        found.append(_NumPy(numpy))
    return found


class HostGenerators:
    """A context that restores the generators of Python and NumPy at its end.

    Attributes:
        draws: Kinds of the generators from which numbers were drawn in the context.
    """

    def __init__(self) -> None:
        self.draws: set[str] = set()

    def __enter__(self) -> HostGenerators:
        self._before = [(each, each.state()) for each in generators() if each.kind in ("python", "numpy")]
        return self

    def __exit__(self, *_: object) -> None:
        for each, state in self._before:
            if each.state() != state:
                self.draws.add(each.kind)
                each.set_state(state)
