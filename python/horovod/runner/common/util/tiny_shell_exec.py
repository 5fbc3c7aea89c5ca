"""Commands with a short output."""

from __future__ import annotations

import subprocess


def execute(command: str, env: dict[str, str] | None = None) -> tuple[str, int] | None:
    """Run a command of the shell.

    Args:
        command: The command.
        env: Its whole environment; by default this process's.

    Returns:
        The command's output and its exit code; ``None`` if the command cannot be run.
    """
    try:
        done = subprocess.run(
            command, shell=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout, done.returncode
