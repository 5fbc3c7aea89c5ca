"""Effects of imports, each tested in a process of its own, and the contents of packages."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from smdistributed._common.support import WINDOWS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["rust-core/src", "cpp-shims", "python/src", "mpi-plugin", "torch_ext", "tf_ops"]


def python(code, *options, path=None):
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=path
    )


def test_the_metadata_demand_the_support_window():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML parser")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = {name: window.oldest for name, window in WINDOWS.items()}
    assert project["requires-python"] == f">={oldest['python']}"
    assert project["optional-dependencies"] == {
        "torch": [f"torch>={oldest['torch']}"],
        "tensorflow": [f"tensorflow-cpu>={oldest['tensorflow']}", f"keras>={oldest['keras']}"],
    }


def test_make_test_newest_takes_the_newest_versions_of_the_window():
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "tests/newest.txt").read_text(), re.M))
    newest = {name: WINDOWS[name].newest for name in ("torch", "tensorflow", "keras", "tf-keras")}
    assert newest == {
        "torch": pinned["torch"],
        "tensorflow": pinned["tensorflow_cpu"],
        "keras": pinned["keras"],
        "tf-keras": pinned["tf_keras"],
    }


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, smdistributed, smdistributed._core, smdistributed._common, smdistributed._launch, horovod\n"
        "print([name for name in ('torch', 'tensorflow', 'numpy') if name in sys.modules])"
    )
    done = python(code)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_importing_the_libraries_does_not_import_the_compiler():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    code = (
        "import sys, smdistributed.dataparallel.torch.torch_smddp, smdistributed.modelparallel.torch\n"
        "from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = python(code)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


@pytest.mark.parametrize("module", ["mxnet"])
def test_a_horovod_module_that_does_not_exist_raises_with_the_reason(module):
    done = python(f"import horovod; print(horovod.__version__); import horovod.{module}")
    assert done.stdout.startswith("0.28.1")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: `horovod.{module}` is not part of this release of OpenSMD" in done.stderr


def test_horovod_on_ray_says_what_is_missing():
    done = python("import sys; sys.modules['ray'] = None; import horovod.ray")
    assert done.returncode == 1
    assert "ImportError: `horovod.ray` needs Ray, which is not installed: `pip install ray`" in done.stderr


def test_horovod_on_spark_says_what_is_missing():
    done = python("import sys; sys.modules['pyspark'] = None; import horovod.spark")
    assert done.returncode == 1
    assert "ImportError: `horovod.spark` needs Spark, which is not installed: `pip install pyspark`" in done.stderr


def test_the_backend_of_ray_train_says_what_is_missing():
    done = python("import sys; sys.modules['ray'] = None; import smdistributed.integrations.ray")
    assert done.returncode == 1
    assert "ImportError: `smdistributed.integrations.ray` needs Ray Train, which is not installed" in done.stderr


@pytest.mark.parametrize("missing", ["keras", "tensorflow"])
def test_horovod_for_keras_says_what_is_missing(missing, tmp_path):
    # Multi-backend Keras as it is installed without TensorFlow.
    if missing == "tensorflow":
        (tmp_path / "keras.py").write_text("import tensorflow\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules[{missing!r}] = None; import horovod.keras"
    done = python(code)
    assert done.returncode == 1
    wanted = {"keras": "Keras, which is not installed", "tensorflow": "the backend of Keras"}[missing]
    assert f"ImportError: `horovod.keras` needs {wanted}: `pip install {missing}`" in done.stderr


def test_a_real_horovod_is_not_shadowed(tmp_path):
    metadata = tmp_path / "horovod-0.28.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    done = python(f"import sys; sys.path.append({str(tmp_path)!r}); import horovod")
    assert "ImportError: Horovod 0.28.1 and OpenSMD are both installed" in done.stderr


def test_the_core_is_built_for_every_python():
    from smdistributed import _core

    assert _core.__file__.endswith("_core.abi3.so")


def test_the_package_knows_its_version():
    from smdistributed import _core

    done = python("import smdistributed; print(smdistributed.__version__); smdistributed.other")
    assert done.stdout.strip() == _core.__version__
    assert "AttributeError: module 'smdistributed' has no attribute 'other'" in done.stderr


def test_the_source_distribution_has_what_the_crates_read(tmp_path):
    pytest.importorskip("maturin", reason="the source distribution is made by maturin, which is not installed")
    command = [sys.executable, "-m", "maturin", "sdist", "--out", tmp_path]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {name for name in listed.stdout.splitlines() if name.endswith((".rs", ".c", ".h", ".cc", ".cu", ".cuh"))}
    assert sources - names == set()
    assert not any(name.endswith(".so") for name in names)
