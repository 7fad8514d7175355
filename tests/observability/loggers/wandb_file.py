"""Reads what W&B wrote offline: the records of `offline-run-*/run-*.wandb`.

Layout: seven bytes of head, then LevelDB's log format (blocks of 32 KiB; crc32, length, type, data), each record a
message of `wandb_internal.proto`.
"""

import json
import struct
import time

BLOCK = 32768
HEAD = struct.Struct("<IHB")
WHOLE, LAST = 1, 4
WRITTEN_WITHIN_S = 30.0  # W&B's own process writes the last record; on a busy machine that takes a while


def records(folder):
    """The records of each offline run in a run folder, in the order of the starts; waits until each has ended."""
    end = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        runs = [list(_records(path)) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
        if runs and all(any(record.HasField("exit") for record in run) for run in runs):
            return runs
        assert time.monotonic() < end, [len(run) for run in runs]
        time.sleep(0.05)


def history(run):
    """What was logged, call by call: {name: value}."""
    calls = [
        {_name(item): json.loads(item.value_json) for item in r.history.item} for r in run if r.HasField("history")
    ]
    return [{name: value for name, value in call.items() if not name.startswith("_")} for call in calls]


def summary(run):
    """The last value of each name."""
    return {_name(item): json.loads(item.value_json) for r in run for item in r.summary.update}


def _name(item):
    return item.key or "/".join(item.nested_key)


def _records(path):
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    position, parts = 7, b""
    while position + HEAD.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEAD.size:
            position += left
            continue
        _, length, kind = HEAD.unpack_from(data, position)
        position += HEAD.size + length
        parts += data[position - length : position]
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""
