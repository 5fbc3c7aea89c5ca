"""The scripts that build releases: licenses, symbols of old systems, and the tests of the matrix."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


notices, release = (_module(ROOT / f"release/{name}.py") for name in ("notices", "build"))


@pytest.mark.parametrize(
    ("expression", "licenses"),
    [
        ("MIT OR Apache-2.0", {"Apache-2.0"}),
        ("Unlicense/MIT", {"MIT"}),
        ("Apache-2.0 WITH LLVM-exception OR MIT", {"Apache-2.0 WITH LLVM-exception"}),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", {"Apache-2.0", "Unicode-3.0"}),
        ("MIT OR Apache-2.0 OR LGPL-2.1-or-later", {"Apache-2.0"}),
        ("GPL-3.0 AND MIT OR Zlib", {"Zlib"}),
    ],
)
def test_the_preferred_license_of_an_expression_is_chosen(expression, licenses):
    assert notices.chosen(expression) == licenses


@pytest.mark.parametrize("expression", ["GPL-3.0-only", "MIT AND GPL-3.0-only", "none"])
def test_other_licenses_are_refused(expression):
    with pytest.raises(ValueError, match=r"none of `Apache-2\.0, "):
        notices.chosen(expression)


@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not installed")
def test_the_notices_are_current():
    assert notices.PAGE.read_text() == notices.notices(), "run `make generated`"


def test_one_list_says_which_licenses_are_accepted():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((ROOT / "release/deny.toml").read_text())
    assert set(settings["licenses"]["allow"]) == set(notices.ACCEPTED)


_SOURCE_WITH_NEW_SYMBOLS = """
#include <condition_variable>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <vector>
using namespace std;
mutex gate;
condition_variable changed;
once_flag once;
void *find(const char *name, shared_ptr<int> &shared, size_t count) {
  call_once(once, [] {});
  unique_lock<mutex> held(gate);
  changed.wait_until(held, chrono::steady_clock::now());
  auto other = shared;
  vector<unique_ptr<int[]>> all;
  all.emplace_back(new int[count]);
  return dlsym(dlopen(name, RTLD_NOW), name);
}
"""


@pytest.mark.skipif(not shutil.which("c++") or not shutil.which("objdump"), reason="no compiler is installed")
def test_libraries_in_wheels_need_no_symbols_of_newer_systems(tmp_path):
    source, library = tmp_path / "names.cc", tmp_path / "names.so"
    source.write_text(_SOURCE_WITH_NEW_SYMBOLS)
    command = ["c++", "-O2", "-fPIC", "-shared", source, "-o", library]
    subprocess.run(command, check=True)
    if not release.too_new(library):
        pytest.skip("this system is old enough that no symbol is too new")
    subprocess.run([*command, "-include", ROOT / "release/old_glibc.h"], check=True)
    assert release.too_new(library) == []


@pytest.mark.skipif(importlib.util.find_spec("wheel") is None, reason="the package `wheel` is not installed")
def test_a_wheel_gets_the_libraries_that_were_built_since(tmp_path, monkeypatch):
    content, dist, prebuilt = (tmp_path / name for name in ("content", "dist", "prebuilt"))
    texts = {
        "smdistributed/_prebuilt/older/libsmd_torch.so": "older",
        "opensmd-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: opensmd\nVersion: 1.0\n",
        "opensmd-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp310-abi3-linux_x86_64\n",
        "opensmd-1.0.dist-info/RECORD": "",
    }
    for name, text in texts.items():
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).write_text(text)
    dist.mkdir()
    subprocess.run([sys.executable, "-m", "wheel", "pack", content, "--dest-dir", dist], check=True)
    (dist / "opensmd-1.0.tar.gz").touch()
    (prebuilt / "newer").mkdir(parents=True)
    (prebuilt / "newer/libsmd_torch.so").write_text("newer")
    (prebuilt / "newer/sources").write_text("a digest")
    monkeypatch.setattr(release, "DIST", dist)
    monkeypatch.setattr(release, "PREBUILT", prebuilt)
    wheel, _ = release.add_prebuilt()
    with zipfile.ZipFile(wheel) as file:
        held = [name for name in file.namelist() if "_prebuilt" in name]
        assert held == ["smdistributed/_prebuilt/newer/libsmd_torch.so"]
        assert held[0] in file.read("opensmd-1.0.dist-info/RECORD").decode()


def test_libraries_of_other_or_unknown_sources_are_not_released(tmp_path, monkeypatch):
    for name, digest in [("current", "1a"), ("older", "0f"), ("unknown", None)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "libsmd_torch.so").touch()
        if digest:
            (tmp_path / name / "sources").write_text(digest)
    monkeypatch.setattr(release, "PREBUILT", tmp_path)
    answer = subprocess.CompletedProcess([], 0, stdout="1a 2b\n")
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: answer)
    found = list(release.stale(tmp_path))
    assert [problem.split(":")[0] for problem in found] == [
        "older is of other sources",
        "unknown does not say its sources",
    ]
    assert all("remove the folder, and build it by `make matrix`" in problem for problem in found)


def test_the_tests_of_the_matrix_exist():
    matrix = _module(ROOT / "tests/matrix/matrix.py")
    for test in (test for suite in matrix.SUITES.values() for tests in suite.values() for test in tests):
        path, _, name = test.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert not name or re.sub(r"\[.*", "", name) in functions, test


@pytest.mark.parametrize(
    ("problems", "outcome"),
    [
        (["Failed: Timeout (&gt;120.0s) from pytest-timeout."], "no end"),
        (["RanksFailedError: the job was still running after 170 s", "AssertionError: 1 == 2"], "fails"),
        ([], "fails"),
    ],
)
def test_a_part_that_timed_out_is_reported_as_such(problems, outcome, tmp_path):
    cases = "".join(f"<testcase><failure>{problem}</failure></testcase>" for problem in problems)
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}<testcase/></testsuite></testsuites>")
    assert _module(ROOT / "tests/matrix/matrix.py").verdict(tmp_path / "report.xml") == outcome


def test_the_ends_of_the_support_window():
    matrix = _module(ROOT / "tests/matrix/matrix.py")
    names = list(map(str, matrix.ends()))
    assert names == ["torch==2.15", "torch==2.9", "tensorflow==2.20", "tensorflow==2.16", "keras==3.14", "keras==3.5"]
    assert list(map(str, matrix.with_parts(matrix.ends(), ["collectives", "fit"]))) == names
    assert list(map(str, matrix.with_parts(matrix.ends(), ["collectives"]))) == names[:4]
