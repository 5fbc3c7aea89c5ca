"""What the jobs of tests of Horovod share: how a rank begins, errors that it expects, and worlds with other settings."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from pathlib import Path

import pytest

ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def start(framework):
    """Calls `init`: the framework, Horovod's module for it, this rank and the number of ranks."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    return importlib.import_module(framework), hvd, hvd.rank(), hvd.size()


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


@contextlib.contextmanager
def standard_error():
    """What is written there, by the core as well: a function that gives it."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: Path(f"/proc/self/fd/{file.fileno()}").read_text()
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def another_world(hvd, **settings):
    """One with these settings; then the one as before."""
    hvd.shutdown()
    os.environ.update(settings)
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        for name in settings:
            del os.environ[name]
        hvd.init()
