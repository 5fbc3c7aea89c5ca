"""Helpers that scripts for the original import."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def get_ext_suffix() -> str:
    """Return the suffix of extension modules.

    Returns:
        The suffix, such as ``.cpython-311-x86_64-linux-gnu.so``.
    """
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return the path of an extension module.

    Args:
        pkg_path: A file in its folder.
        *args: Parts of the path from there, without the suffix.

    Returns:
        The path.
    """
    return os.path.join(os.path.dirname(pkg_path), *args[:-1], args[-1] + get_ext_suffix())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing: operations for a framework are found, or built, when its module is imported.

    Args:
        ext_name: Ignored.
        ext_env_var: Ignored.
        pkg_path: Ignored.
        *args: Ignored.
    """


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether ``horovod.<name>`` can be used.

    Args:
        ext_base_name: The name, such as ``torch``.
        verbose: Whether to print the result.

    Returns:
        ``True`` if the module can be used.
    """
    available = ext_base_name in ("torch", "tensorflow") and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"Checking whether extension {ext_base_name} is available: {available}")
    return available


def _cache(f: Callable[..., Any]) -> Callable[..., Any]:
    """Cache results by arguments."""
    results: dict[Any, Any] = {}

    @functools.wraps(f)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        key = (args, frozenset(kwargs.items()))
        if key not in results:
            results[key] = f(*args, **kwargs)
        return results[key]

    return wrapper


@_cache
def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework sees a GPU.

    Args:
        ext_base_name: The framework, such as ``torch``.
        verbose: Ignored.

    Returns:
        ``True`` if the framework sees a GPU.
    """
    if not extension_available(ext_base_name):
        return False
    return importlib.import_module(f"horovod.{ext_base_name}.mpi_ops")._check_has_gpu()


def _built(name: str) -> Callable[..., Any]:
    def built(verbose: bool = False) -> Any:
        if not any(extension_available(extension) for extension in EXTENSIONS):
            return None
        from horovod.common import basics

        return getattr(basics.shared(), name)()

    built.__name__ = built.__qualname__ = name
    built.__doc__ = f"`HorovodBasics.{name}`; ``None`` if there is no framework."
    return _cache(built)


mpi_built = _built("mpi_built")
gloo_built = _built("gloo_built")
nccl_built = _built("nccl_built")
ddl_built = _built("ddl_built")
ccl_built = _built("ccl_built")


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Return a context in which variables of the environment have other values.

    Args:
        **kwargs: The values; ``None`` leaves a variable unchanged.

    Yields:
        Nothing.
    """
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Return a function that combines the arguments ``op`` and ``average``.

    Args:
        reduce_ops: The module with ``Average`` and ``Sum``.

    Returns:
        A function of both, which returns the operation.
    """

    def resolve(op: int | None, average: bool | None) -> int:
        if op is not None:
            if average is not None:
                raise ValueError("The op parameter supersedes average. Please provide only one of them.")
            return op
        if average is None:
            return reduce_ops.Average
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed", DeprecationWarning, stacklevel=3
        )
        return reduce_ops.Average if average else reduce_ops.Sum

    return resolve


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two.

    Args:
        num_rank: The number.

    Returns:
        ``True`` for 1, 2, 4 and so on.
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[Any], n: int) -> list[list[Any]]:  # noqa: E741 - the documented name
    """Split a list into consecutive parts of nearly the same length, the longer ones first.

    Args:
        l: The list.
        n: Number of parts.

    Returns:
        The parts.
    """
    length, longer = divmod(len(l), n)
    starts = [part * length + min(part, longer) for part in range(n + 1)]
    return [l[starts[part] : starts[part + 1]] for part in range(n)]


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Do nothing: the library was not built against a version.

    Args:
        name: Ignored.
        version: Ignored.
        exception: Ignored.
    """


def is_iterable(x: object) -> bool:
    """Return whether an object can be iterated over.

    Args:
        x: The object.

    Returns:
        ``True`` if the object can be iterated over.
    """
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least another one.

    Args:
        ver: The version.
        target: The other one, as ``a.b.c``.

    Returns:
        ``True`` if ``ver`` is at least ``target``.

    Raises:
        ValueError: ``target`` has another form.
    """
    if not isinstance(ver, str) or not isinstance(target, str) or not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"cannot compare version {ver!r} with {target!r}: expected strings, the second as `a.b.c`")
    numbers = [int(number) for number in re.findall(r"\d+", ver.partition("+")[0])[:3]]
    return numbers + [0] * (3 - len(numbers)) >= [int(number) for number in target.split(".")]
