"""Many episodes in few workers: each gets its own answers, or fails alone, with a cause, and nothing is left."""

import os
import time
from pathlib import Path

import psutil
import pytest

from mrl.environments.base import Action, Observation
from mrl.errors import UserError
from tests.distributed.worker_processes.attacks import PRELUDE
from tests.environments.episodes import HERE, descendants, pool, replies, said, step
from tests.rewards.test_scorer import gone, noted

TIME_LIMIT_S = 1.5  # for microseconds of work: room for a busy machine
LONG_LIMIT_S = 5.0  # where others must not reach it


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = descendants()
    yield
    assert all(gone(process) for process in descendants() - before)


def test_each_episode_gets_its_own_answers():
    with pool(num_workers=2) as many:
        for number in range(7):
            many.open(str(number), seed=100 + number, row={"n": number})
        assert {key: said(reply) for key, reply in replies(many, 7).items()} == {
            str(number): [f"reset 0 {100 + number}"] for number in range(7)
        }
        for turn in range(1, 4):
            for number in range(turn, 7):
                many.send(str(number), Action("more"))
            found = replies(many, 7 - turn)
            assert {key: said(reply) for key, reply in found.items()} == {
                str(number): [f"more {turn} {100 + number}"] for number in range(turn, 7)
            }
            many.close(str(turn))
        assert many.wait(0.05) == []
        last = step(many, "6", "end")
        assert last.observation == Observation(reward=4.0, terminated=True)
        assert last.observation.done


def test_nobody_answers_what_was_not_asked():
    with pool() as one:
        one.open("a", 0, {})
        with pytest.raises(ValueError, match="is open"):
            one.open("a", 0, {})
        with pytest.raises(ValueError, match="has not replied"):
            one.send("a", Action("x"))
        replies(one, 1)
        one.close("a")
        one.close("a")
        with pytest.raises(KeyError):
            one.send("a", Action("x"))


def test_a_closed_episode_says_no_more_and_its_id_is_free():
    with pool() as one:
        one.open("a", 1, {})
        one.close("a")
        one.open("a", 2, {})
        assert said(replies(one, 1)["a"]) == ["reset 0 2"]
        assert one.wait(0.05) == []


WAYS = {
    "raise": ("error", "KeyError: 'missing'"),
    "exit": ("error", "SystemExit: 3"),
    "die": ("crash", "exit status 4"),
    "hang": ("timeout", "longer than its limit of"),
    "spin": ("timeout", "longer than its limit of"),
    "large": ("too_large", "characters; an observation may have 1048576 bytes"),
    "nothing": ("malformed", "it returned a NoneType, expected an Observation"),
    "nan": ("malformed", "the reward nan, expected a finite number"),
    "assistant": ("malformed", "invalid messages"),
    "allocate": ("memory", "MemoryError"),
    "strays": ("malformed", "something else than its worker wrote"),
}

FAILS_ALONE = {
    "raise": ("error", "KeyError: 'missing'"),
    "exit": ("error", "SystemExit: 3"),
    "interrupt": ("error", "KeyboardInterrupt"),
    "generator": ("error", "GeneratorExit"),
    "cancel": ("error", "CancelledError"),
    "mute": ("error", "_MuteError, whose message cannot be read"),
    "nested": ("malformed", "nested too deep"),
    "facts": ("malformed", ""),
    "hostile": ("malformed", "KeyboardInterrupt"),
    "strange": ("malformed", ""),
    "endless": ("malformed", ""),
}
"""Faults in what an environment raises or returns: the worker goes on."""


@pytest.mark.slow
def test_each_fault_ends_its_episode_with_a_cause_and_no_other():
    with pool(num_workers=2, time_limit_s=LONG_LIMIT_S) as many:  # two of them wait for it, at one time
        for number, way in enumerate(WAYS):
            many.open(way, number, {}, label=f"train.jsonl:{number} (uid {number}, sample 0)")
        many.open("well", 99, {})
        replies(many, len(WAYS) + 1)
        for turn in (1, 2):
            for way in [*WAYS, "well"]:
                many.send(way, Action("on" if turn == 1 or way == "well" else way))
            found = replies(many, len(WAYS) + 1)
        assert said(found.pop("well")) == ["on 2 99"]
        for number, (way, (cause, why)) in enumerate(WAYS.items()):
            assert found[way].failure.cause == cause, found[way]
            assert found[way].failure.message.startswith(
                f"environment '{HERE}:Does' failed on train.jsonl:{number} (uid {number}, sample 0), turn 2: "
            )
            assert why in found[way].failure.message
            many.close(way)
        assert said(step(many, "well", "on")) == ["on 3 99"]


