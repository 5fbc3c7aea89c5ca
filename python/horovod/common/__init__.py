"""Modules that need no framework."""
