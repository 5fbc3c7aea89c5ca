"""Counts parameters and modules as they are registered anywhere, so that a model need not be searched for new ones
before every forward."""

from __future__ import annotations

from torch.nn.modules import module

_count = 0


def count() -> int:
    """Grows with every registration in this process."""
    return _count


def _registered(*_: object) -> None:
    global _count
    _count += 1


module.register_module_parameter_registration_hook(_registered)
module.register_module_module_registration_hook(_registered)