def test_what_an_environment_raises_or_returns_does_not_end_its_worker(capfd):
    with pool() as one:
        for way in [*FAILS_ALONE, "counts"]:
            one.open(way, 0, {})
        replies(one, len(FAILS_ALONE) + 1)
        process = one._workers[0].channel.process.pid
        for way, (cause, why) in FAILS_ALONE.items():
            failure = step(one, way, way).failure
            assert failure.cause == cause and why in failure.message, (way, failure)
        assert said(step(one, "counts", "on")) == ["on 1 0"]
        assert one._workers[0].channel.process.pid == process
    assert len(capfd.readouterr().err.splitlines()) < 20


def test_a_worker_that_dies_prints_little(capfd, monkeypatch):
    with pool() as one:
        one.open("a", 0, {})
        replies(one, 1)
        answer = "import mrl.environments._worker as w\ndef f(*_): raise KeyboardInterrupt\nw.answer = f"
        assert said(step(one, "a", f"run {answer}")) == ["ran 1 0"]
        assert step(one, "a", "on").failure.cause == "crash"
    assert len(capfd.readouterr().err.splitlines()) < 40


@pytest.mark.slow
@pytest.mark.parametrize("way", ["raise", "die", "hang"])
def test_a_reset_may_fail_as_well(way):
    with pool(time_limit_s=TIME_LIMIT_S) as one:
        one.open("bad", 0, {"begin": way})
        one.open("good", 0, {})
        found = replies(one, 2)
        assert found["bad"].failure.cause == WAYS[way][0] and "turn 0" in found["bad"].failure.message
        assert said(found["good"]) == ["reset 0 0"]


def test_the_episodes_of_a_killed_worker_are_replayed():
    with pool() as one:
        for key in "abc":
            one.open(key, ord(key), {})
        replies(one, 3)
        for text in ("x", "y"):
            for key in "ab":
                one.send(key, Action(text))
            replies(one, 2)
        [worker] = psutil.Process(one._workers[0].channel.process.pid).children()
        worker.kill()
        one._workers[0].channel.process.wait()
        one.send("a", Action("z"))
        assert {key: said(reply) for key, reply in replies(one, 1).items()} == {"a": [f"z 3 {ord('a')}"]}
        assert said(step(one, "c", "first")) == [f"first 1 {ord('c')}"]


def test_a_replay_that_observes_something_else_ends_its_episode():
    with pool(f"{HERE}:Counts") as one:
        one.open("a", 0, {})
        one.open("b", 0, {})
        replies(one, 2)
        one.send("b", Action("on"))
        replies(one, 1)
        one.send("a", Action("die"))
        assert replies(one, 1)["a"].failure.cause == "crash"
        failure = step(one, "b", "on").failure
        assert failure.cause == "replay" and "turn 0" in failure.message


def test_an_episode_goes_on_from_its_past():
    past = []
    with pool() as one:
        one.open("a", 5, {})
        seen = replies(one, 1)["a"].observation
        for text in ("x", "y"):
            past.append((seen, Action(text)))
            seen = step(one, "a", text).observation
    with pool() as one:
        one.open("a", 5, {}, past=past)
        one.open("b", 6, {}, past=past)
        found = replies(one, 2)
        assert found["a"].observation == seen
        assert found["b"].failure.cause == "replay"
        assert said(step(one, "a", "z")) == ["z 3 5"]


@pytest.mark.slow
def test_an_end_that_hangs_costs_nobody_else_anything():
    with pool(time_limit_s=TIME_LIMIT_S) as one:
        one.open("a", 0, {"close": "hang"})
        one.open("b", 1, {})
        replies(one, 2)
        one.close("a")
        assert said(step(one, "b", "on")) == ["on 1 1"]


