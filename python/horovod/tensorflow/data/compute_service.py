"""A data service of TensorFlow: its configuration, its workers, and its use in a training job."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from horovod.runner.common.service.compute_service import ComputeClient
from horovod.runner.common.util.env import get_env_rank_and_size
from horovod.runner.common.util.network import Addresses

_SIDES = ("compute", "training")
#: Seconds between checks for a file that another process will create.
_POLL_SECONDS = 0.1
#: For each service, the numbers of datasets that ranks share.
_shared: dict[bytes, Iterator[int]] = {}


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """Describes how to reach a data service.

    Args:
        dispatchers: Number of dispatchers.
        workers_per_dispatcher: Number of workers of each dispatcher.
        dispatcher_side: Job that runs the dispatchers: ``compute``, which prepares data, or ``training``.
        addresses: Addresses of the :class:`~horovod.runner.common.service.compute_service.ComputeService`, by
            interface.
        key: The secret of that service.
        timeout: Longest wait for dispatchers and workers, in seconds.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Addresses
    key: bytes
    timeout: int = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side is {self.dispatcher_side!r}: expected one of {_SIDES}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Connect to the compute service.

        Args:
            verbose: Accepted for compatibility, without effect.

        Returns:
            The client.

        Raises:
            NoValidAddressesFound: The service does not answer.
        """
        return ComputeClient(self.addresses, self.key, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary that JSON can hold.

        Returns:
            The fields; the key as hexadecimal digits.
        """
        return {**dataclasses.asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(conf: dict[str, Any]) -> TfDataServiceConfig:
        """Create a configuration from a dictionary.

        Args:
            conf: The result of :meth:`to_dict`.

        Returns:
            The configuration.
        """
        addresses = {name: [(str(ip), int(port)) for ip, port in places] for name, places in conf["addresses"].items()}
        return TfDataServiceConfig(**{**conf, "key": bytes.fromhex(conf["key"]), "addresses": addresses})

    def write(self, filename: str) -> None:
        """Write the configuration to a file, in one step.

        Only its owner can read the file, because it contains the key.

        Args:
            filename: The file.
        """
        folder = os.path.dirname(os.path.abspath(filename))
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".service-", delete=False) as file:
            json.dump(self.to_dict(), file)
        os.replace(file.name, filename)

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Read a configuration from a file.

        Args:
            filename: The file.
            wait_for_file_creation: Whether to wait for the file, without limit.

        Returns:
            The configuration.
        """
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_POLL_SECONDS)
        with open(filename) as file:
            return TfDataServiceConfig.from_dict(json.load(file))


def _dispatcher(client: ComputeClient, number: int) -> Any:
    """Start a dispatcher, and register its address."""
    server = tf.data.experimental.service.DispatchServer()
    port = server.target.rpartition(":")[2]
    client.register_dispatcher(number, f"grpc://{client.local_address()}:{port}")
    return server


def _stop(server: Any) -> None:
    server._stop()
    server.join()


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Return a context with the address of the dispatcher of this rank.

    The address is for ``tf.data.experimental.service.distribute``. Ranks share one dispatcher, or are assigned to
    several in turn. With dispatchers on the training side, the first ranks run them until the context ends. All ranks
    must then leave the context after they have received the data.

    Args:
        compute_config: How to reach the service.
        rank: This process's rank in the training job.

    Yields:
        The address.

    Raises:
        TimeoutError: A dispatcher or its workers are missing.
    """
    client = compute_config.compute_client()
    number = rank % compute_config.dispatchers
    server = None
    if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
        server = _dispatcher(client, number)
    try:
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        client.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
        yield address
    finally:
        if server is not None:
            _stop(server)


def _job_name(compute_config: TfDataServiceConfig) -> str:
    """Return a new job name, because the service would treat datasets of one name as the same dataset."""
    number = next(_shared.setdefault(compute_config.key, itertools.count()))
    return f"job-{number}" if number else "job"


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return the dataset as workers of the service prepare it. Also a method of datasets.

    Args:
        dataset: The dataset to prepare.
        compute_config: How to reach the service; its dispatchers are on the compute side.
        rank: This process's rank in the training job.
        size: Number of ranks of the training job.
        processing_mode: As in ``tf.data.experimental.service.distribute``; by default workers share the elements of an
            epoch.
        reuse_dataset: Whether ranks share the elements: each element goes to the rank that asks first. Otherwise each
            rank gets all of them. Ranks share several datasets in one order.
        round_robin: Whether ranks get elements in turn, all at the same pace. The dataset must then be endless. Needs
            ``size`` and ``reuse_dataset``.

    Returns:
        The dataset.

    Raises:
        RuntimeError: Dispatchers are on the training side. They must live as long as the data; use
            :func:`tf_data_service`.
        ValueError: ``round_robin`` is given without ``reuse_dataset`` or ``size``.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "training side dispatcher is not supported here, use the context manager tf_data_service instead"
        )
    if round_robin and not (reuse_dataset and size):
        raise ValueError("round_robin needs reuse_dataset=True and the number of ranks as size")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_job_name(compute_config) if reuse_dataset else None,
                consumer_index=rank if round_robin else None,
                num_consumers=size if round_robin else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run a worker of the service, and on some processes a dispatcher, until the training is done.

    Each process of the job that prepares data calls it.

    Args:
        compute_config: How to reach the service.

    Raises:
        TimeoutError: The dispatcher is missing.
    """
    index, _ = get_env_rank_and_size()
    client = compute_config.compute_client()
    number, among = divmod(index, compute_config.workers_per_dispatcher)
    dispatcher = worker = None
    try:
        if compute_config.dispatcher_side == "compute" and among == 0:
            dispatcher = _dispatcher(client, number)
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=address.partition("://")[2],
                worker_address=f"{client.local_address()}:%port%",
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=compute_config.timeout * 1000,
            )
        )
        client.register_worker_for_dispatcher(number, index)
        client.wait_for_shutdown()
    finally:
        for server in (worker, dispatcher):
            if server is not None:
                _stop(server)
