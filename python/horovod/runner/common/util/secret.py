"""Secrets that members of a job share."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
DIGEST_LENGTH_BYTES = hashlib.sha256().digest_size


def make_secret_key() -> bytes:
    """Create a secret.

    Returns:
        Random bytes.
    """
    return secrets.token_bytes(DIGEST_LENGTH_BYTES)


def from_environment() -> bytes | None:
    """Return the secret in ``_HOROVOD_SECRET_KEY``, which `codec.dumps_base64` has written.

    Returns:
        The secret, or ``None`` if the variable is not set.
    """
    from horovod.runner.common.util import codec

    text = os.environ.get(HOROVOD_SECRET_KEY)
    return codec.loads_base64(text) if text else None


def compute_digest(key: bytes, message: bytes | str) -> bytes:
    """Compute the digest that proves that a message's sender knows the secret.

    Args:
        key: The secret.
        message: The message.

    Returns:
        HMAC-SHA256 of the message.
    """
    return hmac.new(key, message.encode() if isinstance(message, str) else message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes | str, digest: bytes) -> bool:
    """Check the digest of a message.

    Args:
        key: The secret.
        message: The message.
        digest: The digest.

    Returns:
        Whether the digest is that of the message.
    """
    return hmac.compare_digest(compute_digest(key, message), digest)
