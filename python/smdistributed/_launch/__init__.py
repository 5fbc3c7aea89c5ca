"""The console scripts. The core does their work; only `smdrun doctor`, which inspects Python's packages, is here."""

from __future__ import annotations

import os
import sys


def smdrun() -> int:
    """Start the ranks of a job on this host; see `smdrun --help`.

    Returns:
        The exit code.
    """
    if sys.argv[1:2] == ["doctor"]:
        from smdistributed._launch import doctor

        return doctor.main(sys.argv[2:])

    from smdistributed import _core

    # The core writes to the file descriptors directly, so Python's buffered output must come first.
    sys.stdout.flush()
    sys.stderr.flush()
    return _core.smdrun(["smdrun", *sys.argv[1:]], sys.executable)


def smddprun() -> int:
    """Run a command in place, for job scripts that have this name of Amazon's launcher before `python`.

    Returns:
        The exit code, if the command cannot be run.
    """
    return _become("smddprun", sys.argv[1:])


def smddpmprun() -> int:
    """Run a command in place, as `smddprun`; the original's options `-i TYPE` and `--allow-bypass` have no effect.

    Returns:
        The exit code, if the command cannot be run.
    """
    words = sys.argv[1:]
    while words[:1] in (["-i"], ["--allow-bypass"]):
        words = words[2:] if words[0] == "-i" else words[1:]
    return _become("smddpmprun", words)


def _become(name: str, command: list[str]) -> int:
    if not command or command[0].startswith("-"):
        print(f"usage: {name} COMMAND [ARGS]...", file=sys.stderr)
        return 2
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{name}: cannot run `{command[0]}`: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
