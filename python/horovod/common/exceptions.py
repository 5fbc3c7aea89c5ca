"""Horovod's exceptions, and their relation to errors of the core."""

from __future__ import annotations

from smdistributed._common import errors


class HorovodInternalError(RuntimeError):
    """A collective failed. An elastic job continues from the last commit."""


class ScalarError(HorovodInternalError, ValueError):
    """A scalar was given where rows are needed.

    Horovod's coordinator finds this mistake, so scripts may expect an internal error. Here it is an error of the
    argument, and no reason to return to the last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - the documented name
    """Hosts have joined or left.

    Args:
        skip_sync: Whether no host was added, so that the state need not be synchronized.

    Attributes:
        skip_sync: As the argument.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return the text of :class:`HorovodVersionMismatchError`.

    Args:
        name: The framework.
        version: The version that the library was built for.
        installed_version: The version that is installed.

    Returns:
        The text.
    """
    return f"{name} {installed_version} is installed, but this library was built for {name} {version}"


class HorovodVersionMismatchError(ImportError):
    """The installed framework is not the one that the library was built for.

    OpenSMD never raises it: shims are built for the installed version.

    Args:
        name: The framework.
        version: The version that the library was built for.
        installed_version: The version that is installed.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = "Horovod has been shut down."

# After these errors of the core, no further call can succeed.
_ENDED = ("closed", "peer_failed", "timeout", "rendezvous", "io", "device")

# Consequences of other errors, so an elastic job may form its next session.
_PASSING = ("peer_failed", "closed", "timeout", "io")


def _described(error: BaseException) -> tuple[str, str]:
    """Return the text of an error and the core's code for it, which is empty for errors of other origin."""
    if isinstance(error, errors.SmdistributedError):
        return str(error), error.code
    described = errors.from_report(str(error))
    return (str(described), described.code) if described else (str(error), "")


def _is_of_device(text: str) -> bool:
    """Return whether the framework reports that a device or its libraries fail.

    The framework has a class of its own for few of these errors.
    """
    return any(name in text for name in ("CUDA error", "CUDA driver error", "CUDNN", "CUBLAS", "NCCL"))


def _text(text: str, code: str) -> str:
    if code == "not_initialized":
        return NOT_INITIALIZED
    return f"{text}. {SHUT_DOWN}" if code in _ENDED else text


def may_pass(error: BaseException) -> bool:
    """Return whether another rank caused the end of the session.

    Args:
        error: The error.

    Returns:
        ``True`` if the next session of an elastic job may succeed.
    """
    return _described(error)[1] in _PASSING


def at_submission(error: BaseException) -> BaseException:
    """Return the exception for a call that the core or the framework refused.

    Args:
        error: The error of the core or the framework.

    Returns:
        ``ValueError`` for unacceptable arguments, ``HorovodInternalError`` for a core that takes no more calls.
    """
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    if code == "unsupported":
        return NotImplementedError(text)
    if isinstance(error, TypeError):
        return ValueError(f"{text}: this type is not supported")
    # Errors of the framework about its input, unless a device has failed.
    is_plain = not code and type(error) in (RuntimeError, NotImplementedError)
    refused = isinstance(error, ValueError) or (is_plain and not _is_of_device(text))
    if refused or code in ("invalid_argument", "config"):
        return ValueError(text)
    return HorovodInternalError(_text(text, code))


def at_execution(error: BaseException) -> BaseException:
    """Return the exception for a collective that failed.

    Args:
        error: The error of the core or the framework.

    Returns:
        ``HorovodInternalError``, or ``KeyboardInterrupt`` for a wait that a signal ended.
    """
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    return HorovodInternalError(_text(text, code))


def of_control(error: BaseException) -> BaseException:
    """Return the exception for other calls.

    Args:
        error: The error of the core.

    Returns:
        ``ValueError`` for an error of the core, else ``RuntimeError``.
    """
    text, code = _described(error)
    if code == "interrupted":
        return KeyboardInterrupt(text)
    return ValueError(_text(text, code)) if code else RuntimeError(text)
