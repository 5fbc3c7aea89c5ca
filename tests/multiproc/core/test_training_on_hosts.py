"""Each library trains on two hosts as one process does, and every rank names the host that is lost.

The hosts are network namespaces of this machine. On GPUs, NCCL gets another name for each of them, so it connects their
GPUs by sockets, as it does over Ethernet.
"""

from __future__ import annotations

import importlib.util
import re
import time

import pytest

from support import hosts, more, run_ranks, start_ranks
from support.devices import NUM_DEVICES, needs_one
from support.hosts.jobs import JOBS, compare_with_one_process, train_until_an_error
from support.tf_env import ENV

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(hosts.missing_network() is not None, reason=hosts.missing_network() or ""),
]

DEVICES = ["cpu", pytest.param("cuda", marks=needs_one)]
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
#: Jobs that `make test` runs; the others are for `make test-more`.
SHORT = ("ddp", "horovod", "pipeline over hosts")
#: Silence after which a host counts as gone, and the longest time until every other rank has an error that names it.
SILENCE_SECONDS, NOTICE_SECONDS = 3, 10.0


def ranks_per_host(kind):
    """The ranks of a host have a GPU each. Both hosts use the same GPUs."""
    return min(NUM_DEVICES, 2) if kind == "cuda" else 2


def start(two, kind, body, *args):
    per_host = ranks_per_host(kind)
    own = {rank: {"NCCL_HOSTID": f"host {rank // per_host}"} for rank in range(2 * per_host)}
    environment = {"SMD_PEER_TIMEOUT_SECONDS": str(SILENCE_SECONDS)}
    if kind == "cuda":
        environment |= {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    return start_ranks(body, 2 * per_host, *args, launcher=two.by_hand(own), env=environment, timeout=150)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", [name if name in SHORT else more(name) for name in JOBS])
def test_two_hosts_train_as_one_process(name, kind, tmp_path):
    pytest.importorskip("torch")
    with hosts.Hosts(2) as two, start(two, kind, compare_with_one_process, name, kind, tmp_path) as job:
        outcome = job.wait()
    assert outcome.exit_code == 0, outcome.describe()
    assert all(rank.finished and rank.error is None for rank in outcome.ranks), outcome.describe()
    assert kind == "cpu" or "via NET/Socket" in outcome.output, outcome.describe()


def cut_off(two, _, kind):
    """Cuts the second host off; returns the other host's ranks that each rank may name."""
    two.cut(1)
    first, second = _ranks_of_hosts(kind)
    return dict.fromkeys(first, second) | dict.fromkeys(second, first)


def kill_all(_, job, kind):
    """Kills the ranks of the second host; returns the other host's ranks that each survivor may name."""
    first, second = _ranks_of_hosts(kind)
    for rank in second:
        job.kill(rank)
    return dict.fromkeys(first, second)


def _ranks_of_hosts(kind):
    per_host = ranks_per_host(kind)
    return tuple(range(per_host)), tuple(range(per_host, 2 * per_host))


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("name", ["pipeline over hosts", *map(more, ("ddp", "torch ddp", "horovod", "sharded"))])
@pytest.mark.parametrize("lose", [cut_off, kill_all])
def test_every_rank_names_the_host_that_is_lost(lose, name, kind):
    pytest.importorskip("torch")
    with hosts.Hosts(2) as two, start(two, kind, train_until_an_error, name, kind) as job:
        for rank in range(2 * ranks_per_host(kind)):
            job.wait_for(f"trained.{rank}")
        began = time.monotonic()
        errors = lose(two, job, kind)
        for rank in errors:
            job.wait_for_end(rank)
        outcome = job.wait()
    for rank, others in errors.items():
        named = rf"rank (?:{'|'.join(map(str, others))}) died"
        assert re.search(named, outcome.ranks[rank].error or ""), outcome.describe()
        assert outcome.ranks[rank].ended_at - began < NOTICE_SECONDS, outcome.describe()


def horovod_tapes():
    import tensorflow as tf

    import horovod.tensorflow as hvd

    hvd.init()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)

    def gradient_of(weights, step, replica):
        tf.random.set_seed(1)
        x = tf.random.stateless_normal([8, 6], [step, replica], dtype=tf.float64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weights) ** 2)
        return tape, loss

    start = tf.random.stateless_normal([6, 3], [7, 7], dtype=tf.float64)
    weights, alone = tf.Variable(start), tf.Variable(start)
    for step in range(5):
        tape, loss = gradient_of(weights, step, hvd.rank())
        weights.assign_sub(0.5 * hvd.DistributedGradientTape(tape).gradient(loss, weights))
        gradients = []
        for replica in range(hvd.size()):
            tape, loss = gradient_of(alone, step, replica)
            gradients.append(tape.gradient(loss, alone))
        alone.assign_sub(0.5 * tf.add_n(gradients) / hvd.size())
    assert float(tf.reduce_max(tf.abs(alone - start))) > 1e-3
    return float(tf.reduce_max(tf.abs(weights - alone)))


def keras_pipelines():
    import smdistributed.modelparallel.tensorflow as smp
    from support.keras_models import alone, compare

    smp.init({"partitions": 2})
    microbatches, replicas = 2, 2
    plain = alone("mlp", "float64", microbatches * replicas)
    return compare("mlp", "float64", 2, microbatches, "interleaved", "tape", plain, replicas)[0]


@needs_tensorflow
@pytest.mark.parametrize("body", [horovod_tapes, keras_pipelines])
@pytest.mark.more
def test_tensorflow_trains_on_two_hosts_as_in_one_process(body):
    with hosts.Hosts(2) as two:
        differences = run_ranks(body, 4, launcher=two.by_hand(), env=ENV, timeout=150)
    assert max(differences) < 1e-10, differences
