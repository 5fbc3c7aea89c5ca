"""PyTorch's own suite of its process groups, which comes with PyTorch, over the backend that ``SUITE_BACKEND`` names.

The suite decides which tests a backend gets by the backend's name, and knows only torch's own. So its file is imported
as if for gloo, and the processes of its tests then use the backend that is asked for: both backends get the same tests.
compare.py runs it for gloo and for smddp. No name that pytest looks for by itself: it takes many minutes.
"""

from __future__ import annotations

import os
import sys

import pytest

BACKEND = os.environ.get("SUITE_BACKEND", "smddp")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ["BACKEND"] = "gloo"

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="the suite needs expecttest: `pip install expecttest`")
pytest.importorskip("hypothesis", reason="the suite needs hypothesis: `pip install hypothesis`")

import torch.distributed as dist  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if BACKEND == "smddp":
    from smdistributed.dataparallel.torch import torch_smddp

    distributed_test.BACKEND = BACKEND
    # torch's own refuses every backend but gloo by name.
    dist.monitored_barrier = torch_smddp.monitored_barrier


class TestDistBackendWithSpawn(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Each test starts `WORLD_SIZE` processes, which import this file anew."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()
        sys.stdout.flush()
