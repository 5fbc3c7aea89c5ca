"""The extension module: its stub is current, and every error code has an exception class."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path

import pytest

from smdistributed import _core
from smdistributed._common import errors

STUB = Path(_core.__file__).with_name("_core.pyi")


def stub_nodes(kind, body=None):
    nodes = ast.parse(STUB.read_text()).body if body is None else body
    return {node.name: node for node in nodes if isinstance(node, kind)}


def stub_functions():
    return stub_nodes(ast.FunctionDef)


def test_the_stub_lists_every_public_name_of_the_module():
    public = {name for name in dir(_core) if not name.startswith("_")}
    assert set(stub_nodes((ast.FunctionDef, ast.ClassDef))) == public


@pytest.mark.parametrize("name", sorted(stub_nodes(ast.ClassDef)))
def test_the_stub_lists_every_public_name_of_a_class(name):
    public = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
    assert set(stub_nodes(ast.FunctionDef, stub_nodes(ast.ClassDef)[name].body)) - {"__init__"} == public


@pytest.mark.parametrize("name", sorted(stub_functions()))
def test_the_stub_describes_the_function(name):
    stub, function = stub_functions()[name], getattr(_core, name)
    parameters = inspect.signature(function).parameters.values()
    assert [argument.arg for argument in stub.args.args] == [parameter.name for parameter in parameters]
    defaults = [parameter.default for parameter in parameters if parameter.default is not parameter.empty]
    assert [ast.literal_eval(default) for default in stub.args.defaults] == defaults
    assert all(argument.annotation for argument in stub.args.args)
    assert stub.returns is not None
    assert ast.get_docstring(stub) == inspect.getdoc(function)


def test_every_code_has_a_class():
    assert sorted(errors.CLASSES) == sorted(_core.error_codes())


@pytest.mark.parametrize("code", _core.error_codes())
def test_exceptions_survive_pickling(code):
    error = errors.CLASSES[code]("rank 3 died while rank 0 was in barrier")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_a_peers_failure_names_its_rank():
    assert errors.PeerFailedError("rank 13 died while rank 0 was in barrier").rank == 13


def test_reports_in_framework_errors_become_exceptions_of_the_library():
    class MyPeerFailedError(errors.PeerFailedError):
        pass

    def fail(error):
        with errors.translated({**errors.CLASSES, "peer_failed": MyPeerFailedError}):
            raise error

    with pytest.raises(MyPeerFailedError) as raised:
        fail(RuntimeError("rank 1 died while rank 0 was in barrier [smd:peer_failed]\nframework's trace"))
    assert str(raised.value) == "rank 1 died while rank 0 was in barrier"
    origin = 'defined at (most recent call last):\n  File "train.py", line 26, in <module>\n\n  File "train.py", line 2, in f\n\n'
    report = "rank 1 died [smd:peer_failed]\n\t [[{{node SmdRecv}}]] [Op:__inference_step_232]"
    for origins in (
        "",
        f"Detected at node SmdRecv {origin}",
        f"Detected at node SmdRecv {origin}Detected at node f {origin}",
    ):
        with pytest.raises(MyPeerFailedError) as raised:
            fail(RuntimeError(f"Graph execution error:\n\n{origins}{report}"))
        assert str(raised.value) == "rank 1 died"
    with pytest.raises(MyPeerFailedError):
        fail(errors.PeerFailedError("rank 1 died"))
    with pytest.raises(errors.ConfigError, match="bad"):
        fail(errors.ConfigError("bad"))
    with pytest.raises(RuntimeError, match="no report"):
        fail(RuntimeError("no report"))


def test_settings_have_their_defaults(monkeypatch):
    monkeypatch.delenv("SMD_TIMEOUT_SECONDS", raising=False)
    assert _core.setting("SMD_TIMEOUT_SECONDS") == "300"
    monkeypatch.setenv("SMD_TIMEOUT_SECONDS", "7")
    assert _core.setting("SMD_TIMEOUT_SECONDS") == "7"
    with pytest.raises(errors.InvalidArgumentError, match="`SMD_NO_SUCH`"):
        _core.setting("SMD_NO_SUCH")
