"""Settings of a job."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util.timeout import Timeout


class BaseSettings:
    """What a launcher is told.

    Args:
        num_proc: Processes.
        verbose: 2: more lines.
        ssh_port: Of other hosts.
        ssh_identity_file: For them.
        extra_mpi_args: For ``mpirun``.
        tcp_flag: TCP only.
        binding_args: For ``mpirun``.
        key: The job's secret.
        start_timeout: A :class:`Timeout`.
        output_filename: A folder that gets what processes print.
        run_func_mode: A function is run instead of a command.
        nics: Interfaces.
        elastic: Processes come and go.
        prefix_output_with_timestamp: Lines begin with the time.
    """

    def __init__(
        self,
        num_proc: int | None = None,
        verbose: int = 0,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        extra_mpi_args: str | None = None,
        tcp_flag: bool | None = None,
        binding_args: str | None = None,
        key: bytes | None = None,
        start_timeout: Timeout | None = None,
        output_filename: str | None = None,
        run_func_mode: bool | None = None,
        nics: Any = None,
        elastic: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.num_proc = num_proc
        self.verbose = verbose
        self.ssh_port = ssh_port
        self.ssh_identity_file = ssh_identity_file
        self.extra_mpi_args = extra_mpi_args
        self.tcp_flag = tcp_flag
        self.binding_args = binding_args
        self.key = key
        self.start_timeout = start_timeout
        self.output_filename = output_filename
        self.run_func_mode = run_func_mode
        self.nics = nics
        self.elastic = elastic
        self.prefix_output_with_timestamp = prefix_output_with_timestamp


class Settings(BaseSettings):
    """Settings of a job with fixed hosts.

    Args:
        hosts: As ``name:slots,name:slots``.
        num_hosts: How many hosts; by default as many as `hosts` has.
        **kwargs: See :class:`BaseSettings`.
    """

    def __init__(self, hosts: str | None = None, num_hosts: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
        self.num_hosts = num_hosts
