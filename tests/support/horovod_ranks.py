"""Helpers for the ranks of Horovod's tests: start, expected errors, captured output, sessions with other settings."""

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
    """Calls `hvd.init`; returns the framework, Horovod's module for it, the rank and the size."""
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    return importlib.import_module(framework), hvd, hvd.rank(), hvd.size()


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


@contextlib.contextmanager
def standard_error():
    """Captures everything that is written to file descriptor 2, by native code too; yields a function that returns the
    text so far.
    """
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: Path(f"/proc/self/fd/{file.fileno()}").read_text()
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def restarted_with(hvd, **settings):
    """Restarts Horovod with these environment variables; restarts it again with the previous ones afterwards."""
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
