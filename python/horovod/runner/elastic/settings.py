"""Settings of an elastic job."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util.settings import BaseSettings


class ElasticSettings(BaseSettings):
    """Settings of an elastic job, besides the general ones.

    Args:
        discovery: Finds hosts.
        min_num_proc: Least number of slots of a session.
        max_num_proc: Largest number of slots of a session.
        elastic_timeout: Longest wait for slots, and for workers to call ``init()``, in seconds.
        reset_limit: Largest number of sessions after the first.
        cooldown_range: Least and largest time that a host is not used after a worker failed there, in seconds.
        **kwargs: See :class:`BaseSettings`.
    """

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int | None,
        max_num_proc: int | None,
        elastic_timeout: int | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(elastic=True, **kwargs)
        self.discovery = discovery
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
