"""Time limits of tests, which suit a machine that does nothing else."""

from __future__ import annotations

#: By what they are multiplied: the option `--patience` of pytest.
patience = 1.0