@pytest.mark.slow
def test_what_an_environment_started_ends_with_its_worker(tmp_path):
    with pool(time_limit_s=TIME_LIMIT_S, writable=[tmp_path]) as one:
        one.open("a", 0, {})
        replies(one, 1)
        assert said(step(one, "a", f"start {tmp_path / 'ids'}")) == ["started 1 0"]
        assert step(one, "a", "hang").failure.cause == "timeout"
        assert all(map(gone, noted(tmp_path / "ids", 2)))


def confined(one, what):
    if any(what in missing for missing in one.missing_confinement):
        pytest.skip(f"this kernel has no such lock: {one.missing_confinement}")


def test_files_change_where_they_may_and_temporary_ones_go(tmp_path):
    (tmp_path / "open").mkdir()
    with pool(writable=[tmp_path / "open"]) as one:
        confined(one, "files")
        for key in "abc":
            one.open(key, 0, {})
        replies(one, 3)
        assert said(step(one, "a", f"write {tmp_path / 'open' / 'x'}")) == ["written 1 0"]
        failure = step(one, "b", f"write {tmp_path / 'x'}").failure
        assert failure.cause == "error" and "PermissionError" in failure.message
        [name] = said(step(one, "c", "temporary"))
        assert Path(name).read_text() == "x"
    assert not Path(name).parent.exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("name", "network"), [("Does", False), ("Does", True), ("Online", False)])
def test_sockets_are_made_only_where_asked_for(name, network):
    with pool(f"{HERE}:{name}", network=network) as one:
        confined(one, "network")
        network = network or name == "Online"
        one.open("a", 0, {})
        replies(one, 1)
        reply = step(one, "a", "socket")
        assert (reply.failure is None) == network
        assert network or "PermissionError" in reply.failure.message


def test_an_environment_signals_nobody_outside():
    with pool() as one:
        confined(one, "files")
        one.open("a", 0, {})
        replies(one, 1)
        reply = step(one, "a", f"signal {os.getpid()}")
    if reply.failure is None:
        pytest.skip("this kernel's Landlock does not know signals (Linux 6.12 does)")
    assert "PermissionError" in reply.failure.message


KEEPER = "import os, resource, socket\nkeeper, trainer = os.getppid(), {trainer}\n"

REACHES = {
    "limit of the keeper": "resource.prlimit(keeper, resource.RLIMIT_CPU, (0, 0))",
    "limit of the trainer": "resource.prlimit(trainer, resource.RLIMIT_NOFILE, (0, 0))",
    "limit by a child": "assert os.system(f'prlimit --pid {keeper} --cpu=0') == 0",
    "kill the keeper": "os.kill(keeper, 9)",
    "kill the keeper's group": "os.killpg(keeper, 9)",
    "pidfd of the keeper": "os.pidfd_open(keeper)",
    "kill all": "os.kill(-1, 0)",
    "nice the keeper": "os.setpriority(os.PRIO_PROCESS, keeper, 19)",
    "nice the user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "affinity of the trainer": "os.sched_setaffinity(trainer, {min(os.sched_getaffinity(0))})",
    "idle trainer": "os.sched_setscheduler(trainer, os.SCHED_IDLE, os.sched_param(0))",
    "ioprio": "call('ioprio_set', 1, trainer, 3 << 13)",
    "signals by input": "import fcntl\nread, write = os.pipe()\nfcntl.fcntl(read, fcntl.F_SETOWN, keeper)",
    "type for others": "import fcntl, pty\nfcntl.ioctl(pty.openpty()[1], 0x5412, b'x')",
    "shared memory": "call('shmget', 0, 4096, 0o1600)",
    "semaphores": "call('semget', 0, 1, 0o1600)",
    "messages": "call('msgget', 0, 0o1600)",
    "message queue": "call('mq_open', b'mrl-attack', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "key": "call('add_key', b'user', b'mrl-attack', b'x', 1, -4)",
    "namespace": "call('unshare', 0x10000000)",
    "namespace of a child": "call('clone', 0x10000000 | 17, 0, 0, 0, 0) or os._exit(0)",
    "mount": "reaches('mount', b'none', b'/mnt', b'tmpfs', 0, None)",
    "bpf": "reaches('bpf', 0, bytes(128), 128)",
    "module": "reaches('init_module', bytes(8), 8, b'')",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "io_uring": "call('io_uring_setup', 1, bytes(120))",
    "datagrams": "a, b = socket.socketpair(type=socket.SOCK_DGRAM)",
    "socket in a thread": "start.set(); assert done.wait(30) and found",
}


