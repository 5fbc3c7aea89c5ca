"""Commands whose output is short."""

from __future__ import annotations

import subprocess


def execute(command: str, env: dict[str, str] | None = None) -> tuple[str, int] | None:
    """What a command of the shell prints, and its exit code; ``None`` if it cannot be run.

    Args:
        command: For the shell.
        env: Its whole environment; by default this process's.
    """
    try:
        done = subprocess.run(
            command, shell=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout, done.returncode
