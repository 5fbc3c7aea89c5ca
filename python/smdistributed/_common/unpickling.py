"""Objects from other ranks: unpickled without running code that a pickle chooses.

A pickle names functions and classes, and calls them. :func:`loads` accepts these:

- *Plain data*: numbers, texts, bytes, containers. No name is needed for them.
- *Known names*: types of the standard library that hold data, arrays of NumPy, tensors of PyTorch and TensorFlow
  (:mod:`smdistributed._common.safe_names`).
- *Data classes*: dataclasses, named tuples and enums of modules that this process has imported, and any class of the
  user's own code. Their objects get back their attributes, but none of their methods runs. Unpickling never imports a
  module.
- *What the user trusts*: :func:`add_safe_globals`, ``torch.serialization.add_safe_globals`` and ``SMD_SAFE_GLOBALS``.

Everything else is an :class:`UnsafeObjectError` that names the class, its sender and the remedy.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import functools
import io
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from smdistributed import _core
from smdistributed._common import safe_names

#: A class or function, or a pair of one and its full name in pickles.
SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]

_added: dict[str, Any] = {}


class UnsafeObjectError(pickle.UnpicklingError):
    """Another rank sent an object of a class that this process does not unpickle."""


def add_safe_globals(safe_globals: Iterable[SafeGlobal]) -> None:
    """Allow objects from other ranks to contain these classes and functions.

    All ranks that receive such objects call it. A pickle may then call the functions with any arguments, and restore
    objects through their own ``__setstate__``. Named after ``torch.serialization.add_safe_globals``.

    Args:
        safe_globals: Classes and functions, or pairs of one and its full name in pickles.

    Raises:
        TypeError: An entry is neither.

    Examples:
        >>> class Config: ...
        >>> add_safe_globals([Config])
    """
    for entry in list(safe_globals):
        value, name = entry if isinstance(entry, tuple) else (entry, None)
        if not callable(value) or not isinstance(name, str | None):
            raise TypeError(
                f"a safe global is {entry!r}: expected a class, a function, or a pair of one and its full name"
            )
        _added[name or f"{value.__module__}.{value.__qualname__}"] = value


def get_safe_globals() -> list[Any]:
    """Return the entries of all calls of :func:`add_safe_globals`.

    Returns:
        The classes and functions.
    """
    return list(_added.values())


def dumps(value: Any) -> bytes:
    """Pickle an object with the names of its classes, which receivers can check.

    Only objects that such a pickle cannot contain, such as lambdas and local classes, are pickled with cloudpickle.

    Args:
        value: The object.

    Returns:
        The pickle.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: It cannot be pickled, and cloudpickle is not installed.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Versions of Python raise different errors for a lambda, a local class, or a class of an interactive session.
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        return cloudpickle.dumps(value)


def loads(
    data: bytes,
    sender: str,
    persistent_load: Callable[[Any], Any] | None = None,
    trusts: Callable[[], bool] | None = None,
) -> Any:
    """Unpickle an object that another rank sent.

    Args:
        data: The pickle.
        sender: For errors, such as ``rank 1``.
        persistent_load: Returns the objects that the sender's ``persistent_id`` left out.
        trusts: Returns whether the job authenticates senders; by default, the core is asked.

    Returns:
        The object.

    Raises:
        UnsafeObjectError: The pickle contains something that is not accepted.
    """
    try:
        return _Plain(data, persistent_load).load()
    except (_HasNamesError, TypeError):
        # A `TypeError` may come from a pickle that calls an object that is not a function: `_Careful` reports it.
        pass
    try:
        return _Careful(data, persistent_load, sender, trusts or _is_authenticated).load()
    except UnsafeObjectError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(f"{sender} sent an object that is not unpickled: {error}") from error


class _HasNamesError(Exception):
    """A pickle contains names, so it is more than plain data."""


class _Plain(pickle.Unpickler):
    """Unpickles plain data, as most pickles are. It is a hundred times faster than :class:`_Careful`."""

    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._look_up = persistent_load

    def persistent_load(self, key: Any) -> Any:
        if self._look_up is None:
            return super().persistent_load(key)
        value = self._look_up(key)
        if callable(value):
            # A pickle could call it.
            raise _HasNamesError
        return value

    def find_class(self, module: str, name: str) -> Any:
        raise _HasNamesError


