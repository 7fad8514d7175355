"""A process that commits and is killed: before the k-th operation on the files of its last commit, or not at all.

    with Committer() as committer:
        count = committer.run(folder, saves, kill_at=7)        # operations that it took; None: it was killed
        found, later = committer.go_on(folder, save)           # what the next start finds, and what the one after it

Each run is a fork of one process that has imported torch, and ends by SIGKILL: no handler, no `finally`, no atexit.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

from mrl.distributed.local_ranks import fork_server_context
from tests.ranks import PRELOAD

OPERATIONS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "open")
"""Python's audit events of what changes a folder; `open` only for writing."""


class Committer:
    def __enter__(self):
        context = fork_server_context(PRELOAD)
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        self.pipe = ours
        return self

    def __exit__(self, *error):
        self.pipe.send(None)
        self.process.join(10)

    def run(self, folder, saves, kill_at=0, **settings):
        """Operations of the last commit; None: killed. `saves`: (step, text) of each commit."""
        return self._ask(_save, str(folder), saves, settings, kill_at=kill_at)

    def go_on(self, folder, save, **settings):
        """What a start finds, which then commits, and what is found after it.

        Step and text to go on from, the steps that are whole, files left over, and notes.
        """
        return self._ask(_go_on, str(folder), save, settings)

    def _ask(self, function, *args, kill_at=0):
        self.pipe.send((function, args, kill_at))
        assert self.pipe.poll(60), "no answer"
        status, value = self.pipe.recv()
        assert status != "error", value
        return value


def _serve(pipe):
    import torch.distributed as dist  # before the forks
    from torch._C._distributed_c10d import HashStore

    import mrl.checkpoint.run_dir.checkpoint  # noqa: F401

    while (task := pipe.recv()) is not None:
        function, args, kill_at = task
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                answer = ("done", function(*args, count=_count(kill_at)))
            except BaseException:  # noqa: BLE001 -- whatever it is, the test must see it
                answer = ("error", traceback.format_exc())
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            said = stream.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        pipe.send(("killed", None) if killed else json.loads(said or b'["error", "it ended without a word"]'))


def _count(kill_at):
    """Begins to count; the process ends before operation `kill_at` (0: it does not end)."""
    counted = [0]

    def hear(event, args):
        if event in OPERATIONS and not (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
            counted[0] += 1
            if counted[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def begin():
        sys.addaudithook(hear)
        return counted

    return begin


def _save(folder, saves, settings, count):
    for each in saves[:-1]:
        _commit(folder, each, settings)
    counted = count()
    _commit(folder, saves[-1], settings)
    return counted[0]


def _commit(folder, save, settings):
    from mrl.checkpoint.run_dir.checkpoint import CheckpointManager
    from mrl.config.config import CheckpointConfig

    def write(path):
        (path / "actor" / "deep").mkdir(parents=True)
        for name in ("a", "deep/b", "c"):
            (path / "actor" / name).write_bytes(os.urandom(50))

    step, text = save
    state = {"step": step, "text": text}
    CheckpointManager(Path(folder), CheckpointConfig(**settings)).save(step, write, state, float(step % 3))


def _go_on(folder, save, settings, count):
    found = _look(folder)
    _commit(folder, save, settings)
    return found, _look(folder)


def _look(folder):
    from mrl.checkpoint.run_dir.checkpoint import CheckpointManager
    from mrl.checkpoint.run_dir.manifest import check_files, read_manifest
    from mrl.config.config import CheckpointConfig

    checkpoints = CheckpointManager(Path(folder), CheckpointConfig())
    for path in Path(folder).glob("step-*"):
        check_files(path, read_manifest(path))  # also one that was about to be removed
    found = checkpoints.find_latest(repair=True)
    steps = checkpoints.steps()
    for step in steps:
        checkpoints.read(checkpoints.path(step))
    left = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith("."))
    return [found and found.step, found and found.state["text"], steps, left, found.notes if found else []]
