"""Waits for the end of processes whose output goes to a pipe."""

from __future__ import annotations

import subprocess

from support import forks


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Waits for the end of a process; returns its standard output.

    Args:
        process: A process whose standard output is a pipe of text.
        seconds: The longest wait on an idle machine; `--patience` multiplies it.

    Raises:
        AssertionError: The process has not ended in time, or with an exit status other than 0. The text contains what it has printed.
    """
    seconds *= forks.patience
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        # Bytes, even of a pipe of text. The pipe is not read to its end: children of the process may hold it open.
        printed = (error.output or b"").decode(errors="replace")
        raise AssertionError(f"{process.args} still runs after {seconds:.0f} s. It has printed:\n{printed}") from None
    assert process.returncode == 0, output
    return output
