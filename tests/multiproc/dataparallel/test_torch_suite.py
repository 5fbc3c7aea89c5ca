"""Runs a few tests of PyTorch's distributed suite over smddp. `make torch-suite` runs all, at several world sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

for _module in ("torch", "expecttest", "hypothesis"):
    pytest.importorskip(_module, reason=f"PyTorch's suite needs {_module}, which is not installed")

COMPARE = Path(__file__).parents[2] / "torch_suite" / "compare.py"
# One or two tests of each kind.
NAMES = [
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_destroy_full_group",
    "test_monitored_barrier_gloo_subgroup",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.more
def test_tests_that_pass_over_gloo_pass_over_smddp():
    arguments = ["--world-sizes", "2", "-k", " or ".join(NAMES)]
    done = subprocess.run([sys.executable, str(COMPARE), *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"of {len(NAMES)} that pass over gloo, {len(NAMES)} pass over smddp" in done.stdout, done.stdout
