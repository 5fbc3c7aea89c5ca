"""The service of a launcher's task, which runs a command."""

from __future__ import annotations

import os
import threading
from typing import Any, TextIO

from horovod.runner.common.util import network, safe_shell_exec
from horovod.runner.common.util.timeout import Timeout
from horovod.runner.util.streams import Pipe
from horovod.runner.util.threads import in_thread


class RunCommandRequest:
    """A request to run a command.

    Args:
        command: Command of the shell.
        env: Variables besides the task's own.
        capture_stdout: Whether the output waits for a client that streams it.
        capture_stderr: The same for errors.
        prefix_output_with_timestamp: Whether lines begin with the time.
    """

    def __init__(
        self,
        command: str,
        env: dict[str, str],
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.command = command
        self.env = env
        self.capture_stdout = capture_stdout
        self.capture_stderr = capture_stderr
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


class StreamCommandOutputRequest:
    """A request for the output and errors of the command, once it has started."""


class StreamCommandStdOutRequest(StreamCommandOutputRequest):
    """A request for the command's output."""


class StreamCommandStdErrRequest(StreamCommandOutputRequest):
    """A request for the command's errors."""


class CommandOutputNotCaptured(Exception):  # noqa: N818 - the documented name
    """The command was started without capturing this output."""


class AbortCommandRequest:
    """A request to end the command."""


class CommandExitCodeRequest:
    """A request for the command's exit code.

    Args:
        wait: Longest wait for the command's end, in seconds.
    """

    def __init__(self, wait: float = 0) -> None:
        self.wait = wait


class CommandExitCodeResponse:
    """The command's exit code.

    Args:
        terminated: Whether the command has ended.
        exit_code: Its exit code; 128 plus the signal if one ended it.
    """

    def __init__(self, terminated: bool, exit_code: int | None) -> None:
        self.terminated = terminated
        self.exit_code = exit_code


class NotifyInitialRegistrationCompleteRequest:
    """A message that all tasks have registered."""


class RegisterCodeResultRequest:
    """Registers the result of a function.

    Args:
        result: The result.
    """

    def __init__(self, result: Any) -> None:
        self.result = result


class BasicTaskService(network.BasicService):
    """Runs one command at a time.

    Args:
        name: Name of the service.
        index: Number of the task.
        key: The job's secret.
        nics: Interfaces at which the service is reached; all by default.
        command_env: Environment of commands, besides the variables of a request; by default this process's.
        verbose: Accepted for compatibility, without effect.
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
        # Captured output of the command, by the request that streams it.
        self._captured: dict[type, Pipe] = {}
        super().__init__(name, key, nics)

    def _handle(self, req: Any, client_address: tuple[str, int]) -> Any:
        if isinstance(req, RunCommandRequest):
            self._start(req)
        elif isinstance(req, AbortCommandRequest):
            self._abort.set()
        elif isinstance(req, CommandExitCodeRequest):
            with self._changed:
                self._changed.wait_for(lambda: self._exit_code is not None or self._connections.closing, req.wait)
                return CommandExitCodeResponse(self._exit_code is not None, self._exit_code)
        elif isinstance(req, StreamCommandOutputRequest):
            return network.AckStreamResponse(), self._output(type(req))
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
            wanted = {StreamCommandStdOutRequest: req.capture_stdout, StreamCommandStdErrRequest: req.capture_stderr}
            self._captured = {kind: Pipe() for kind, captures in wanted.items() if captures}
            self._changed.notify_all()
        in_thread(self._run, (req, self._captured))

    def _output(self, kind: type) -> Pipe:
        """Wait for a captured output of the command, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: self._runs or self._exit_code is not None or self._connections.closing)
            if kind not in self._captured:
                raise CommandOutputNotCaptured(
                    f"task {self._index} runs no command whose output is captured: ask for it in `run_command`"
                )
            return self._captured[kind]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self, req: RunCommandRequest, captured: dict[type, Pipe]) -> None:
        own = os.environ if self._environment is None else self._environment
        code = 1
        try:
            code = safe_shell_exec.execute(
                req.command,
                env={**own, **req.env},
                stdout=captured.get(StreamCommandStdOutRequest),
                stderr=captured.get(StreamCommandStdErrRequest),
                index=self._index if captured else None,
                events=[self._abort],
                prefix_output_with_timestamp=req.prefix_output_with_timestamp,
            )
        finally:
            for pipe in captured.values():
                pipe.close()
            with self._changed:
                self._runs, self._exit_code = False, code
                self._changed.notify_all()

    def fn_result(self) -> Any:
        """Return the last result that :meth:`BasicTaskClient.register_code_result` registered.

        Returns:
            The result, or ``None``.
        """
        return self._result

    def command_exit_code(self) -> int | None:
        """Return the command's exit code.

        Returns:
            The exit code; ``None`` while the command runs.
        """
        return self._exit_code

    def wait_for_initial_registration(self, timeout: Timeout) -> None:
        """Wait until all tasks have registered.

        Args:
            timeout: Longest wait, in seconds or as a :class:`Timeout`.

        Raises:
            TimeoutException: The wait took longer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._complete, timeout.remaining())
            if not self._complete:
                timeout.check_time_out_for("tasks to start")

    def wait_for_command_start(self, timeout: Timeout) -> None:
        """Wait until a command has started.

        Args:
            timeout: Longest wait, in seconds or as a :class:`Timeout`.

        Raises:
            TimeoutException: The wait took longer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._runs or self._exit_code is not None, timeout.remaining())
            if not self._runs and self._exit_code is None:
                timeout.check_time_out_for("command to run")

    def wait_for_command_termination(self) -> int:
        """Wait until the command has ended.

        Returns:
            Its exit code.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._exit_code is not None)
            return self._exit_code or 0


class BasicTaskClient(network.BasicClient):
    """A client of a task.

    Args:
        service_name: Name of the service.
        task_addresses: Addresses to try, by interface.
        key: The job's secret.
        verbose: Accepted for compatibility, without effect.
        match_intf: See :class:`~horovod.runner.common.util.network.BasicClient`.
        probe_timeout: Longest wait for an address, in seconds.
        attempts: Number of attempts for each address.
    """

    def __init__(
        self,
        service_name: str,
        task_addresses: network.Addresses,
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
        probe_timeout: float = 20,
        attempts: int = 3,
    ) -> None:
        super().__init__(service_name, task_addresses, key, verbose, match_intf, probe_timeout, attempts)

    def run_command(
        self,
        command: str,
        env: dict[str, str],
        capture_stdout: bool = False,
        capture_stderr: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        """Start a command of the shell.

        Args:
            command: The command.
            env: Variables besides the task's own.
            capture_stdout: Whether the output goes to :meth:`stream_command_output`. The command waits for its reader.
            capture_stderr: The same for errors.
            prefix_output_with_timestamp: Whether captured lines begin with the time.

        Raises:
            RuntimeError: A command is running.
        """
        captures = capture_stdout, capture_stderr, prefix_output_with_timestamp
        self._send(RunCommandRequest(command, env, *captures))

    def stream_command_output(
        self, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> tuple[threading.Thread | None, threading.Thread | None]:
        """Copy the output of the command, in threads, until it ends.

        If the connection breaks, the command is aborted. The call may precede the start of the command. The thread of
        an output that is not captured ends with the start.

        Args:
            stdout: Receives the output, which :meth:`run_command` has captured.
            stderr: Receives the errors, likewise.

        Returns:
            A thread for each of both; ``None`` for one that is not asked for.
        """

        def stream(request: StreamCommandOutputRequest, target: TextIO) -> None:
            try:
                self._send(request, target)
            except (OSError, EOFError):
                self.abort_command()
                raise

        return (
            None if stdout is None else in_thread(stream, (StreamCommandStdOutRequest(), stdout), silent=True),
            None if stderr is None else in_thread(stream, (StreamCommandStdErrRequest(), stderr), silent=True),
        )

    def abort_command(self) -> None:
        """End the command."""
        self._send(AbortCommandRequest())

    def command_result(self) -> tuple[bool, int | None]:
        """Return whether the command has ended, and its exit code.

        Returns:
            Both; the exit code is ``None`` while the command runs.
        """
        answer = self._send(CommandExitCodeRequest())
        return answer.terminated, answer.exit_code

    def wait_for_command_exit_code(self, delay: float = 10.0) -> int:
        """Wait until the command has ended.

        Args:
            delay: Time between two checks that the task is alive, in seconds.

        Returns:
            The exit code.
        """
        while True:
            answer = self._send(CommandExitCodeRequest(delay), timeout=delay + 60)
            if answer.terminated:
                return int(answer.exit_code)

    def wait_for_command_termination(self, delay: float = 10.0) -> None:
        """Wait until the command has ended.

        Args:
            delay: Time between two checks that the task is alive, in seconds.
        """
        self.wait_for_command_exit_code(delay)

    def notify_initial_registration_complete(self) -> None:
        """All tasks are there."""
        self._send(NotifyInitialRegistrationCompleteRequest())

    def register_code_result(self, result: Any) -> None:
        """Register the result of a function.

        Args:
            result: The result.
        """
        self._send(RegisterCodeResultRequest(result))
