"""Secret token of the job, which authenticates its processes to each other.

TCPStore accepts any connection. Names derived from the token cannot be guessed by other processes, and an HMAC of the
data shows that a process of the job wrote it. Without a token (ranks that no script of launch/ started) the HMAC still
detects corrupt data.
"""

from __future__ import annotations

import hashlib
import hmac

TOKEN_VARIABLE = "MRL_JOB_TOKEN"
"""Environment variable with the token, equal in all processes of the job and unreadable for other users of the host."""


class AuthenticationError(RuntimeError):
    """Error for data that no process of this job wrote."""


def derive_name(token: str, purpose: str) -> str:
    """Returns a name that only processes with the token can compute."""
    return _digest(token, "name", purpose.encode())


def sign_data(token: str, purpose: str, data: bytes) -> bytes:
    """Returns `data` with its HMAC in front, for `verify_data`."""
    return _digest(token, purpose, data).encode() + data


def verify_data(token: str, purpose: str, sealed: bytes) -> bytes:
    """Returns the data that was sealed for the same purpose.

    Raises:
        AuthenticationError: It was sealed with another token or for another purpose.
    """
    size = 2 * hashlib.sha256().digest_size
    data = sealed[size:]
    if not hmac.compare_digest(sealed[:size], _digest(token, purpose, data).encode()):
        raise AuthenticationError(f"the '{purpose}' data was not written by a process of this job (wrong HMAC)")
    return data


def _digest(token: str, purpose: str, data: bytes) -> str:
    return hmac.new(token.encode(), purpose.encode() + b"\0" + data, hashlib.sha256).hexdigest()
