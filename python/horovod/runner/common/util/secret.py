"""Keys that members of a job share."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
DIGEST_LENGTH_BYTES = hashlib.sha256().digest_size


def make_secret_key() -> bytes:
    """A new one."""
    return secrets.token_bytes(DIGEST_LENGTH_BYTES)


def from_environment() -> bytes | None:
    """The one of ``_HOROVOD_SECRET_KEY``, as `codec.dumps_base64` writes it; ``None`` without."""
    from horovod.runner.common.util import codec

    text = os.environ.get(HOROVOD_SECRET_KEY)
    return codec.loads_base64(text) if text else None


def compute_digest(key: bytes, message: bytes | str) -> bytes:
    """What proves that a message is from who knows the key."""
    return hmac.new(key, message.encode() if isinstance(message, str) else message, hashlib.sha256).digest()


def check_digest(key: bytes, message: bytes | str, digest: bytes) -> bool:
    """Whether it does."""
    return hmac.compare_digest(compute_digest(key, message), digest)
