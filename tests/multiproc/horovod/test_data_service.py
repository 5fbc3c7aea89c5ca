"""`horovod.tensorflow.data`: compute workers that serve datasets with tf.data service, and ranks that read them."""

from __future__ import annotations

import importlib.util
import os
import threading

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


def read_from_data_service(folder, side):
    """Each rank runs a compute worker in a thread and reads the dataset in its main thread."""
    import tensorflow as tf

    import horovod.tensorflow as hvd
    from horovod.tensorflow.data import TfDataServiceConfig, compute_worker, send_to_data_service, tf_data_service

    hvd.init()
    file = os.path.join(folder, "service.json")
    arguments = [file, "--dispatchers", "1", "--dispatcher-side", side]
    ended = []

    def compute():
        compute_worker.run_commandline(arguments)
        ended.append(True)

    with pytest.raises(ValueError, match=r"\(2\) must be a multiple of number of dispatchers \(3\)"):
        compute_worker.main(3, side, file, 1)
    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    config = TfDataServiceConfig.read(file, wait_for_file_creation=True)
    assert os.stat(file).st_mode & 0o077 == 0, "only the owner may read the file, because it contains the key"
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    dataset = tf.data.Dataset.range(40)
    found = {}
    if side == "compute":
        found["shared"] = [int(x) for x in dataset.send_to_data_service(config, hvd.rank(), reuse_dataset=True)]
        hvd.join()
        found["own"] = sorted(int(x) for x in dataset.send_to_data_service(config, hvd.rank()))
        in_turn = send_to_data_service(
            dataset.repeat(), config, hvd.rank(), hvd.size(), "parallel_epochs", reuse_dataset=True, round_robin=True
        )
        found["in turn"] = len(list(in_turn.take(10)))
        with pytest.raises(ValueError, match="round_robin needs reuse_dataset"):
            send_to_data_service(dataset, config, hvd.rank(), round_robin=True)
    else:
        with pytest.raises(RuntimeError, match="use the context manager tf_data_service"):
            send_to_data_service(dataset, config, hvd.rank())
        with tf_data_service(config, hvd.rank()) as address:
            service = tf.data.experimental.service
            shared = dataset.apply(service.distribute("distributed_epoch", address, job_name="job"))
            found["shared"] = [int(x) for x in shared]
            # The dispatcher runs in this process and ends with the context.
            hvd.join()
    hvd.join()
    if hvd.rank() == 0:
        config.compute_client().shutdown()
    thread.join(60)
    assert ended
    hvd.join()
    found["file is gone"] = not os.path.exists(file)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("side", ["compute", "training"])
def test_ranks_share_the_data_of_the_service(side, tmp_path):
    results = run_ranks(
        read_from_data_service,
        2,
        str(tmp_path),
        side,
        env=ENV,
        timeout=150,
        launcher=Forked("tensorflow"),
    )
    assert sorted(x for found in results for x in found["shared"]) == list(range(40))
    for found in results:
        assert found["file is gone"]
        if side == "compute":
            assert found["own"] == list(range(40))
            assert found["in turn"] == 10
