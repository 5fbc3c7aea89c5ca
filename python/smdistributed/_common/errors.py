"""The errors of the core as Python classes: one class per code.

The core's functions raise these classes themselves. An operation of PyTorch or TensorFlow raises an error of the
framework instead, whose text ends in `` [smd:<code>]``; :func:`translated` converts it to the class of the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from smdistributed import _core


class SmdistributedError(RuntimeError):
    """Base of all errors of the core.

    Attributes:
        code: The core's stable name for the kind of error.
        recoverable: Whether the session can be used after the error. After any other error, every later call fails.
    """

    code: ClassVar[str]
    recoverable: ClassVar[bool] = False


class NotInitializedError(SmdistributedError):
    """A call needs ``init()`` first."""

    code = "not_initialized"
    recoverable = True


class AlreadyInitializedError(SmdistributedError):
    """``init()`` was called a second time."""

    code = "already_initialized"
    recoverable = True


class ClosedError(SmdistributedError):
    """The session was shut down, by this process or after a failure."""

    code = "closed"


class InvalidArgumentError(SmdistributedError, ValueError):
    """A value that the caller passed is not acceptable."""

    code = "invalid_argument"
    recoverable = True


class ConfigError(SmdistributedError, ValueError):
    """A configuration key or environment variable has a bad value, or two contradict each other."""

    code = "config"
    recoverable = True


class MismatchError(SmdistributedError):
    """Ranks called different operations, or the same one with different arguments."""

    code = "mismatch"
    recoverable = True


class PeerFailedError(SmdistributedError):
    """Another rank died, left, or reported that it failed."""

    code = "peer_failed"

    @property
    def rank(self) -> int | None:
        """The global rank that failed; ``None`` if the message does not name it."""
        match = re.match(r"rank (\d+) ", str(self))
        return int(match[1]) if match else None


class WaitTimeoutError(SmdistributedError, TimeoutError):
    """A wait for other ranks ended at its deadline."""

    code = "timeout"


class UnsupportedError(SmdistributedError, NotImplementedError):
    """A feature is not available on this machine or in this build."""

    code = "unsupported"
    recoverable = True


class RendezvousError(SmdistributedError):
    """Joining the job failed."""

    code = "rendezvous"


class SystemCallError(SmdistributedError):
    """A system call failed."""

    code = "io"


class DeviceError(SmdistributedError):
    """A call of CUDA or NCCL failed."""

    code = "device"


class WaitInterruptedError(SmdistributedError):
    """A signal arrived during a wait."""

    code = "interrupted"


class RemovedError(SmdistributedError):
    """The launcher has removed this process's host from the elastic job."""

    code = "removed"


class InternalError(SmdistributedError):
    """A bug in OpenSMD."""

    code = "internal"


CLASSES: dict[str, type[SmdistributedError]] = {
    cls.code: cls
    for cls in (
        NotInitializedError,
        AlreadyInitializedError,
        ClosedError,
        InvalidArgumentError,
        ConfigError,
        MismatchError,
        PeerFailedError,
        WaitTimeoutError,
        UnsupportedError,
        RendezvousError,
        SystemCallError,
        DeviceError,
        WaitInterruptedError,
        RemovedError,
        InternalError,
    )
}

# Frameworks may put the name of a graph node before the core's text, and a stack trace after it. TensorFlow also puts
# before it where each failed node was created.
_ORIGIN = r"Detected at node [^\n]* defined at \([^\n]*\):\n(?:(?:  [^\n]*|<[^\n]*>)?\n)*"
_REPORT = re.compile(
    rf"(?:Graph execution error:\n+(?:{_ORIGIN})*)?(?:\{{\{{.*?\}}\}} )?(?P<text>.*) \[smd:(?P<code>[a-z_]+)\]",
    re.DOTALL,
)


def from_report(report: str, classes: dict[str, type[SmdistributedError]] = CLASSES) -> SmdistributedError | None:
    """Make the error that a text describes.

    Args:
        report: A text ending in `` [smd:<code>]``.
        classes: Class of each code.

    Returns:
        The error, or ``None`` if the text does not come from the core.
    """
    match = _REPORT.match(report)
    if match is None or match["code"] not in classes:
        return None
    return classes[match["code"]](match["text"])


@contextmanager
def translated(classes: dict[str, type[SmdistributedError]] = CLASSES) -> Iterator[None]:
    """Return a context that raises errors of the core as their classes; others pass unchanged.

    Args:
        classes: Class of each code.

    Yields:
        Nothing.

    Raises:
        SmdistributedError: The error of the core, as the class of its code.
    """
    try:
        yield
    except SmdistributedError as error:
        # Raised by a function of the core. Callers may map the code to a class of their own.
        cls = classes[error.code]
        if isinstance(error, cls):
            raise
        raise cls(str(error)) from None
    except (RuntimeError, ValueError) as error:
        translation = from_report(str(error), classes)
        if translation is None:
            raise
        if translation.code == "interrupted":
            # Raises the exception of the signal's handler, such as KeyboardInterrupt, instead of the wait's.
            _core.raise_interrupt()
        raise translation from None
