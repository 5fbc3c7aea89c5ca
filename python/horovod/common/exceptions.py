"""Horovod's exceptions, and how the core's errors become them."""

from __future__ import annotations

from smdistributed._common import errors


class HorovodInternalError(RuntimeError):
    """A collective failed; in elastic mode the job goes on from the last commit."""


class ScalarError(HorovodInternalError, ValueError):
    """A scalar where rows are needed. The original's coordinator finds that, so scripts may expect an internal error; it is an
    argument's all the same, and no reason to go back to the last commit."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - the documented name
    """Hosts have come or gone.

    Attributes:
        skip_sync: Nothing was added, so the state need not be synchronised.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """The text of :class:`HorovodVersionMismatchError`."""
    return f"{name} {installed_version} is installed, but this library was built for {name} {version}"


class HorovodVersionMismatchError(ImportError):
    """The framework is not the one that the library was built for. Never raised here: shims are built for what is installed."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = "Horovod has been shut down."

# After these errors of the core nothing can be called any more.
_ENDED = ("closed", "peer_failed", "timeout", "rendezvous", "io", "device")

# Others cause these, so the next session of an elastic job may come about.
_PASSING = ("peer_failed", "closed", "timeout", "io")


def _described(error: BaseException) -> tuple[str, str]:
    """The text of an error and the core's code for it, which is empty if it is none of the core's."""
    if isinstance(error, errors.SmdistributedError):
        return str(error), error.code
    described = errors.from_report(str(error))
    return (str(described), described.code) if described else (str(error), "")


def _is_of_device(text: str) -> bool:
    """Whether the framework tells of a device or its libraries that fail. It has a class for a few of these errors only."""
    return any(name in text for name in ("CUDA error", "CUDA driver error", "CUDNN", "CUBLAS", "NCCL"))


def _text(text: str, code: str) -> str:
    if code == "not_initialized":
        return NOT_INITIALIZED
    return f"{text}. {SHUT_DOWN}" if code in _ENDED else text


def may_pass(error: BaseException) -> bool:
    """Whether the cause of a session's end is another rank."""
    return _described(error)[1] in _PASSING


def at_submission(error: BaseException) -> BaseException:
    """What a call raises whose arguments the core or the framework refuses, or that the core cannot take any more."""
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    if code == "unsupported":
        return NotImplementedError(text)
    if isinstance(error, TypeError):
        return ValueError(f"{text}: this type is not supported")
    # Of the framework: what it cannot work on, unless the device is why.
    is_plain = not code and type(error) in (RuntimeError, NotImplementedError)
    refused = isinstance(error, ValueError) or (is_plain and not _is_of_device(text))
    if refused or code in ("invalid_argument", "config"):
        return ValueError(text)
    return HorovodInternalError(_text(text, code))


def at_execution(error: BaseException) -> BaseException:
    """What waiting for a collective raises that failed."""
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    return HorovodInternalError(_text(text, code))


def of_control(error: BaseException) -> BaseException:
    """What other calls raise."""
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    return ValueError(_text(text, code)) if code else RuntimeError(text)
