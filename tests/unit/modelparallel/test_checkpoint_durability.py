"""After a durable save, the directory entries of everything that it created are on the disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

#: An `fsync` that records the paths of synchronized files and folders; preloaded in place of the C library's.
_RECORDER = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/syscall.h>

int fsync(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        FILE *record = fopen(getenv("RECORD"), "a");
        fprintf(record, "%s\n", path);
        fclose(record);
    }
    return (int) syscall(SYS_fsync, fd);
}
"""
_SAVE = """
import sys
from smdistributed import _core

_core.CheckpointSaver(sys.argv[1], 0, 1, 1, True, None, 30.0).save("one", 0, 1, "{}", "0", [], False)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_save_synchronizes_the_parent_folders_that_it_creates(tmp_path):
    (tmp_path / "recorder.c").write_text(_RECORDER)
    recorder = tmp_path / "recorder.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", recorder, tmp_path / "recorder.c"], check=True, timeout=60)
    record, folder = tmp_path / "record", tmp_path / "new" / "deep" / "checkpoints"
    env = os.environ | {"LD_PRELOAD": str(recorder), "RECORD": str(record)}
    subprocess.run([sys.executable, "-c", _SAVE, folder], env=env, check=True, timeout=60)
    assert (folder / "one").is_dir()
    synced = set(record.read_text().splitlines())
    # A folder's name is an entry of its parent, so the parent must be synchronized as well.
    assert {str(each) for each in (tmp_path, tmp_path / "new", tmp_path / "new" / "deep", folder)} <= synced, synced
