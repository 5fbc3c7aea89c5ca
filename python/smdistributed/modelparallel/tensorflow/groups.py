"""Process groups of a model-parallel TensorFlow job."""

from __future__ import annotations

import threading

from smdistributed import _core
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.groups import Groups


class TensorFlowGroups(Groups[int]):
    """The groups of a TensorFlow job; a group is represented by its id in the core.

    Attributes:
        channels: The groups between GPUs of the pipeline, by the positions of sender and receiver; see
        ``runtime/channels.py``.
        report_thread: Tells the pipeline that this rank could not trace a step; see ``runtime/agreement.py``.
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.channels: dict[tuple[int, int], int] = {}
        self.report_thread: threading.Thread | None = None

    def new_group(self, members: list[int]) -> int:
        """Make a group of these ranks in the core."""
        return _core.new_group(members)

    def number(self, group: int) -> int:
        """Return the core's number of a group."""
        return group

    def close(self) -> None:
        """Remove the groups from the core."""
        for channel in self.channels.values():
            _core.remove_group(channel)
        super().close()
