"""Two places of Keras 3 that have to know of distributed optimizers, and no hook to tell them.

Both ask Keras first and change the answer for distributed optimizers only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


@functools.cache
def install(is_distributed: Callable[[Any], bool]) -> None:
    """Changes both, once.

    Args:
        is_distributed: Whether an optimizer reduces gradients.
    """
    keras = sys.modules["keras"]
    scaler = keras.optimizers.LossScaleOptimizer
    trainer = next(cls for cls in keras.Model.__mro__ if "_resolve_auto_jit_compile" in vars(cls))
    is_finite = scaler.check_finite
    resolve = trainer._resolve_auto_jit_compile

    @functools.wraps(is_finite)
    def check_finite(self: Any, grads: Any) -> Any:
        """A LossScaleOptimizer around a distributed optimizer looks at gradients that are not reduced yet: all ranks
        skip the step or none does, or else some would wait for others that never come."""
        finite = is_finite(self, grads)
        if is_distributed(self.inner_optimizer):
            finite = self.inner_optimizer._smd_all(finite)
        return finite

    @functools.wraps(resolve)
    def resolve_auto_jit_compile(self: Any) -> bool:
        """``jit_compile="auto"`` means XLA on a machine with a GPU, and XLA does not know our operations."""
        return resolve(self) and not is_distributed(self.optimizer)

    scaler.check_finite = check_finite
    trainer._resolve_auto_jit_compile = resolve_auto_jit_compile
