"""The random number generators of this process that a step follows."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from array import array
from typing import Any

import torch

from smdistributed.modelparallel.torch.device import current_device

#: Of NumPy's global generator and of Python's, behind the numbers: the place, whether there is a normal number left,
#: and that.
_TAIL = struct.Struct("<q?d")


class Generator:
    """One generator.

    Attributes:
        kind: ``cpu`` or ``cuda``, PyTorch's of that device; ``python``, of the module ``random``; ``numpy``, NumPy's
            global one.
    """

    kind = ""

    def state(self) -> bytes:
        """Returns the state of this moment."""
        raise NotImplementedError

    def set_state(self, state: bytes) -> None:
        """Goes on from ``state``."""
        raise NotImplementedError

    def jump(self) -> None:
        """Goes on from a state that is another one, and the same for equal states."""
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
    """PyTorch's of CPUs and of this rank's device, Python's, and NumPy's if it is imported and of the usual kind."""
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
    """A context after which the generators of Python and NumPy are as before.

    Attributes:
        draws: Kinds of those that were drawn from inside.
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
