"""Counts registrations of parameters and modules.

A model that remembers the count need not be searched for new ones before every forward.
"""

from __future__ import annotations

from torch.nn.modules import module

_count = 0


def count() -> int:
    """Return the number of registrations in this process so far.

    Returns:
        The count; it grows with every registration.
    """
    return _count


def _registered(*_: object) -> None:
    global _count
    _count += 1


module.register_module_parameter_registration_hook(_registered)
module.register_module_module_registration_hook(_registered)
