"""torch's rendezvous for the torchruns of a job, with an authenticated store.

torch's c10d rendezvous keeps its state as a pickle in a store that accepts any connection; each launcher unpickles it.
Here the state is JSON, authenticated with the job's token: what another process writes is ignored, and overwritten at
the next heartbeat.
"""

from __future__ import annotations

import json
import pickle
from datetime import datetime, timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    c10d_rendezvous_backend,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from mrl.distributed import job_secret, rendezvous
from mrl.errors import first_line

PURPOSE = "rendezvous"
DEFAULT_PORT = 29500


def install(secret: str) -> None:
    """Replaces the rendezvous backends `static` and `c10d` of this process by those of this file."""
    vars(static_tcp_rendezvous)["create_rdzv_handler"] = _create_static
    vars(c10d_rendezvous_backend)["create_backend"] = lambda parameters: _create_backend(parameters, secret)


class SealedBackend(RendezvousBackend):
    """Rendezvous state in a store that only processes with the job's token can write."""

    def __init__(self, store: Store, run_id: str, secret: str) -> None:
        """Joins the rendezvous `run_id`; launchers with another secret are not part of it."""
        self._store, self._secret = store, secret
        self._key = f"mrl.rendezvous.{job_secret.derive_name(secret, run_id)}"
        self._last = encode(_RendezvousState())
        self._first = job_secret.sign_data(secret, PURPOSE, self._last)
        self._ask("compare_set", self._key, "", self._first.decode())

    @property
    def name(self) -> str:
        """Torch's name of this kind of rendezvous."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token]:
        """Returns the state, pickled as torch's handler expects it, and the token for `set_state`."""
        there = self._ask("check", [self._key])
        return self._opened(self._ask("get", self._key) if there else b"")

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool]:
        """Writes a state unless another one was written since `token`.

        Returns:
            (current state, its token, whether `state` was written).
        """
        expected = self._first if token is None else token
        # torch's handler pickled `state` in this process: unpickling it is safe
        sealed = job_secret.sign_data(self._secret, PURPOSE, encode(pickle.loads(state)))
        if self._is_ours(expected):
            found = self._ask("compare_set", self._key, expected.decode(), sealed.decode())
        else:  # a process outside the job wrote the current value
            self._ask("set", self._key, sealed)
            found = sealed
        return (*self._opened(found), found == sealed)

    def _is_ours(self, sealed: bytes) -> bool:
        try:
            job_secret.verify_data(self._secret, PURPOSE, sealed)
        except job_secret.AuthenticationError:
            return False
        return True

    def _opened(self, sealed: bytes) -> tuple[bytes, Token]:
        if self._is_ours(sealed):
            self._last = job_secret.verify_data(self._secret, PURPOSE, sealed)
        return pickle.dumps(decode(self._last)), sealed

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, name)(*arguments)
        except RuntimeError as error:
            raise RendezvousConnectionError(
                f"torchrun's rendezvous store does not answer: {first_line(error)}"
            ) from error


def encode(state: _RendezvousState) -> bytes:
    """Returns a rendezvous state, with all its attributes, as JSON."""
    return json.dumps({name: _to_json(value) for name, value in vars(state).items()}, sort_keys=True).encode()


def decode(data: bytes) -> _RendezvousState:
    """Returns the state that `encode` wrote."""
    state = _RendezvousState()
    vars(state).update({name: _from_json(value) for name, value in json.loads(data).items()})
    return state


def _to_json(value: Any) -> Any:
    if isinstance(value, _NodeDesc):
        return {"node": [value.addr, value.pid, value.local_id]}
    if isinstance(value, datetime):
        return {"time": value.isoformat()}
    if isinstance(value, set):
        return {"set": [_to_json(item) for item in sorted(value)]}
    if isinstance(value, dict):
        return {"map": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return _NodeDesc(*inner)
    if kind == "time":
        return datetime.fromisoformat(inner)
    if kind == "set":
        return {_from_json(item) for item in inner}
    return {_from_json(key): _from_json(item) for key, item in inner}


class _StaticRendezvous(StaticTCPRendezvous):
    """Static rendezvous whose store listens only where the job's hosts reach it."""

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            alone = self.world_size == 1
            self.master_addr = rendezvous.LOOPBACK if alone else self.master_addr
            self._store = rendezvous.open_store(
                self.master_addr, self.master_port, serves=self.rank == 0, one_host=alone, timeout=self.timeout
            )
        return super().next_rendezvous()


def _create_static(parameters: RendezvousParameters) -> _StaticRendezvous:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    timeout_s = int(parameters.config.get("timeout", static_tcp_rendezvous._default_timeout_seconds))
    rank = int(parameters.config.get("rank", 0))
    return _StaticRendezvous(host, port, rank, parameters.max_nodes, parameters.run_id, timeout_s)


def _create_backend(parameters: RendezvousParameters, secret: str) -> tuple[SealedBackend, Any]:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    alone = parameters.max_nodes == 1
    serves = parameters.get_as_bool("is_host")
    if serves is None:
        serves = alone or _matches_machine_hostname(host)
    timeout = timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    store = rendezvous.open_store(
        rendezvous.LOOPBACK if alone else host, port, serves=serves, one_host=alone, timeout=timeout
    )
    return SealedBackend(store, parameters.run_id, secret), store
