"""Jobs of two users, and two of one user, on one host at the same time; and where the secret of a job can be read."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from functools import partial

import pytest

from horovod.runner.common.util import codec
from support import more
from support.launchers import clean_environment, command
from support.neighbours import NOBODY, Job, Watch, as_user, meet, missing, private_folder, secrets_in

pytestmark = [pytest.mark.timeout(200), pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def start(launcher, user):
    words = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable]
    words = words if launcher == "horovodrun" else command(launcher, 2, [])
    if launcher == "mpirun":
        # The folder for its sessions would be root's.
        at = words.index("orte_tmpdir_base")
        words = [*words[: at - 1], *words[at + 2 :]]
        # mpirun asks `access` about the program, which disregards the capability; `env` disregards nothing.
        words.insert(len(words) - 1, "env")
    return Job(user, [*as_user(user), *words], clean_environment())


@pytest.mark.parametrize("second", [0, NOBODY], ids=["one user", "two users"])
@pytest.mark.parametrize("launcher", ["smdrun", more("torchrun"), more("mpirun"), more("horovodrun")])
def test_two_jobs_do_not_disturb_each_other_and_keep_their_secrets(launcher, second):
    with Watch() as watch:
        found, outputs = meet(watch, [partial(start, launcher, user) for user in (0, second)])
    if launcher in ("smdrun", "horovodrun"):
        # The other launchers pass no secret in a variable.
        assert all(found), "each job has a secret"
        assert not found[0] & found[1]
    assert watch.places(outputs) == []


def test_the_watch_finds_secrets():
    """In a file that all may read, in a file of the engine, in a command line, in the variables of nobody's process, in an output."""
    key = secrets.token_bytes(32)
    own = secrets_in({"_HOROVOD_SECRET_KEY": str(codec.dumps_base64(key)), "SMD_SECRET": "a" * 32, "HOME": "b" * 32})
    assert {key, key.hex().encode(), b"a" * 32} <= own
    assert b"b" * 32 not in own
    engine, shared = private_folder(0), private_folder(0)
    process = subprocess.Popen([*as_user(NOBODY, reads_all=False), "sleep", "60"], env={"SECRET": key.hex()})
    try:
        (engine / "log").write_bytes(b"key " + key)
        shared.chmod(0o755)
        for name, mode in (("open", 0o644), ("closed", 0o600)):
            (shared / name).write_text(key.hex())
            (shared / name).chmod(mode)
        with Watch(engine) as watch:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(1)", key.hex()], check=True)
            watch.look([(0, own)])
        places = watch.places(["nothing", f"the key is {key.hex()}"])
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(engine)
        shutil.rmtree(shared)
    command_line = next(place for place in places if place.startswith("the command"))
    expected = [str(engine / "log"), str(shared / "open"), "`ps` of nobody: a secret of user 0", "the output of job 1"]
    assert places == sorted([*expected, command_line])
