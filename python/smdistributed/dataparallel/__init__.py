"""Data-parallel training: every rank has the whole model and its own part of the data."""
