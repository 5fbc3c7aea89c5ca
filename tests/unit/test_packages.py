"""What importing does, and does not do; each case in a Python of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(code, *options, path=None):
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=path
    )


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, smdistributed, smdistributed._core, smdistributed._common, smdistributed._launch, horovod\n"
        "print([name for name in ('torch', 'tensorflow', 'numpy') if name in sys.modules])"
    )
    done = python(code)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("module", ["ray", "spark.torch", "mxnet"])
def test_a_horovod_face_that_is_missing_says_so(module):
    done = python(f"import horovod; print(horovod.__version__); import horovod.{module}")
    assert done.stdout.startswith("0.28.1")
    assert done.returncode == 1
    name = module.removesuffix(".torch")
    assert f"ModuleNotFoundError: `horovod.{name}` is not part of this release of OpenSMD" in done.stderr


def test_a_real_horovod_is_not_shadowed(tmp_path):
    metadata = tmp_path / "horovod-0.28.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    done = python(f"import sys; sys.path.append({str(tmp_path)!r}); import horovod")
    assert "ImportError: Horovod 0.28.1 and OpenSMD are both installed" in done.stderr


def test_the_core_is_built_for_every_python():
    from smdistributed import _core

    assert _core.__file__.endswith("_core.abi3.so")
