"""Environment variables of ranks with TensorFlow in tests: few threads and no GPU."""

from __future__ import annotations

ENV = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "",
}
