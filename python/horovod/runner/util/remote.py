"""Commands on other hosts."""

from __future__ import annotations

import shlex

#: Without ``ServerAliveInterval``, ssh notices a host that is cut off after hours.
SSH_COMMAND_PREFIX = (
    "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
)


def get_ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Return the command that runs another command through ``ssh``.

    Args:
        local_command: Command of the shell.
        host: Name of the host.
        port: Port of ``ssh``.
        identity_file: Key of ``ssh``.
        timeout_s: Longest wait for the connection, in seconds.

    Returns:
        The command.
    """
    options = ["-o", f"ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    options += ["-p", str(port)] if port is not None else []
    options += ["-i", identity_file] if identity_file is not None else []
    return " ".join([SSH_COMMAND_PREFIX, host, *map(shlex.quote, options), shlex.quote(local_command)])


get_remote_command = get_ssh_command
