"""The backend of Ray Train: ``TorchTrainer(train, torch_config=SmdConfig())`` trains over ``smddp``."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

try:
    import ray as _ray  # noqa: F401
    from ray.train.torch import TorchConfig
except ModuleNotFoundError as error:
    raise ImportError(
        "`smdistributed.integrations.ray` needs Ray Train, which is not installed: `pip install 'ray[train]'`",
        name=__name__,
    ) from error

#: Ray Train's backend of PyTorch.
_TorchBackend: Any = TorchConfig().backend_cls


@dataclass
class SmdConfig(TorchConfig):
    """Configuration of Ray Train's ``TorchTrainer`` for this library.

    Each worker is a rank of ``torch.distributed`` with the backend ``smddp``, and has the variables of torchrun. The
    function of the trainer may use ``ray.train.torch.prepare_model``, ``smdistributed.dataparallel.torch``,
    ``smp.init()`` or ``torch.distributed``.

    Attributes:
        backend: The backend of the process group.
        init_method: ``"env"`` or ``"tcp"``.
        timeout_s: Time limit of operations, in seconds.
    """

    backend: str | None = "smddp"

    @property
    def backend_cls(self) -> Any:
        """The class whose methods Ray Train calls before and after the training."""
        return SmdBackend


class SmdBackend(_TorchBackend):
    """The backend of Ray Train for :class:`SmdConfig`: prepares the workers for the process group."""

    def on_start(self, worker_group: Any, backend_config: SmdConfig) -> None:
        """Register the backend on all workers, send one secret to them, and create the process group.

        Args:
            worker_group: The workers.
            backend_config: The configuration.
        """
        worker_group.execute(_prepare, secrets.token_hex(32))
        super().on_start(worker_group, backend_config)


def _prepare(secret: str) -> None:
    # In place of one that is set already: those of the cluster are the same in all jobs, and Ray writes those of
    # `runtime_env` into its logs and into command lines.
    os.environ["SMD_SECRET"] = secret
    # Importing it registers the backend.
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
