"""Process groups of a model-parallel TensorFlow job."""

from __future__ import annotations

import threading

from smdistributed import _core
from smdistributed.modelparallel.config import Config
from smdistributed.modelparallel.groups import Groups


class TensorFlowGroups(Groups[int]):
    """Groups of the core are their numbers.

    Attributes:
        channels: Those between the GPUs of the pipeline, by the places of sender and receiver; see ``runtime/channels.py``.
        telling: What tells the pipeline of a step that this rank could not trace; see ``runtime/agreement.py``.
    """

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.channels: dict[tuple[int, int], int] = {}
        self.telling: threading.Thread | None = None

    def new_group(self, members: list[int]) -> int:
        """The core's group of these ranks."""
        return _core.new_group(members)

    def number(self, group: int) -> int:
        """Itself."""
        return group

    def close(self) -> None:
        """Forgets the core's groups."""
        for channel in self.channels.values():
            _core.remove_group(channel)
        super().close()