def test_an_environment_reaches_nothing_above_its_worker():
    with pool("tests.environments.threaded:Threaded", time_limit_s=60.0) as one:
        confined(one, "")
        process = psutil.Process(one._workers[0].channel.process.pid)
        for name in REACHES:
            one.open(name, 0, {})
        replies(one, len(REACHES))
        prelude = (
            PRELUDE
            + KEEPER.format(trainer=os.getpid())
            + "from tests.environments.threaded import start, done, found\n"
        )
        effects = [name for name, source in REACHES.items() if not step(one, name, f"run {prelude}{source}").failure]
        assert effects == []
        assert process.is_running() and one._workers[0].channel.process.pid == process.pid


MAY = {
    "subprocess": "import subprocess, sys\nassert subprocess.run([sys.executable, '-c', ''], check=True)",
    "own limits": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "child ended": "import subprocess\nc = subprocess.Popen(['sleep', '60']); c.kill(); assert c.wait() == -9",
    "nice": "import os; os.nice(1); os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "modes of own files": "import os, tempfile\nwith tempfile.NamedTemporaryFile() as f: os.chmod(f.name, 0o600)",
    "threads": "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "asyncio": "import asyncio; asyncio.run(asyncio.create_subprocess_exec('true'))",
    "shared map": "import mmap; mmap.mmap(-1, 4096)[0] = 1",
    "fork": "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)",
}


def test_an_environment_may_do_what_workers_need():
    with pool() as one:
        for name in MAY:
            one.open(name, 0, {})
        replies(one, len(MAY))
        found = {name: step(one, name, f"run {source}").failure for name, source in MAY.items()}
    assert {name: failure for name, failure in found.items() if failure} == {}


def test_the_folder_of_a_killed_keeper_goes_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pool() as one:
        one.open("a", 0, {})
        replies(one, 1)
        [name] = said(step(one, "a", "temporary"))
        with pool() as other:  # a living one is left alone
            other.open("b", 0, {})
            replies(other, 1)
            assert Path(name).exists()
        one._workers[0].channel.process.kill()
        one._workers[0].channel.process.wait()
        assert Path(name).exists()
    with pool() as other:
        assert len(list(tmp_path.iterdir())) == 1 and not Path(name).exists()
    assert list(tmp_path.iterdir()) == []


def test_processes_are_counted():
    with pool(max_processes=4) as one:
        one.open("a", 0, {})
        replies(one, 1)
        failure = step(one, "a", "many 6").failure
        assert failure.cause == "processes" and "4 processes" in failure.message


@pytest.mark.slow
def test_nothing_waits_unless_asked_to():
    with pool(time_limit_s=TIME_LIMIT_S) as one:
        one.open("a", 0, {})
        replies(one, 1)
        start = time.monotonic()
        one.send("a", Action("hang"))
        assert one.poll() == [] and one.wait(0.01) == []
        assert time.monotonic() - start < TIME_LIMIT_S
        assert replies(one, 1)["a"].failure.cause == "timeout"


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("gess", {}, "there is no 'gess'. Did you mean 'guess'"),
        ("guess", {"hight": 3}, "unexpected keyword argument 'hight'.* parameters are .*high"),
        ("guess", {"low": 3, "high": 1}, "expected low <= high"),
        (f"{HERE}:Missing", {}, "has no 'Missing'"),
        (f"{HERE}:NUMBER", {}, "is a int, expected a class"),
        (f"{HERE}:NoEnvironment", {}, "NoEnvironment"),
        (f"{HERE}:Refuses", {}, "cannot be made: RuntimeError: no licence"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_the_start(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        pool(name, kwargs)
