"""The server process of `forks`: imports a module once, then forks a rank for each request.

    python fork_main.py FD MODULE

`FD` is a connection. A request is (folder, output file, working directory, environment variables). Replies are
("started", pid) and ("ended", pid, exit code).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from support import rank_main

#: Modules that the import of a framework leaves out and nearly every rank imports. They take 1.2 s of processor time
#: with PyTorch. With transformers they take 5 s, because it imports the modules of its models on first use.
_ALSO = {
    "torch": ("torch._dynamo",),
    "transformers": (
        "torch._dynamo",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.llama.modeling_llama",
    ),
}
#: From `linux/prctl.h`: sets the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def _serve(connection: Connection) -> tuple[str, str, str, dict[str, str]] | None:
    """Forks ranks until the test ends. Returns the request in each rank, and None in the server."""
    running: dict[int, int] = {}
    server = os.getpid()
    try:
        while True:
            for ready in wait([connection, *running]):
                if ready is not connection:
                    pid = running.pop(ready)
                    os.close(ready)
                    connection.send(("ended", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                    continue
                request = connection.recv()
                pid = os.fork()
                # Each rank leads a process group, so that the test can end it with all its children. Parent and child
                # both call this, because either may run first.
                os.setpgid(pid, pid)
                if pid == 0:
                    _end_with_the_server()
                    for descriptor in (connection.fileno(), *running):
                        os.close(descriptor)
                    return request
                running[os.pidfd_open(pid)] = pid
                connection.send(("started", pid))
    except (EOFError, ConnectionError):
        return None
    finally:
        if os.getpid() == server:
            for pid in running.values():
                os.killpg(pid, signal.SIGKILL)


def _end_with_the_server() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(output: str, directory: str, variables: dict[str, str]) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    with open(output, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _main(descriptor: int, module: str) -> int:
    for name in (module, *_ALSO.get(module, ())):
        importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    if len(tasks) != 1:
        raise RuntimeError(f"`{module}` starts {len(tasks) - 1} threads on import, which forked ranks would lack")
    # Keeps the garbage collector away from objects that exist now: it would write to, and so copy, pages that all ranks
    # share.
    gc.freeze()
    request = _serve(Connection(descriptor))
    if request is None:
        return 0
    folder, output, directory, variables = request
    _become(output, directory, variables)
    sys.argv = [rank_main.__file__, folder]
    return _end(rank_main.main(Path(folder)))


def _end(code: int) -> NoReturn:
    """Ends a rank whose body has returned, like the interpreter does but without the teardown of modules.

    The teardown writes to nearly every page of a framework and so copies the shared pages, which takes 0.4 s of
    processor time.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2]))
