"""Texts."""

RESET_LIMIT_EXCEEDED_MESSAGE = "number of resets during elastic job exceeded limit: {}"
