"""The job's token: what a process must know to be believed by the job's ranks and launchers.

Owns the variable that holds it, the names that are derived from it, and the seal on what is written where a foreign
process could write too. TCPStore asks nobody who connects for anything: the token is what tells the job's own from a
stranger's. Without one (ranks that no script of launch/ started) the seal still tells garbage.
"""

from __future__ import annotations

import hashlib
import hmac

TOKEN = "MRL_JOB_TOKEN"
"""The same secret text in the environment of every process of the job, which other users of a host cannot read."""


class StrangerError(RuntimeError):
    """Something was written that no process of this job wrote."""


def name(token: str, purpose: str) -> str:
    """A name that nobody can guess who does not know the token."""
    return _digest(token, "name", purpose.encode())


def seal(token: str, purpose: str, data: bytes) -> bytes:
    """`data` with a seal before it, for `unseal`."""
    return _digest(token, purpose, data).encode() + data


def unseal(token: str, purpose: str, sealed: bytes) -> bytes:
    """What was sealed for the same purpose.

    Raises:
        StrangerError: It was not sealed with this token.
    """
    size = 2 * hashlib.sha256().digest_size
    data = sealed[size:]
    if not hmac.compare_digest(sealed[:size], _digest(token, purpose, data).encode()):
        raise StrangerError(f"no process of this job wrote what is there as its '{purpose}'")
    return data


def _digest(token: str, purpose: str, data: bytes) -> str:
    return hmac.new(token.encode(), purpose.encode() + b"\0" + data, hashlib.sha256).hexdigest()
