"""The report of `smdrun doctor`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from smdistributed._launch import doctor as doctor_module


def doctor(*options, **env):
    return subprocess.run(
        [sys.executable, "-m", "smdistributed", "doctor", *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )


def test_every_subject_has_a_line_and_every_problem_a_remedy():
    done = doctor()
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    subjects = [re.match(r"(ok|--|!!)  (\S+( \S+)*)  ", line).group(2) for line in lines]
    for subject in (
        "Python",
        "OpenSMD",
        "PyTorch",
        "TensorFlow",
        "C++ compiler",
        "MPI",
        "NCCL",
        "NVRTC",
        "shared memory",
        "cores",
    ):
        assert subject in subjects
    assert done.returncode == int("\n!!" in done.stdout)


def test_a_missing_compiler_is_a_problem_where_a_shim_is_missing(tmp_path):
    done = doctor(CXX="/no/such/compiler", SMD_CACHE_DIR=str(tmp_path))
    if re.search(r"^--  \S+ shim ", done.stdout, re.MULTILINE) is None:
        pytest.skip("the package carries prebuilt shims")
    assert done.returncode == 1
    assert re.search(
        r"!!  C\+\+ compiler +`/no/such/compiler` \(CXX\) was not found\n +-> .*apt-get install", done.stdout
    )


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    done = doctor(SMD_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert "-> set SMD_CACHE_DIR" in done.stdout


def _findings(monkeypatch, tmp_path, versions, built=()):
    """Returns the findings of `smdrun doctor` on a machine with these versions, on which the shims in `built` are
    built.
    """
    monkeypatch.setenv("SMD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    for name in built:
        (tmp_path / f"{name}-core-{versions['opensmd']}-0123").mkdir(parents=True)
        (tmp_path / f"{name}-core-{versions['opensmd']}-0123" / f"libsmd_{name.split('-')[0]}.so").touch()
    find = lambda *names: next((versions[name] for name in names if name in versions), None)  # noqa: E731
    monkeypatch.setattr(doctor_module, "_version", find)
    return {finding.subject: finding for finding in doctor_module._findings(build=False)}


def test_versions_that_were_not_tried_are_named(monkeypatch, tmp_path):
    versions = {
        "opensmd": "0.1.0",
        "torch": "2.8.0+cpu",
        "tensorflow": "2.99.0",
        "keras": "3.5.0",
        "tf-keras": "2.15.1",
    }
    found = _findings(monkeypatch, tmp_path, versions)
    assert (found["PyTorch"].state, found["PyTorch"].text) == ("!!", "2.8.0+cpu is too old")
    assert "pip install 'torch>=2.9'" in found["PyTorch"].remedy
    assert found["TensorFlow"].state == "--"
    assert "newer than the tested versions" in found["TensorFlow"].text
    assert found["Keras"].state == "ok"
    assert found["tf_keras"].state == "!!"


def test_a_missing_compiler_is_no_problem_where_all_shims_are_there(monkeypatch, tmp_path):
    versions = {"opensmd": "0.1.0", "torch": "2.15.0+cu130"}
    found = _findings(monkeypatch, tmp_path, versions, ["torch-2.15.0"])
    assert found["PyTorch shim"].state == "ok"
    assert found["C++ compiler"].state == "--"
    assert found["C++ compiler"].remedy == ""


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m smdistributed doctor | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("ok  system")
    assert done.stderr == ""


def test_no_framework_is_imported():
    code = (
        "import sys; from smdistributed._launch import doctor; doctor.main([]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
