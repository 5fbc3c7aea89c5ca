"""`smdrun doctor`."""

from __future__ import annotations

import os
import re
import subprocess
import sys


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


def test_a_missing_compiler_is_a_problem():
    done = doctor(CXX="/no/such/compiler")
    assert done.returncode == 1
    assert re.search(
        r"!!  C\+\+ compiler +`/no/such/compiler` \(CXX\) is not there\n +-> .*apt-get install", done.stdout
    )


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    done = doctor(SMD_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert "-> set SMD_CACHE_DIR" in done.stdout


def test_no_framework_is_imported():
    code = (
        "import sys; from smdistributed._launch import doctor; doctor.main([]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
