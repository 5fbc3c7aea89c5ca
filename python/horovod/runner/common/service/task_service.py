"""What a task of a launcher does for it: it runs a command."""

from __future__ import annotations

import os
import threading
from typing import Any

from horovod.runner.common.util import network, safe_shell_exec
from horovod.runner.common.util.timeout import Timeout
from horovod.runner.util.threads import in_thread


class RunCommandRequest:
    """Run this.

    Args:
        command: For the shell.
        env: Variables beside the task's own.
    """

    def __init__(self, command: str, env: dict[str, str]) -> None:
        self.command = command
        self.env = env


class AbortCommandRequest:
    """End it."""


class CommandExitCodeRequest:
    """How did it end?

    Args:
        wait: Wait for its end for as long, in seconds.
    """

    def __init__(self, wait: float = 0) -> None:
        self.wait = wait


class CommandExitCodeResponse:
    """So.

    Args:
        terminated: It has ended.
        exit_code: With this; 128 and the signal if one ended it.
    """

    def __init__(self, terminated: bool, exit_code: int | None) -> None:
        self.terminated = terminated
        self.exit_code = exit_code


class NotifyInitialRegistrationCompleteRequest:
    """All tasks are there."""


class RegisterCodeResultRequest:
    """What a function has returned."""

    def __init__(self, result: Any) -> None:
        self.result = result


class BasicTaskService(network.BasicService):
    """Runs one command at a time.

    Args:
        name: The service's name.
        index: The task's number.
        key: The secret.
        nics: Interfaces to be found at; all by default.
        command_env: The environment of commands, without what a request adds; by default this process's.
        verbose: Accepted.
    """

    def __init__(
        self,
        name: str,
        index: int,
        key: bytes,
        nics: Any = None,
        command_env: dict[str, str] | None = None,
        verbose: int = 0,
    ) -> None:
        self._index = index
        self._environment = command_env
        self._changed = threading.Condition()
        self._complete = False
        self._runs = False
        self._exit_code: int | None = None
        self._abort = threading.Event()
        self._result: Any = None
        super().__init__(name, key, nics)

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        if isinstance(req, RunCommandRequest):
            self._start(req)
        elif isinstance(req, AbortCommandRequest):
            self._abort.set()
        elif isinstance(req, CommandExitCodeRequest):
            with self._changed:
                self._changed.wait_for(lambda: self._exit_code is not None, req.wait)
                return CommandExitCodeResponse(self._exit_code is not None, self._exit_code)
        elif isinstance(req, NotifyInitialRegistrationCompleteRequest):
            with self._changed:
                self._complete = True
                self._changed.notify_all()
        elif isinstance(req, RegisterCodeResultRequest):
            self._result = req.result
        else:
            return super()._handle(req, client_address)
        return network.AckResponse()

    def _start(self, req: RunCommandRequest) -> None:
        with self._changed:
            if self._runs:
                raise RuntimeError(f"task {self._index} runs a command already")
            self._runs, self._exit_code = True, None
            self._abort.clear()
            self._changed.notify_all()
        in_thread(self._run, (req,))

    def _run(self, req: RunCommandRequest) -> None:
        own = os.environ if self._environment is None else self._environment
        code = 1
        try:
            code = safe_shell_exec.execute(req.command, env={**own, **req.env}, events=[self._abort])
        finally:
            with self._changed:
                self._runs, self._exit_code = False, code
                self._changed.notify_all()

    def fn_result(self) -> Any:
        """What :meth:`BasicTaskClient.register_code_result` was told last."""
        return self._result

    def command_exit_code(self) -> int | None:
        """How the command ended; ``None`` before."""
        return self._exit_code

    def wait_for_initial_registration(self, timeout: Timeout) -> None:
        """Waits until all tasks are there.

        Raises:
            TimeoutException: It took longer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._complete, timeout.remaining())
            if not self._complete:
                timeout.check_time_out_for("tasks to start")

    def wait_for_command_start(self, timeout: Timeout) -> None:
        """Waits for a command.

        Raises:
            TimeoutException: It took longer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._runs or self._exit_code is not None, timeout.remaining())
            if not self._runs and self._exit_code is None:
                timeout.check_time_out_for("command to run")

    def wait_for_command_termination(self) -> int:
        """Waits for its end, and returns its exit code."""
        with self._changed:
            self._changed.wait_for(lambda: self._exit_code is not None)
            return self._exit_code or 0


class BasicTaskClient(network.BasicClient):
    """Tells a task what to do. See :class:`~horovod.runner.common.util.network.BasicClient`."""

    def run_command(self, command: str, env: dict[str, str]) -> None:
        """Starts a command of the shell.

        Raises:
            RuntimeError: One runs already.
        """
        self._send(RunCommandRequest(command, env))

    def abort_command(self) -> None:
        """Ends it."""
        self._send(AbortCommandRequest())

    def command_result(self) -> tuple[bool, int | None]:
        """Whether it has ended, and its exit code."""
        answer = self._send(CommandExitCodeRequest())
        return answer.terminated, answer.exit_code

    def wait_for_command_exit_code(self, delay: float = 10.0) -> int:
        """Waits for its end, and returns its exit code.

        Args:
            delay: How often the task is asked whether it is still there, in seconds.
        """
        while True:
            answer = self._send(CommandExitCodeRequest(delay), timeout=delay + 60)
            if answer.terminated:
                return int(answer.exit_code)

    def notify_initial_registration_complete(self) -> None:
        """All tasks are there."""
        self._send(NotifyInitialRegistrationCompleteRequest())

    def register_code_result(self, result: Any) -> None:
        """What a function has returned."""
        self._send(RegisterCodeResultRequest(result))
