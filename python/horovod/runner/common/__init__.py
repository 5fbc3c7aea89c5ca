"""Modules that the launcher and its processes share."""
