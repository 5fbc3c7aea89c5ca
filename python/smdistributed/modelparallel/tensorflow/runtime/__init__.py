"""Execution of a traced step on the ranks of a pipeline."""
