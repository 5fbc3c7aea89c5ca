"""Imports, each in a fresh process: they import one framework at most, and their errors name the package that is
missing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def _run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_torch
@pytest.mark.parametrize("first", ["torch", "smdistributed.dataparallel.torch.distributed"])
def test_torch_is_imported_in_either_order_without_tensorflow(first):
    _run(f"""
import sys
import {first}
import smdistributed.dataparallel.torch.distributed as dist
import smdistributed.dataparallel.torch.dist as alias
import torch
from smdistributed.dataparallel.torch import dist as attribute, get_local_rank, get_rank, get_world_size
assert alias is dist is attribute
assert get_rank is dist.get_rank
assert not dist.is_available() and not dist.is_initialized()
assert "tensorflow" not in sys.modules
""")


@needs_tensorflow
@pytest.mark.parametrize("first", ["tensorflow", "smdistributed.dataparallel.tensorflow"])
def test_tensorflow_is_imported_in_either_order_without_torch(first):
    _run(f"""
import sys
import {first}
import smdistributed.dataparallel.tensorflow as sdp
assert "torch" not in sys.modules and "tf_keras" not in sys.modules
assert all(hasattr(sdp, name) for name in sdp.__all__)
assert sdp.tensorflow is sdp
assert sdp.keras.callbacks.MetricAverageCallback
assert not hasattr(sdp, "no_such_name")
""")


def test_the_package_needs_no_framework():
    assert (
        _run("""
import sys
sys.modules["torch"] = sys.modules["tensorflow"] = None  # as if not installed
import smdistributed
import smdistributed.dataparallel
import smdistributed.dataparallel.exceptions
for package in "smdistributed.dataparallel", "horovod":
    for name in "torch", "tensorflow":
        try:
            __import__(f"{package}.{name}")
        except ImportError as error:
            print(error)
""").splitlines()
        == [
            "this part of smdistributed needs PyTorch, which is not installed: `pip install torch`",
            "this part of smdistributed needs TensorFlow, which is not installed: `pip install tensorflow`",
        ]
        * 2
    )


def test_free_threaded_python_is_refused_by_a_clear_message():
    assert "OpenSMD does not support free-threaded Python" in _run("""
import sys
sys.abiflags = "t"
for name in "smdistributed", "smdistributed.dataparallel.torch", "horovod.torch":
    try:
        __import__(name)
    except ImportError as error:
        print(error)
    else:
        raise AssertionError(name)
""")


def _public_modules():
    """Names of all public modules, `__init__` modules included."""
    python = Path(__file__).resolve().parents[2] / "python"
    names = []
    for package in "smdistributed", "horovod":
        for path in sorted((python / package).rglob("*.py")):
            parts = path.relative_to(python).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            # `horovod.ray` needs Ray, which `make test-engines` installs.
            needs_ray = parts[:2] == ("horovod", "ray") and importlib.util.find_spec("ray") is None
            # `smdistributed.integrations.ray` needs Ray and PyTorch.
            needs_ray = needs_ray or parts == ("smdistributed", "integrations", "ray")
            # Packages of Spark's tests, which `make test-engines` installs.
            needs_spark = parts[:2] == ("horovod", "spark")
            needs_keras = parts[:2] == ("horovod", "keras") or parts[-1] == "keras_backend"
            needs_keras = needs_keras and importlib.util.find_spec("keras") is None
            needs_more = needs_ray or needs_spark or needs_keras
            if not any(part.startswith("_") for part in parts) and not needs_more:
                names.append(".".join(parts))
    return names


def _import_without(absent, names, backend):
    _run(f"""
import importlib, os, sys
from importlib.machinery import PathFinder
os.environ["KERAS_BACKEND"] = {backend!r}

# `sys.modules[name] = None` would not do: SciPy takes it for an imported module.
class PathFinderWithout(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [PathFinderWithout if finder is PathFinder else finder for finder in sys.meta_path]
for name in {names!r}:
    importlib.import_module(name)
assert not set({absent!r}) & set(sys.modules)
""")


@needs_torch
def test_each_public_module_that_is_not_for_tensorflow_is_imported_without_it():
    names = [name for name in _public_modules() if "tensorflow" not in name.split(".")]
    assert "smdistributed.modelparallel.torch" in names
    assert "horovod.keras.callbacks" in names or importlib.util.find_spec("keras") is None
    _import_without(["tensorflow", "tf_keras"], names, "torch")


@needs_tensorflow
def test_each_public_module_that_is_not_for_torch_is_imported_without_it():
    names = [name for name in _public_modules() if "torch" not in name.split(".")]
    assert "smdistributed.modelparallel.tensorflow" in names
    assert "horovod.keras.callbacks" in names
    _import_without(["torch"], names, "tensorflow")


@needs_torch
def test_a_shim_is_built_if_the_prebuilt_one_does_not_load(tmp_path):
    _run(f"""
from pathlib import Path
from smdistributed._common import shims
framework = shims.torch_framework()
shims.PREBUILT = Path({str(tmp_path)!r})
path = shims.PREBUILT / framework.prebuilt_key / framework.library
path.parent.mkdir()
path.write_text("for another system")
assert shims.ensure(framework) == path
messages = []
shims._log = messages.append
assert shims.load_torch().all_reduce_
assert "does not load with" in messages[0] and messages[0].startswith("the prebuilt shim for PyTorch "), messages
""")


@needs_torch
def test_the_shim_exports_no_cpp_symbols():
    """The C++ symbols of two shims in one process must not collide."""
    from smdistributed._common import shims

    library = shims.ensure(shims.torch_framework())
    symbols = subprocess.run(["nm", "-DC", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    ours = [line for line in symbols.stdout.splitlines() if " smd::" in line or " rust::" in line]
    assert not ours
