"""Checkpoint folders that were changed by anything: a message, or a run that goes on; no traceback, no hang.

    python -m tests.checkpoint.run_dir.test_commit_fuzz --number 2000 --seed 0

One job is built, and taken to a commit; each case changes a copy of its folder (a file cut, emptied, flipped, removed,
a folder or a loop in its place, other JSON), and in half of them makes the hashes fit again, as a forger would.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from mrl.checkpoint.run_dir.checkpoint import CheckpointManager
from mrl.config.config import CheckpointConfig, load
from mrl.distributed import launch
from mrl.errors import UserError
from mrl.megatron import parallel_state
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from tests.e2e import runs
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = [
    "observe.console=off",
    "train.num_steps=1",
    "train.warm_start.num_steps=0",
    "algorithm.kl_in=none",
    "~algorithm.kl_coef",
]
LIMIT_S = 60
JSON = [
    "null",
    "[]",
    "{}",
    "7",
    '"x"',
    "[" * 5000,
    '{"a": ' * 3000,
    "1e999",
    "NaN",
    "\ud800".encode("utf-8", "surrogatepass"),
]
GONE, MOST_KEYS = object(), 12
VALUES = [None, [], {}, -1, 2**70, 1e400, "x", True, [[]], {"a": None}, "\ud800", "../../x", ""]


def change_value(draw, tree):
    """Replaces, or removes, one value somewhere in JSON."""
    at = tree
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = draw.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.7:
            at = at[key]
            continue
        if draw.random() < 0.2:
            del at[key]
        else:
            at[key] = draw.choice(VALUES)
        return


def change(draw, folder):
    """Changes a commit; returns how, in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    small = [path for path in files if path.suffix in (".json", ".pt") or path.name == ".metadata"]
    path = draw.choice(small if draw.random() < 0.7 else files)
    data = path.read_bytes()
    kind = draw.choice(["cut", "empty", "flip", "remove", "folder", "loop", "grow", "other", "value", "value", "value"])
    if kind == "value" and path.suffix != ".json":
        kind = "flip"
    if kind == "cut":
        path.write_bytes(data[: draw.randrange(len(data) + 1)])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flip":
        changed = bytearray(data)
        for _ in range(draw.choice([1, 3, 50])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif kind == "grow":
        path.write_bytes(data + draw.randbytes(draw.choice([1, 100])))
    elif kind == "other":
        other = draw.choice(JSON)
        path.write_bytes(other if isinstance(other, bytes) else other.encode())
    elif kind == "value":
        tree = json.loads(data)
        change_value(draw, tree)
        path.write_text(json.dumps(tree))
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
    forged = draw.random() < 0.5 and path.name != "commit.json" and path.is_file()
    if forged:
        forge(folder, path)
    return f"{kind} {path.relative_to(folder)}{', forged' if forged else ''}"


def forge(folder, path):
    """Makes the record of a commit fit a file that was changed."""
    record = json.loads((folder / "commit.json").read_bytes())
    content = path.read_bytes()
    record["files"][path.relative_to(folder).as_posix()] = {
        "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()
    }  # fmt: skip
    (folder / "commit.json").write_text(json.dumps(record))


def random_changes(number, seed):
    """So many changes drawn from a seed."""
    draw = random.Random(seed)
    return [partial(change, draw)] * number


def changes_of_state():
    """Each key of state.json removed, and given a value of each kind of JSON."""

    def change_key(number, value, folder):
        state = json.loads((folder / "state.json").read_bytes())
        keys = sorted(state)
        key = keys[number % len(keys)]
        if value is GONE:
            del state[key]
        else:
            state[key] = value
        (folder / "state.json").write_text(json.dumps(state))
        forge(folder, folder / "state.json")
        return f"{key} = {value!r}"

    return [
        partial(change_key, number, value) for number in range(MOST_KEYS) for value in (GONE, None, [], {}, "x", -1)
    ]


def fuzz(folder, changes, tell=lambda text: None):
    """What became of each case; the ones that end in something else than a message."""
    folder = Path(folder)
    words = runs.arguments(folder, STEPS)[1:]
    plan = build_run_plan(load(words[0], words[1:]))
    with open_trainer(plan) as trainer:
        trainer.resume()
        trainer.checkpointing.write(0, {})
        trainer.checkpointing.write(1, {})
        whole = trainer.run.checkpoints
        counts, wrong = Counter(), []
        signal.signal(signal.SIGALRM, hang)
        assert len(json.loads((whole / "step-00000001" / "state.json").read_bytes())) <= MOST_KEYS
        for case, change_folder in enumerate(changes):
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            what = change_folder(copy / "step-00000001")
            trainer.checkpointing.checkpoints = CheckpointManager(copy, CheckpointConfig())
            signal.alarm(LIMIT_S)
            try:
                trainer.checkpointing.resume_point = trainer.checkpointing.checkpoints.find_latest(repair=True)
                trainer.resume()
                counts[f"resumed from step {trainer.checkpointing.resume_point.step}"] += 1
            except UserError:
                counts["refused"] += 1
            except BaseException:  # noqa: BLE001 -- what is looked for
                wrong.append(f"case {case}: {what}\n{traceback.format_exc()}")
                tell(wrong[-1])
            finally:
                signal.alarm(0)
            if case % 100 == 99:
                tell(f"{case + 1} cases: {dict(counts)}, {len(wrong)} wrong")
        trainer.checkpointing.checkpoints = CheckpointManager(whole, CheckpointConfig())
    return dict(counts), wrong


def hang(number, frame):
    raise TimeoutError("hangs")


def in_pool(folder, kind, arguments, ports):
    parallel_state.destroy()
    launch.shutdown_distributed()
    os.environ["MASTER_PORT"] = str(ports[0])
    try:
        return fuzz(folder, kind(*arguments))
    finally:
        os.environ["MASTER_PORT"] = str(ports[1])
        launch.init_distributed("cpu", num_threads=1)


def test_a_changed_checkpoint_is_told_of_or_goes_on(tmp_path):
    ports = [runs.free_port(), runs.free_port()]
    ((counts, wrong),) = run_ranks(1, in_pool, str(tmp_path), random_changes, (40, 0), ports)
    assert wrong == []
    assert sum(counts.values()) == 40 and counts["refused"] and counts["resumed from step 0"]


def test_a_state_without_one_of_its_keys_or_with_another_value_is_told_of_or_goes_on(tmp_path):
    ports = [runs.free_port(), runs.free_port()]
    ((counts, wrong),) = run_ranks(1, in_pool, str(tmp_path), changes_of_state, (), ports)
    assert wrong == []
    assert counts["refused"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = fuzz(
            folder,
            random_changes(given.number, given.seed),
            lambda text: print(text, flush=True),  # noqa: T201
        )
    print(counts, f"{len(wrong)} wrong of {given.number}")  # noqa: T201
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main() > 0)
