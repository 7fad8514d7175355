"""Launchers that meet: the state survives the way through JSON, and strangers are passed over."""

import os
import pickle
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from mrl.distributed import job_secret
from mrl.distributed.torchrun_rendezvous import SealedBackend, decode, encode
from mrl.distributed.watchdog.torchrun_agent import is_on_one_host, with_local_addr, without_log_dir

NODES = st.builds(_NodeDesc, st.text(max_size=9), st.integers(0, 2**22), st.integers(0, 9))
TIMES = st.datetimes(timezones=st.just(timezone.utc)) | st.datetimes()


@st.composite
def states(draw):
    state = _RendezvousState()
    state.round, state.complete, state.closed = draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans())
    state.deadline = draw(st.none() | TIMES)
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 9), max_size=3))
    state.wait_list, state.redundancy_list = draw(st.sets(NODES, max_size=3)), draw(st.sets(NODES, max_size=3))
    state.last_heartbeats = draw(st.dictionaries(NODES, TIMES, max_size=3))
    return state


@settings(max_examples=50, deadline=None)
@given(states())
def test_a_state_survives(state):
    assert vars(decode(encode(state))) == vars(state)


@pytest.fixture
def stores():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=9))
    return server, TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=9))


class Payload:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def state_of(round_):
    state = _RendezvousState()
    state.round = round_
    state.last_heartbeats = {_NodeDesc("a", 1, 0): datetime(2030, 1, 1)}
    return state


def test_two_hosts_share_a_state_that_is_no_pickle(stores):
    first, second = (SealedBackend(store, "id", "secret") for store in stores)
    _, mark, is_set = first.set_state(pickle.dumps(state_of(4)))
    assert is_set
    found, same = second.get_state()
    assert vars(pickle.loads(found)) == vars(state_of(4)) and same == mark
    (key,) = stores[0].list_keys()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(stores[0].get(key))


def test_of_two_that_write_at_once_one_is_told_what_the_other_wrote(stores):
    first, second = (SealedBackend(store, "id", "secret") for store in stores)
    _, mark = first.get_state()
    assert second.set_state(pickle.dumps(state_of(4)), mark)[2]
    found, _, is_set = first.set_state(pickle.dumps(state_of(5)), mark)
    assert not is_set and pickle.loads(found).round == 4


@pytest.mark.parametrize("secret", ["", "secret"])
def test_a_strangers_state_is_passed_over_and_then_overwritten(secret, stores, tmp_path):
    backend = SealedBackend(stores[0], "id", secret)
    backend.set_state(pickle.dumps(state_of(4)))
    (key,) = stores[1].list_keys()
    payload = pickle.dumps(Payload(str(tmp_path / "harm")))
    for written in (payload, b"", b"garbage", job_secret.sign_data("another", "rendezvous", encode(state_of(9))), None):
        if written is None:
            stores[1].delete_key(key)
        else:
            stores[1].set(key, written)
        found, mark = backend.get_state()
        assert pickle.loads(found).round == 4
        assert backend.set_state(found, mark)[2]
        assert pickle.loads(SealedBackend(stores[1], "id", secret).get_state()[0]).round == 4
    assert not (tmp_path / "harm").exists()


def test_one_host_is_told_from_several():
    assert is_on_one_host(["--nnodes", "1", "-m", "mrl"]) and is_on_one_host(["-m", "mrl"])
    assert not is_on_one_host(["--nnodes=2"]) and not is_on_one_host(["--nnodes", "1:2"])


def test_one_host_is_met_on_loopback_by_whatever_name():
    words = ["--nnodes", "1", "--rdzv-endpoint", "some-name:29500"]
    assert with_local_addr(words) == ["--local-addr", "127.0.0.1", *words]


def test_files_of_output_are_made_where_they_are_asked_for():
    assert without_log_dir(["--nnodes", "1", "-m", "mrl"])[:2] == ["--log-dir", os.devnull]
    for asked in (["--tee", "3"], ["--log-dir=x"], ["-r", "1"]):
        assert without_log_dir([*asked, "-m", "mrl"])[0] == asked[0]
