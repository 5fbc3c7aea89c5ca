"""Execution of a recorded step on the ranks of a pipeline."""
