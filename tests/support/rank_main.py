"""The program of each rank of a test: calls the test's body and writes its result to the job's folder."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

#: Exit code if the test itself is broken, in contrast to a test that fails.
BROKEN = 70
#: Seconds before the job's deadline at which stacks are printed, so that the harness still reads them.
_STACKS_BEFORE_DEADLINE = 3.0


def announce(name: str) -> None:
    """Reports to the test that this point was reached; `Job.wait_for` waits for it."""
    folder = Path(os.environ["SMD_TEST_FOLDER"])
    (folder / f"event.{name}").touch()


def this_rank() -> int:
    """Returns the rank from the launcher's variables, without the library under test."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def main(folder: Path) -> int:
    """Calls the body of the job in `folder` as this rank."""
    rank = this_rank()
    _write(folder / f"{rank}.pid", str(os.getpid()).encode())
    result = folder / f"{rank}.result"
    try:
        file, name, timeout, pickled_args = pickle.loads((folder / "call").read_bytes())
        faulthandler.dump_traceback_later(max(1.0, timeout - _STACKS_BEFORE_DEADLINE))
        spec = importlib.util.spec_from_file_location("test_body", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules["test_body"] = module
        spec.loader.exec_module(module)
        body = getattr(module, name)
        args = pickle.loads(pickled_args)
    except BaseException:
        _write(result, pickle.dumps(("broken", time.monotonic(), traceback.format_exc())))
        raise SystemExit(BROKEN) from None
    try:
        value = body(*args)
    except BaseException as error:
        types = tuple(kind.__name__ for kind in type(error).__mro__)
        text = "".join(traceback.format_exception_only(error)).strip()
        _write(result, pickle.dumps(("error", time.monotonic(), text, types)))
        raise
    _write(result, _pickled(value))
    _end_gloo()
    return 0


def _end_gloo() -> None:
    """Joins the threads of gloo if the body has left a process group. A gloo thread that still drops tensors when the
    interpreter ends aborts the process ("terminate called without an active exception"). Scripts that use PyTorch alone
    abort as well.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    # Reference cycles that the body left may hold its group.
    gc.collect()
    dist.destroy_process_group()


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(("value", time.monotonic(), value))
    except Exception as error:
        return pickle.dumps(("broken", time.monotonic(), f"the result cannot be pickled: {error}"))


def _write(path: Path, content: bytes) -> None:
    """Writes atomically, because the test may read at any time."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)


if __name__ == "__main__":
    # A body that imports this module must get this instance.
    sys.modules["support.rank_main"] = sys.modules["__main__"]
    sys.exit(main(Path(sys.argv[1])))
