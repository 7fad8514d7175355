"""One command line run on broken input, and what must hold whatever the input was.

A case runs in a forked child through `mrl.commands.cli.main`, so that a hang ends and nothing of it stays. It must end
in time, with a status of README's, leave no process behind and print no traceback; status 2 is told in one message.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

STATUSES = {0, 2, 70, 75, 130, 143}
"""Those that README documents."""
LIMIT_S = 60.0
"""The slowest good case takes 3 s alone; other work may share the processors."""
MEMORY_BYTES = 24 << 30
"""Address space of a child: what would fill the machine fails in the child."""
MAX_MESSAGE = 20_000
"""Characters that anybody would look at."""

BASE = """
run: {output_dir: "{folder}/run", device: cpu, num_threads: 1}
train: {num_steps: 1, batch_size: 2}
model:
  preset: qwen2_tiny
  overrides: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}
  tokenizer: "char:0123456789+<>#"
  dtype: float32
actor: {max_tokens_per_microbatch: 256}
rollout: {n: 2, prompt_length: 12, response_length: 4, max_num_seqs: 8, gpu_memory_utilization: 0.01}
reward: {functions: [{name: exact_match}], time_limit_s: 5}
data: {train_files: ["{folder}/train.jsonl"], shuffle: false}
observe: {console: "off", tensorboard: false, report: false}
"""

ROWS = '{"prompt": "<1+1>", "answer": "2"}\n' * 3

COMMANDS = {
    "train": ("train",),
    "dry run": ("train", "--dry-run"),
    "plan": ("plan",),
    "launch": ("launch", "--via", "torchrun", "--dry-run"),
    "rehearse": ("rehearse", "--dry-run", "--max-ranks", "2", "--output-dir", "rehearsal"),
    "evaluate": ("evaluate",),
    "doctor": ("doctor", "--timeout-s", "20"),
}


@dataclass
class Case:
    """A broken input and the command that meets it.

    Attributes:
        name: Kind and number, from which the same case is made again.
        files: Name -> content, beside those of the base.
        command: A key of COMMANDS.
        overrides: Words after the config.
        make: Name -> "folder", "fifo", "unreadable" or "loop": special files in the place of a name.
    """

    name: str
    files: dict[str, bytes] = field(default_factory=dict)
    command: str = "dry run"
    overrides: tuple[str, ...] = ()
    make: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a case ended; `wrong` is "" where everything holds."""

    case: Case
    status: int | None
    said: str
    seconds: float
    wrong: str


def run(case: Case, folder: Path) -> Outcome:
    """Runs a case in an empty folder of its own."""
    folder.mkdir(parents=True)
    write(case, folder)
    argv = words(case, folder)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(argv, folder)
    status = _wait(child, began + LIMIT_S)
    seconds = time.monotonic() - began
    left = _kill_group(child)
    if status is None:
        os.waitpid(child, 0)
    said = (folder / "stderr").read_bytes().decode(errors="replace")
    return Outcome(case, status, said, seconds, _wrong(status, said, left, case.command))


def words(case: Case, folder: Path) -> list[str]:
    """The command line, after `mrl`."""
    command, *options = COMMANDS[case.command]
    return [command, str(folder / "config.yaml"), *case.overrides, *options]


def write(case: Case, folder: Path) -> None:
    """Puts the base and the case's files into the folder."""
    base = {"config.yaml": BASE.encode(), "train.jsonl": ROWS.encode()}
    for name, content in {**base, **case.files}.items():
        (folder / name).write_bytes(content.replace(b"{folder}", os.fsencode(folder)))
    for name, kind in case.make.items():
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(b"x")
            path.chmod(0)


def _child(argv: list[str], folder: Path) -> None:
    """Never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name, flags, 0o600), number)
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        from mrl.commands.cli import main

        status = main(argv)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 -- it is what is looked for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, end: float) -> int | None:
    """Exit status, minus a signal's number, or None after the time."""
    pause = 0.002
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return None


def _kill_group(child: int) -> bool:
    """Ends what the child started; whether there was anything."""
    time.sleep(0.01)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _wrong(status: int | None, said: str, left: bool, command: str) -> str:
    if status is None:
        return "hangs"
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if status not in STATUSES:
        return f"status {status}"
    if status == 2 and command != "doctor" and said.count("mrl: error: ") + said.count("error: argument") != 1:
        return "no message, or several"
    if len(said) > MAX_MESSAGE:
        return f"a message of {len(said)} characters"
    return "leaves processes" if left else ""
