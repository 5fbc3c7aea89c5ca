"""Texts and kinds of changes."""

from enum import IntFlag

RESET_LIMIT_EXCEEDED_MESSAGE = "number of resets during elastic job exceeded limit: {}"


class HostUpdateResult(IntFlag):
    """The kind of a change of a job's hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
