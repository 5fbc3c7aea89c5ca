"""Settings of a job."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util.timeout import Timeout


class BaseSettings:
    """Settings of any job.

    Args:
        num_proc: Number of processes.
        verbose: 2 prints more lines.
        ssh_port: Port of ``ssh`` on other hosts.
        ssh_identity_file: Key of ``ssh``.
        extra_mpi_args: More arguments of ``mpirun``.
        tcp_flag: Whether MPI uses TCP only.
        binding_args: Arguments of ``mpirun`` that bind processes.
        key: The job's secret.
        start_timeout: A :class:`Timeout`.
        output_filename: A folder for what processes print.
        run_func_mode: Whether a function is run instead of a command.
        nics: Interfaces.
        elastic: Whether processes may join and leave.
        prefix_output_with_timestamp: Whether lines begin with the time.
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
        hosts: Hosts and slots as ``name:slots,name:slots``.
        num_hosts: Number of hosts; by default that of ``hosts``.
        **kwargs: See :class:`BaseSettings`.
    """

    def __init__(self, hosts: str | None = None, num_hosts: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
        self.num_hosts = num_hosts
