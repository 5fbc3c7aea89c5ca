"""Tracing of a step: its body becomes one graph of operations."""
