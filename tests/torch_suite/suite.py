"""PyTorch's own test suite of its process groups, over the backend that ``SUITE_BACKEND`` names.

The suite chooses tests by the backend's name, and knows PyTorch's own backends only. So it is imported as if for gloo,
and the processes of its tests then use the requested backend: both backends get the same tests. compare.py runs this
file. Its name does not match pytest's patterns, because it takes many minutes.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest

BACKEND = os.environ.get("SUITE_BACKEND", "smddp")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ["BACKEND"] = "gloo"

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("expecttest", reason="the suite needs expecttest: `pip install expecttest`")
pytest.importorskip("hypothesis", reason="the suite needs hypothesis: `pip install hypothesis`")

import torch  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if BACKEND == "smddp":
    from smdistributed.dataparallel.torch import torch_smddp  # noqa: F401

    distributed_test.BACKEND = BACKEND
    # The suite reads these lists while a test runs, to decide which events it expects in a profile.
    for names in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append(BACKEND)


class TestDistBackend(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Each test starts `WORLD_SIZE` processes."""

    def setUp(self) -> None:
        super().setUp()
        # A forked child has PyTorch imported already; the import takes longer than most tests. CUDA does not work in
        # forked children.
        if torch.cuda.is_available():
            self._spawn_processes()
        else:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
        sys.stdout.flush()

    def _test_accumulate_gradients_no_sync(self, *args, **kwargs) -> None:
        # The body of this test looks at the name to choose between CPU and CUDA tensors.
        with mock.patch.object(distributed_test, "BACKEND", "gloo"):
            super()._test_accumulate_gradients_no_sync(*args, **kwargs)
