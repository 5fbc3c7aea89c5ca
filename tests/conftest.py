"""For all tests."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import forks, launchers

# A script's `&` and `nohup` make pytest ignore these, and what a test starts would ignore them too, although tests send
# them. A handler that does nothing is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


#: Where the workers of pytest-xdist find the folder of their locks.
_LOCKS = "PYTEST_LOCKS_OF_WORKERS"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make matrix` uses, which runs for hours beside other work."""
    parser.addoption("--patience", type=float, default=1.0, help="multiply the time limits of tests by this")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Multiplies the tests' own time limits; those of their jobs follow in the harness."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        if marker and forks.patience != 1.0:
            item.add_marker(pytest.mark.timeout(marker.args[0] * forks.patience), append=False)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folder of the locks, before the workers are started."""
    forks.patience = config.getoption("patience")
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="smd-locks-")
        config.add_cleanup(folder.cleanup)
        os.environ[_LOCKS] = folder.name


def _has_devices() -> bool:
    # It imports torch, which other tests may not need.
    from support import devices

    return devices.NUM_DEVICES > 0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Runs a test that is marked `alone` while the other workers of pytest-xdist run none.

    It comes before pytest-timeout, so that waiting for the other workers is not time of the test.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    folder = Path(os.environ[_LOCKS])
    alone = item.get_closest_marker("alone") or (item.path.parent.name == "gpu" and _has_devices())
    with (folder / "running").open("w") as running:
        # A test that waits to be alone keeps the entrance, or the others' tests would follow one another without a gap.
        with (folder / "entrance").open("w") as entrance:
            fcntl.flock(entrance, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            # Not by closing the file: a process that the test forked may have it open.
            fcntl.flock(running, fcntl.LOCK_UN)


@pytest.fixture(autouse=True)
def _environment_of_the_job() -> Iterator[None]:
    """A test leaves the variables by which a process knows its place in a job as they were: the next test starts jobs."""
    before = dict(launchers.marks_of_a_launcher())
    yield
    after = launchers.marks_of_a_launcher()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before, "the test changed the environment of the process that runs all tests"
