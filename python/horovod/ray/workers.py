"""The interface behind :class:`horovod.ray.RayExecutor`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class WorkerResources:
    """Resources of each worker.

    Attributes:
        cpus_per_worker: CPUs.
        use_gpu: Whether workers get GPUs.
        gpus_per_worker: GPUs; 1 by default with ``use_gpu``.
    """

    cpus_per_worker: int = 1
    use_gpu: bool = False
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError("`gpus_per_worker` is set, and `use_gpu` is not")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 1:
            raise ValueError(f"`gpus_per_worker` is {self.gpus_per_worker}: a worker has at least 1")
        if self.cpus_per_worker < 0:
            raise ValueError(f"`cpus_per_worker` is {self.cpus_per_worker}: it cannot be negative")


class Workers(abc.ABC):
    """Starts workers and runs functions on them."""

    @abc.abstractmethod
    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: dict[str, str] | None = None,
    ) -> None:
        """Start the workers.

        Args:
            executable_cls: Class of the object that :meth:`execute` passes to functions.
            executable_args: Arguments of the class.
            executable_kwargs: Keyword arguments of the class.
            extra_env_vars: Variables of the workers.
        """

    @abc.abstractmethod
    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Call a function on all workers with their objects of ``executable_cls``.

        Args:
            fn: The function.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.
        """

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call a function on all workers.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            callbacks: Called with the records of :func:`horovod.ray.ray_logger.log`.

        Returns:
            The results by rank.
        """

    @abc.abstractmethod
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a function on all workers without waiting.

        Args:
            fn: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            References of the results by rank, for ``ray.get``.
        """

    @abc.abstractmethod
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call a function on rank 0 with its object of ``executable_cls``.

        Args:
            fn: The function.

        Returns:
            The result.
        """

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the workers and release their resources."""
