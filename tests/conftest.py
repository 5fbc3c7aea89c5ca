"""For all tests."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import forks, launchers

# A script's `&` and `nohup` make pytest ignore these, and what a test starts would ignore them too, although tests send
# them. A handler that does nothing is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


#: Where the workers of pytest-xdist find the folder of their locks.
_LOCKS = "PYTEST_LOCKS_OF_WORKERS"
#: Number of tests that were left out because they are marked `more`.
_LEFT_OUT = pytest.StashKey[int]()
#: Longest time in seconds of a test that is not marked `more`, on two cores, beside another test.
_LONG_SECONDS = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make matrix` uses, which runs for hours beside other work."""
    parser.addoption("--patience", type=float, default=1.0, help="multiply the time limits of tests by this")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiplies the tests' own time limits, those of their jobs follow in the harness; and leaves out those that are marked `more`."""
    _leave_out_more(config, items)
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


def _leave_out_more(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that are marked `more`, unless `-m` or `-k` chooses tests or a test is named by `file::test`."""
    chosen = config.getoption("markexpr") or config.getoption("keyword") or any("::" in each for each in config.args)
    left_out = [] if chosen else [item for item in items if item.get_closest_marker("more")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("more")]
    config.stash[_LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes from a worker of pytest-xdist how many tests it has left out; all workers collect the same ones."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Reports the number of tests that were left out, and tests that take long without the mark that leaves them out."""
    if left_out := config.stash.get(_LEFT_OUT, 0):
        terminalreporter.write_line(f"left out: {left_out} tests that are marked `more`; `make test-more` runs them")
    seconds: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        # Among these are warnings, and tests that were deselected.
        if isinstance(report, pytest.TestReport) and "more" not in report.keywords:
            seconds[report.nodeid] += report.duration
    for name, spent in seconds.most_common():
        if spent <= _LONG_SECONDS:
            break
        terminalreporter.write_line(
            f"long: {name} took {spent:.0f} s, more than {_LONG_SECONDS:.0f}: make it cheaper, or mark it `more` if a "
            "test of its kind remains (docs/contributing/testing.md)"
        )


def _has_devices() -> bool:
    # Imported here, because it imports torch, which other tests may not need.
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
