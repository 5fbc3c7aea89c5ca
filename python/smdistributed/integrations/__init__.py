"""Backends of this library for other launchers; import the module of the launcher, such as ``ray``."""
