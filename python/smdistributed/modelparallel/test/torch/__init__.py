"""Helpers for tests of training scripts with PyTorch."""
