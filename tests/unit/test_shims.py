"""Finding, building and caching the shims, with a script in place of the compiler. Other tests use the real one."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smdistributed._common import shims

FRAMEWORK = shims.Framework(
    name="torch",
    title="PyTorch",
    version="9.9",
    folder="torch_ext",
    compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=1", "-isystem", "/somewhere/include"),
    link_flags=("-lc10",),
)

# The compiler: logs its arguments, runs `body`, and writes the output file.
COMPILER = """#!{python}
import os, sys, time
output = sys.argv[sys.argv.index("-o") + 1]
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
{body}
with open(output, "w") as file:
    file.write("library")
"""

BUILD = """
import sys, pickle
from smdistributed._common import shims
print(shims.ensure(pickle.loads(bytes.fromhex(sys.argv[1]))))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SMD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shims, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Makes a compiler that runs `body`; returns the path of its log."""

    def make(body=""):
        path, log = tmp_path / "compiler", tmp_path / "log"
        path.write_text(COMPILER.format(python=sys.executable, log=str(log), body=body))
        path.chmod(0o755)
        log.write_text("")
        monkeypatch.setenv("CXX", str(path))
        return log

    return make


def _links(log):
    return sum("-shared" in line for line in log.read_text().splitlines())


def _start_build(before=()):
    return subprocess.Popen(
        [*before, sys.executable, "-c", BUILD, pickle.dumps(FRAMEWORK).hex()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_shim_is_built_once_and_the_build_is_logged(cache, compiler, capsys):
    log = compiler()
    path = shims.ensure(FRAMEWORK)
    assert path == cache / FRAMEWORK.key / "libsmd_torch.so"
    assert path.read_text() == "library"
    runs = log.read_text().splitlines()
    assert len(runs) == 4, "expected three compilations and one link"
    assert all("-D_GLIBCXX_USE_CXX11_ABI=1" in run for run in runs[:3])
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 2
    assert messages[0].startswith("smdistributed: building the PyTorch 9.9 shim, once, in ")
    assert shims.ensure(FRAMEWORK) == path
    assert len(log.read_text().splitlines()) == 4
    assert capsys.readouterr().err == ""
    assert [entry.name for entry in sorted(path.parent.iterdir())] == [".lock", "libsmd_torch.so"]


def test_a_prebuilt_shim_needs_no_cache_and_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    path = shims.PREBUILT / FRAMEWORK.prebuilt_key / FRAMEWORK.library
    path.parent.mkdir(parents=True)
    path.write_text("library")
    assert shims.ensure(FRAMEWORK) == path
    assert not cache.exists()


def test_the_key_changes_with_what_the_shim_depends_on(monkeypatch):
    key = FRAMEWORK.key
    assert "9.9" in key
    assert replace(FRAMEWORK, compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=1", "-isystem", "/elsewhere")).key == key
    others = [
        replace(FRAMEWORK, version="10.0").key,
        replace(FRAMEWORK, compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=0",)).key,
        replace(FRAMEWORK, name="tensorflow", folder="tf_ops").key,
    ]
    sources = shims._core.shim_sources()
    for name, same in [("torch_ext/kernels.cc", False), ("include/smd/status.h", False), ("tf_ops/kernels.cc", True)]:
        with monkeypatch.context() as patch:
            patch.setattr(shims._core, "shim_sources", lambda name=name: sources | {name: sources[name] + "\n"})
            assert (FRAMEWORK.key == key) is same, name
    with monkeypatch.context() as patch:
        patch.setattr(shims._core, "__version__", "99")
        others.append(FRAMEWORK.key)
    assert len({key, *others}) == 1 + len(others)


def test_builds_of_one_version_share_a_shim():
    keys = {replace(FRAMEWORK, version=version).key for version in ("9.9", "9.9+cpu", "9.9+cu130")}
    assert keys == {FRAMEWORK.key}


def _prebuilt_for(version):
    path = shims.PREBUILT / replace(FRAMEWORK, version=version).prebuilt_key / FRAMEWORK.library
    path.parent.mkdir(parents=True)
    path.write_text(f"prebuilt for {version}")
    return path


@pytest.mark.parametrize("version", ["9.9.0", "9.9.1", "9.9.12+cpu", "9.9.1+cu130", "9.9.1.post2"])
def test_a_prebuilt_shim_serves_all_patch_releases(cache, monkeypatch, version):
    path = _prebuilt_for("9.9.0")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert shims.ensure(replace(FRAMEWORK, version=version)) == path


@pytest.mark.parametrize(
    "other",
    [
        {"version": "9.10.0"},
        {"version": "9.8.1"},
        {"version": "10.9.0"},
        {"version": "9.9.1a0+git1234"},
        {"version": "9.9.0.dev20260101"},
        {"version": "9.9.0rc1"},
        {"version": "9.9.1+mine"},
        {"version": "9.9.1", "compile_flags": ("-D_GLIBCXX_USE_CXX11_ABI=0",)},
        {"version": "9.9.1", "name": "tensorflow", "folder": "tf_ops"},
    ],
    ids=lambda other: "-".join(map(str, other.values())),
)
def test_a_prebuilt_shim_serves_no_other_version_or_framework(cache, compiler, other):
    compiler()
    _prebuilt_for("9.9.0")
    assert shims.ensure(replace(FRAMEWORK, **other)).is_relative_to(cache)


def _load_failing(path):
    if Path(path).is_relative_to(shims.PREBUILT):
        raise OSError("undefined symbol: gone")
    return Path(path).read_text()


def test_a_patch_release_that_broke_the_abi_gets_a_shim_of_its_own(cache, compiler, capsys):
    compiler()
    _prebuilt_for("9.9.0")
    framework = replace(FRAMEWORK, version="9.9.1")
    assert shims._load(framework, _load_failing) == "library"
    assert "prebuilt shim for PyTorch 9.9 does not load with 9.9.1 here" in capsys.readouterr().err
    assert (cache / framework.key / framework.library).is_file()
    assert framework.key != replace(FRAMEWORK, version="9.9.0").key, "it must be built for the exact version"


def test_the_error_of_a_broken_abi_without_a_compiler_names_remedies(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    _prebuilt_for("9.9.0")
    with pytest.raises(shims.ShimError) as caught:
        shims._load(replace(FRAMEWORK, version="9.9.1"), _load_failing)
    text = str(caught.value)
    for part in ("does not load with 9.9.1", "undefined symbol: gone", "another patch release of PyTorch 9.9", "g++"):
        assert part in text


def test_only_gcc_gets_options_of_gcc(tmp_path):
    for text, count in [("g++ 12\nCopyright (C) Free Software Foundation, Inc.", 5), ("clang version 19", 1)]:
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\necho '{text}'\n")
        compiler.chmod(0o755)
        assert len(shims._optimization_flags([str(compiler)])) == count


def test_another_version_builds_again(cache, compiler):
    log = compiler()
    first = shims.ensure(FRAMEWORK)
    second = shims.ensure(replace(FRAMEWORK, version="10.0"))
    assert first != second
    assert first.exists()
    assert _links(log) == 2


def test_a_missing_compiler_is_one_clear_error(cache, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(shims.ShimError) as caught:
        shims.ensure(FRAMEWORK)
    text = str(caught.value)
    assert text.startswith("no prebuilt shim for PyTorch 9.9, and no C++ compiler to build one: install g++")
    assert "CXX" in text
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    with pytest.raises(shims.ShimError, match="/nonexistent/g\\+\\+"):
        shims.ensure(FRAMEWORK)


def test_a_failed_build_shows_the_first_errors_and_leaves_nothing(cache, compiler):
    compiler(
        'print("In file included from x:"); [print(f"y.cc:{i}: error: number {i}") for i in range(99)]; sys.exit(3)'
    )
    with pytest.raises(shims.ShimError, match=r"the PyTorch 9\.9 shim does not compile \(exit code 3\)") as caught:
        shims.ensure(FRAMEWORK)
    text = str(caught.value)
    assert "y.cc:0: error: number 0" in text
    assert "number 50" not in text
    assert "\ncommand: " in text
    assert sorted(entry.name for entry in (cache / FRAMEWORK.key).iterdir()) == [".lock", "failure"]
    compiler()
    assert shims.ensure(FRAMEWORK).exists()
    assert sorted(entry.name for entry in (cache / FRAMEWORK.key).iterdir()) == [".lock", FRAMEWORK.library]


def test_ranks_that_start_at_once_share_a_failure(cache, compiler):
    log = compiler('time.sleep(1); print("y.cc:1: error: this one"); sys.exit(3)')
    builds = [_start_build() for _ in range(4)]
    errors = [build.communicate(timeout=60)[1] for build in builds]
    assert all("y.cc:1: error: this one" in error for error in errors)
    assert sum("building" in error for error in errors) == 1
    assert len(log.read_text().splitlines()) == 3, "expected three compilations, once"
    # A failure is shared within a job only: a later job tries again.
    log = compiler()
    assert _start_build().wait(timeout=60) == 0
    assert _links(log) == 1


def test_headers_that_need_a_newer_standard_are_compiled_with_it(cache, compiler):
    log = compiler('if "-std=c++17" in sys.argv: print("x.h:1: error: #error C++20 or later is required"); sys.exit(1)')
    assert shims.ensure(FRAMEWORK).exists()
    assert sum("-std=c++20" in run for run in log.read_text().splitlines()) == 3


def test_headers_that_do_not_compile_with_fewer_includes_are_compiled_with_all(cache, compiler, capfd):
    narrow = replace(FRAMEWORK, narrow_flags=("-Inarrow",))
    log = compiler('if "-Inarrow" in sys.argv: print("x.h:1: error: no member of at"); sys.exit(1)')
    assert shims.ensure(narrow).exists()
    assert sum("-Inarrow" in run for run in log.read_text().splitlines()) == 3
    assert sum("-c" in run.split() and "-Inarrow" not in run for run in log.read_text().splitlines()) == 3
    assert capfd.readouterr().err.count("compiled again with all headers, which takes longer: ") == 1


def test_the_standard_is_read_from_the_headers(cache, compiler, tmp_path):
    header = tmp_path / "ATen.h"
    header.write_text("#pragma once\n#error C++20 or later compatible compiler is required to use ATen.\n")
    assert shims._wanted_standard(header) == "c++20"
    log = compiler()
    shims.ensure(replace(FRAMEWORK, standard=shims._wanted_standard(header)))
    assert sum("-std=c++20" in run for run in log.read_text().splitlines()) == 3
    header.write_text("#pragma once\n")
    assert shims._wanted_standard(header) == "c++17"


def test_ranks_that_start_at_once_build_once(cache, compiler):
    log = compiler("time.sleep(0.3)")
    builds = [_start_build() for _ in range(4)]
    outputs = [build.communicate(timeout=60) for build in builds]
    assert {output.strip() for output, _ in outputs} == {str(cache / FRAMEWORK.key / FRAMEWORK.library)}
    assert _links(log) == 1
    assert sum("building" in error for _, error in outputs) == 1


def test_a_wait_for_another_builder_is_logged_and_times_out(cache, compiler, monkeypatch, capsys):
    log = compiler("time.sleep(20)")
    build = _start_build()
    deadline = time.monotonic() + 30
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(shims, "_SILENT_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(shims, "_LONGEST_WAIT_SECONDS", 0.5)
    with pytest.raises(
        shims.ShimError, match=f"after waiting 1 s for process {build.pid}, which builds the PyTorch shim in"
    ):
        shims.ensure(FRAMEWORK)
    assert capsys.readouterr().err.startswith(f"smdistributed: waiting for process {build.pid}, which builds")
    build.kill()
    build.communicate()
    compiler()
    assert shims.ensure(FRAMEWORK).exists()


def test_a_killed_builder_leaves_no_partial_library(cache, compiler):
    log = compiler('open(output, "w").write("lib"); time.sleep(20 if "-shared" in sys.argv else 0)')
    build = _start_build()
    deadline = time.monotonic() + 30
    while not _links(log) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(build.pid, signal.SIGKILL)
    build.communicate()
    folder = cache / FRAMEWORK.key
    assert not (folder / FRAMEWORK.library).exists()
    assert list(folder.glob("build-*"))
    compiler()
    assert shims.ensure(FRAMEWORK).read_text() == "library"
    assert not list(folder.glob("build-*"))


def test_a_cache_that_cannot_be_created_is_replaced(cache, compiler, monkeypatch, tmp_path, capsys):
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SMD_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    path = shims.ensure(FRAMEWORK)
    assert path == tmp_path / "tmp" / f"opensmd-{os.getuid()}" / FRAMEWORK.key / FRAMEWORK.library
    assert "cannot be created" in capsys.readouterr().err
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    with pytest.raises(shims.ShimError, match=r"no folder for built libraries .* set `SMD_CACHE_DIR` to one"):
        shims.ensure(FRAMEWORK)


def test_a_user_without_a_home_can_use_prebuilt_shims(tmp_path, monkeypatch):
    monkeypatch.delenv("SMD_CACHE_DIR", raising=False)
    monkeypatch.setattr(shims, "PREBUILT", tmp_path)
    monkeypatch.setattr(shims._core, "cache_folder", None)
    path = tmp_path / FRAMEWORK.prebuilt_key / FRAMEWORK.library
    path.parent.mkdir(parents=True)
    path.write_text("library")
    assert shims.ensure(FRAMEWORK) == path


def _with_mount(script):
    """Returns a command prefix that runs `script`, which mounts file systems, in a mount namespace of its own."""
    command = ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount file systems")
    return command


def _mounted(folder, options):
    """Like `_with_mount`, with a tmpfs in `folder`."""
    folder.mkdir()
    return _with_mount(f"mount -t tmpfs -o {options} tmpfs '{folder}'")


def test_a_user_without_a_home_builds_among_temporary_files(compiler, monkeypatch, tmp_path):
    compiler()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("SMD_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    # nsswitch.conf is hidden too, because it may name other sources of users than passwd.
    unknown = " && ".join(f"mount --bind /dev/null /etc/{name}" for name in ("passwd", "nsswitch.conf"))
    found, messages = _start_build(_with_mount(unknown)).communicate(timeout=60)
    assert found.strip() == str(tmp_path / "tmp" / f"opensmd-{os.getuid()}" / FRAMEWORK.key / FRAMEWORK.library), (
        messages
    )
    assert "this user has no home folder" in messages


def test_a_cache_on_a_noexec_file_system_is_replaced(cache, compiler, monkeypatch, tmp_path):
    compiler()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    found, messages = _start_build(_mounted(cache, "noexec,mode=700")).communicate(timeout=60)
    assert found.strip() == str(tmp_path / "tmp" / f"opensmd-{os.getuid()}" / FRAMEWORK.key / FRAMEWORK.library), (
        messages
    )
    assert "is on a file system from which no library is loaded (it is mounted `noexec`)" in messages


def test_a_read_only_cache_is_replaced(cache, compiler, monkeypatch, tmp_path):
    compiler()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    found, messages = _start_build(_mounted(cache, "ro")).communicate(timeout=60)
    assert found.strip() == str(tmp_path / "tmp" / f"opensmd-{os.getuid()}" / FRAMEWORK.key / FRAMEWORK.library), (
        messages
    )
    assert "cannot be created: Read-only file system" in messages


@pytest.mark.parametrize("size", ["64k", "4m"])
def test_a_full_disk_is_reported(cache, compiler, size):
    # With 64k there is no room for the sources, with 4m none for the compiler's output.
    compiler('open(output, "wb").write(bytes(8 << 20))')
    build = _start_build(_mounted(cache, f"size={size},mode=700"))
    _, messages = build.communicate(timeout=60)
    assert build.returncode == 1
    last = messages.splitlines()[-1]
    assert "ShimError: cannot build the PyTorch shim in" in last
    assert "No space left on device" in last
    assert "set SMD_CACHE_DIR to a writable folder" in last


def test_a_cache_that_others_can_write_to_is_not_used(cache, compiler, monkeypatch, tmp_path, capsys):
    log = compiler()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    existing = cache / FRAMEWORK.key / FRAMEWORK.library
    existing.parent.mkdir(parents=True)
    existing.write_text("planted")
    cache.chmod(0o777)
    path = shims.ensure(FRAMEWORK)
    assert path == tmp_path / "tmp" / f"opensmd-{os.getuid()}" / FRAMEWORK.key / FRAMEWORK.library
    assert path.read_text() == "library"
    assert shims.ensure(FRAMEWORK) == path
    messages = capsys.readouterr().err
    assert messages.count("are not loaded") == 1, messages
    assert f"`{cache}` can be written by all users (mode 777)" in messages
    assert "or set `SMD_CACHE_DIR` to a folder that only you can write to" in messages
    assert _links(log) == 1
    # The same check applies to the replacement folder.
    path.parent.parent.chmod(0o777)
    with pytest.raises(shims.ShimError, match="no folder for built libraries that only this user can write to"):
        shims.ensure(FRAMEWORK)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("owned", ["file", "folder"])
def test_libraries_of_another_user_are_not_loaded(cache, compiler, monkeypatch, tmp_path, capsys, owned):
    compiler()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    existing = cache / FRAMEWORK.key / FRAMEWORK.library
    existing.parent.mkdir(parents=True)
    existing.write_text("planted")
    os.chown(existing if owned == "file" else existing.parent, 65534, 65534)
    path = shims.ensure(FRAMEWORK)
    assert path.read_text() == "library"
    assert (path == existing) is (owned == "file"), "a file must be replaced, a folder must be left alone"
    assert "belongs to user 65534, not to user 0 or root" in capsys.readouterr().err


# Imports as root before it changes the user, since other users may not be able to read the interpreter's files.
BUILD_AS = """
import os, sys, pickle
from smdistributed._common import shims
user, framework = int(sys.argv[1]), pickle.loads(bytes.fromhex(sys.argv[2]))
os.chdir("/")
os.setgroups([]), os.setresgid(user, user, user), os.setresuid(user, user, user)
print(shims.ensure(framework))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run commands as other users")
def test_two_users_of_one_cache_share_nothing(monkeypatch):
    users, versions = (65533, 65534), ("9.9", "10.0")
    with tempfile.TemporaryDirectory(prefix="smd-users-", dir="/tmp") as shared:
        os.chmod(shared, 0o1777)
        compiler = Path(shared) / "compiler"
        compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nid -u >"$2"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("SMD_CACHE_DIR", f"{shared}/cache")
        monkeypatch.setenv("TMPDIR", shared)
        # The second round finds the shims that the first has built.
        found = [
            {(user, version): _built_as(user, version) for user in users for version in versions} for _ in range(2)
        ]
        assert found[0] == found[1]
        assert len(set(found[0].values())) == 4
        for (user, _), path in found[0].items():
            assert path.read_text() == f"{user}\n"
            for place in (path, path.parent, path.parent.parent):
                status = place.stat()
                assert status.st_uid == user, place
                assert status.st_mode & 0o022 == 0, place


def _built_as(user, version):
    framework = pickle.dumps(replace(FRAMEWORK, version=version)).hex()
    command = [sys.executable, "-c", BUILD_AS, str(user), framework]
    return Path(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip())


def test_the_command_builds_into_the_package(cache, compiler, monkeypatch, capsys, tmp_path):
    compiler()
    monkeypatch.setitem(shims.FRAMEWORKS, "torch", lambda: FRAMEWORK)
    monkeypatch.setattr(sys, "argv", ["shims", "torch", "--into", str(tmp_path / "prebuilt")])
    shims.main()
    path = tmp_path / "prebuilt" / FRAMEWORK.prebuilt_key / FRAMEWORK.library
    assert capsys.readouterr().out.strip() == str(path)
    assert shims.ensure(FRAMEWORK) == path