class _Trust(enum.Enum):
    """The ways in which a pickle may use a class or function."""

    CALL = enum.auto()
    """The class or function may be called, and its objects are restored by their own ``__setstate__``."""
    NAME = enum.auto()
    """The class or function may be an argument of a call."""
    DATA = enum.auto()
    """A class whose objects get back their attributes without a call of any of its methods."""


# Untyped: its stubs do not contain the methods and the stack that this subclass uses.
_PythonUnpickler: Any = pickle._Unpickler


class _Careful(_PythonUnpickler):
    """Unpickles with the unpickler that is written in Python, and checks each instruction that calls something."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def __init__(
        self, data: bytes, persistent_load: Callable[[Any], Any] | None, sender: str, trusts: Callable[[], bool]
    ) -> None:
        super().__init__(io.BytesIO(data))
        if persistent_load is not None:
            self.persistent_load = persistent_load
        self._sender, self._trusts = sender, trusts
        # Compared by identity, because objects may define `__eq__`. The list keeps them alive.
        self._known: dict[int, _Trust] = {}
        self._kept: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        found, trust = self._look_up(module, name)
        self._known[id(found)] = trust
        self._kept.append(found)
        return found

    def _look_up(self, module: str, name: str) -> tuple[Any, _Trust]:
        full = f"{module}.{name}"
        if full in _added:
            return _added[full], _Trust.CALL
        replacement = safe_names.replacement(module, name)
        if replacement is not None:
            return replacement, _Trust.CALL
        if safe_names.is_argument(module, name):
            return super().find_class(module, name), _Trust.NAME
        if safe_names.is_known(module, name):
            return super().find_class(module, name), _Trust.CALL
        pattern = _matching_setting(full)
        if pattern is not None:
            if fnmatch.fnmatchcase("os.system", pattern) and not self._trusts():
                raise UnsafeObjectError(
                    f"{self._sender} sent an object of `{full}`, which is refused: SMD_SAFE_GLOBALS allows every name "
                    f"(`{pattern}`), but this job is open to the network: set SMD_SECRET to the same random text for "
                    "all ranks"
                )
            return super().find_class(module, name), _Trust.CALL
        found = _imported(module, name)
        if found is None:
            raise self._refusal(full, "no such class has been imported here")
        if safe_names.is_known_object(module, found) or any(found is safe for safe in _safe_for_torch()):
            return found, _Trust.CALL
        why = _reason_to_refuse(found, module, name)
        if why is not None:
            raise self._refusal(full, why)
        return found, _Trust.DATA

    def _refusal(self, full: str, why: str) -> UnsafeObjectError:
        return UnsafeObjectError(
            f"{self._sender} sent an object of `{full}`, which is not unpickled: {why}. If the ranks of this job may "
            f"send it, call `smp.add_safe_globals` (`hvd.add_safe_globals`) with it on all ranks, or set "
            f"SMD_SAFE_GLOBALS={full}"
        )

    def _refusal_of(self, value: Any, why: str) -> UnsafeObjectError:
        cls = value if isinstance(value, type) else type(value)
        return self._refusal(f"{cls.__module__}.{cls.__qualname__}", why)

    def _trust(self, value: Any) -> _Trust:
        trust = self._known.get(id(value))
        if trust is None:
            raise UnsafeObjectError(f"{self._sender} sent a pickle that calls {type(value).__name__} objects")
        return trust

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        trust = self._trust(function)
        if trust is not _Trust.CALL and not (trust is _Trust.DATA and issubclass(function, enum.Enum)):
            raise self._refusal_of(function, "it is restored by a call (`__reduce__`)")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        self.append(self._made(cls, arguments, {}))

    def load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        arguments = self.stack.pop()
        cls = self.stack.pop()
        self.append(self._made(cls, arguments, keywords))

    def load_binpersid(self) -> None:
        super().load_binpersid()
        value = self.stack[-1]
        # `persistent_load` has chosen the class, so it is trusted. It may have no importable name.
        if isinstance(value, type) and not hasattr(value, "__del__"):
            self._known.setdefault(id(value), _Trust.DATA)
            self._kept.append(value)

    def _made(self, cls: Any, arguments: Any, keywords: Any) -> Any:
        trust = self._trust(cls)
        if trust is _Trust.NAME:
            raise self._refusal_of(cls, "it is created by a call")
        if trust is _Trust.CALL:
            return cls.__new__(cls, *arguments, **keywords)
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            # Not by the class's own `__new__`, which may be the user's code.
            return tuple.__new__(cls, arguments)
        if not isinstance(cls.__new__, types.BuiltinFunctionType):
            raise self._refusal_of(cls, "it is created by its own `__new__`")
        return cls.__new__(cls, *arguments, **keywords)

    def load_build(self) -> None:
        state = self.stack.pop()
        value = self.stack[-1]
        if isinstance(
            value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType | types.ModuleType
        ):
            raise UnsafeObjectError(f"{self._sender} sent a pickle that changes {value!r}")
        own = getattr(type(value), "__setstate__", None)
        if own is not None:
            is_data = self._known.get(id(type(value))) is _Trust.DATA
            if is_data and getattr(own, "__module__", None) != "dataclasses":
                raise self._refusal_of(value, "it is restored by its own `__setstate__`")
            own(value, state)
            return
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            vars(value).update(attributes)
        for name, content in (slots or {}).items():
            member = _static_attribute(type(value), name)
            if not isinstance(member, types.MemberDescriptorType):
                raise self._refusal_of(value, f"`{name}` is not one of its slots")
            member.__set__(value, content)

    def load_unusual(self) -> None:
        raise UnsafeObjectError(f"{self._sender} sent a pickle with an instruction that this library never sends")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.BINPERSID[0]] = load_binpersid
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[code[0]] = load_unusual


def _is_authenticated() -> bool:
    return not _core.is_initialized() or _core.is_authenticated()


def _matching_setting(full: str) -> str | None:
    patterns = (pattern.strip() for pattern in _core.setting("SMD_SAFE_GLOBALS").split(","))
    return next((pattern for pattern in patterns if pattern and fnmatch.fnmatchcase(full, pattern)), None)


def _imported(module: str, name: str) -> Any:
    """Return a class or function by its name, if this process has imported it.

    No module is imported, and the name never leads from one module into another.
    """
    found: Any = sys.modules.get(module)
    *classes, last = name.split(".")
    for part in classes:
        found = None if found is None else vars(found).get(part)
        if not isinstance(found, type):
            return None
    found = None if found is None else vars(found).get(last)
    return None if isinstance(found, types.ModuleType) else found


def _reason_to_refuse(found: Any, module: str, name: str) -> str | None:
    """Return why objects of a class cannot be restored as data; ``None`` if they can."""
    if not isinstance(found, type):
        return "it is not a class"
    if (found.__module__, found.__qualname__) != (module, name):
        return f"its name is `{found.__module__}.{found.__qualname__}`"
    if hasattr(found, "__del__"):
        return "its objects do something when they end (`__del__`)"
    is_data = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
    is_data = is_data or (issubclass(found, tuple) and hasattr(found, "_fields"))
    if not is_data and not _is_own_code(module):
        return "it is a library's class that is not a dataclass, named tuple or enum"
    return None


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_own_code(module: str) -> bool:
    """Return whether a module belongs to the user or to this library, and not to an installed package."""
    if module.split(".")[0] in ("__main__", "__mp_main__", "smdistributed", "horovod"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    parts = file.replace("\\", "/").split("/")
    return not ({"site-packages", "dist-packages"} & set(parts)) and not file.startswith(_library_folders())


def _safe_for_torch() -> list[Any]:
    """Return the classes and functions of ``torch.serialization.add_safe_globals``."""
    serialization = sys.modules.get("torch.serialization")
    get = getattr(serialization, "get_safe_globals", None)
    return [] if get is None else [entry[0] if isinstance(entry, tuple) else entry for entry in get()]


def _static_attribute(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
