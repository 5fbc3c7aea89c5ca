"""Backends, which run the training of an estimator on several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Backend:
    """The interface of a backend."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run a function on all processes.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            env: Variables of the processes.

        Returns:
            The results by rank.
        """
        raise NotImplementedError

    def num_processes(self) -> int:
        """Return the number of processes.

        Returns:
            The number.
        """
        raise NotImplementedError


class SparkBackend(Backend):
    """Processes in the tasks of the Spark cluster.

    Args:
        num_proc: Number of processes; ``spark.default.parallelism`` by default.
        env: Variables of the processes.
        **kwargs: More arguments of :func:`horovod.spark.run`.
    """

    def __init__(self, num_proc: int | None = None, env: dict[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc = num_proc
        self._env = env or {}
        self._kwargs = kwargs

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run a function by :func:`horovod.spark.run`.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            env: Variables of the processes.

        Returns:
            The results by rank.
        """
        from horovod.spark.runner import run

        variables = {**self._env, **(env or {})}
        return run(fn, args, kwargs, num_proc=self.num_processes(), env=variables, **self._kwargs)

    def num_processes(self) -> int:
        """Return the number of processes.

        Returns:
            The number.
        """
        from horovod.spark.runner import active_context

        return self._num_proc or active_context().defaultParallelism


class LocalBackend(Backend):
    """Processes of the driver's host.

    Args:
        num_proc: Number of processes.
        env: Variables of the processes.
    """

    def __init__(self, num_proc: int = 1, env: dict[str, str] | None = None) -> None:
        self._num_proc = num_proc
        self._env = env or {}

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """Run a function by :func:`horovod.run`.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            env: Variables of the processes.

        Returns:
            The results by rank.
        """
        import horovod.runner
        from horovod.common.util import env as environment

        with environment(**{**self._env, **(env or {})}):
            return horovod.runner.run(fn, tuple(args), kwargs, num_proc=self._num_proc)

    def num_processes(self) -> int:
        """Return the number of processes.

        Returns:
            The number.
        """
        return self._num_proc
