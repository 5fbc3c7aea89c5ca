"""The actor that is one rank of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray

from horovod.ray import ray_logger
from horovod.runner.common.util.env import get_env_rank_and_size


class RankActor:
    """One process of a job. Executors create it as a Ray actor."""

    def __init__(self) -> None:
        #: The object of ``executable_cls``, which :meth:`execute` passes to functions.
        self.executable: Any = None

    def node_id(self) -> str:
        """Return Ray's name of the node.

        Returns:
            The name.
        """
        return ray.get_runtime_context().get_node_id()

    def hostname(self) -> str:
        """Return the address of the node, which is the host's name in the job.

        Returns:
            The address.
        """
        return ray.util.get_node_ip_address()

    def get_gpu_ids(self) -> list[str]:
        """Return the GPUs that Ray has assigned to this actor.

        Returns:
            Their indices on the node.
        """
        return [str(index) for index in ray.get_gpu_ids()]

    def set_variables(self, env_vars: dict[str, Any]) -> None:
        """Set environment variables of this process. Secrets may be among them, because Ray does not log arguments.

        Args:
            env_vars: Values by name.
        """
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def find_address(self) -> list[Any]:
        """Find an address at which the other ranks reach this one.

        Returns:
            The host and a free port.
        """
        from horovod.common import driven

        return driven.find_address()

    def offer_address(self, address: list[Any]) -> None:
        """Set the variables with which a function joins the job without ``hvd.init()``.

        Args:
            address: The result of :meth:`find_address` on rank 0.
        """
        from horovod.common import driven

        driven.offer_address(address)

    def set_queue(self, queue: Any) -> None:
        """Set where :func:`horovod.ray.ray_logger.log` puts records.

        Args:
            queue: A ``ray.util.queue.Queue``.
        """
        ray_logger.configure(queue)

    def make_executable(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Create the object that :meth:`execute` passes to functions.

        Args:
            executable_cls: Its class; without one there is no object.
            executable_args: Arguments of the class.
            executable_kwargs: Keyword arguments of the class.
        """
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or []), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with the object of :meth:`make_executable`.

        Args:
            func: The function.

        Returns:
            Its result.
        """
        return func(self.executable)

    def execute_elastic(self, func: Callable[[Any], Any]) -> tuple[int, Any, bool]:
        """Call a function of an elastic job, whose rank changes.

        Args:
            func: The function.

        Returns:
            The last rank of this process, the function's result, and whether there is one: a process that has no place
            in the job any more leaves the function by ``sys.exit(0)``.

        Raises:
            RuntimeError: The function left by ``sys.exit`` with a failure.
        """
        from horovod.common import basics

        try:
            value, is_done = func(self.executable), True
        except SystemExit as error:
            # Ray would end the actor without an outcome.
            if error.code not in (None, 0):
                raise RuntimeError(f"the function called sys.exit({error.code!r})") from error
            value, is_done = None, False
        last = basics.last_rank
        return get_env_rank_and_size()[0] if last is None else last, value, is_done
