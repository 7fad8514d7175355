"""Samples in flight come back from a commit bit for bit, at any number of replicas, or the commit is refused."""

import math
import random
import struct
from dataclasses import fields, replace

import pytest
import torch

from mrl.errors import UserError
from mrl.trainer import inflight_samples
from mrl.trainer.inflight_samples import BufferSnapshot
from mrl.types import Episode, PartialRollout, Prompt, Rollout, SampleTable, SamplingMask
from tests.full_disk import full_disk

TALK = Episode(
    "finished",
    2,
    3,
    1,
    (0.25, 0.25),
    "fine",
    None,
    {"rounds": 2.0, "tool": "search"},
    (("policy", "a"), ("environment", "b\n")),
)
FAILED = Episode("environment_failed", 1, 0, 0, (0.0,), "", "it died", {}, ())


CONSTANT = ("policy_version", "reward_parts", "reward_facts")
"""Of all samples here, and not their defaults."""


def prompt_at(uid):
    return Prompt(
        uid, (uid, 7), f"p{uid}", answer=str(uid), extra={"level": uid}, source=f"rows:{uid}", data_source="d"
    )


def support_of(draw, count):
    counts = [draw.randrange(4) for _ in range(count)]
    ids = [draw.randrange(150_000) for _ in range(sum(counts))]
    return SamplingMask(torch.tensor(ids, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))


def samples(seed, uids, *, kept=False, routed=None):
    """Whole and begun responses of all kinds; log-probabilities of every exponent."""
    draw = random.Random(seed)
    whole, begun = [], []
    for uid in uids:
        for index in range(3):
            count = draw.randint(1, 9)
            ids = [draw.randrange(150_000) for _ in range(count)]
            logprobs = [-draw.random() * 10 ** draw.randint(-300, 2) for _ in ids]
            first = draw.randint(1, count)
            runs = ((3, first), (5, count - first)) if count > first else ((5, count),)
            support = support_of(draw, count) if kept else None
            mass = [-draw.random() for _ in ids] if kept else []
            if draw.random() < 0.4:
                parts = tuple(ids), tuple(logprobs), runs, support, tuple(mass)
                begun.append(PartialRollout(prompt_at(uid), index, *parts))
                continue
            talk = draw.choice([None, TALK, FAILED])
            shape = (count + 2, 4, 2)
            whole.append(
                Rollout(
                    prompt_at(uid),
                    index,
                    ids,
                    logprobs,
                    draw.choice(["stop", "length"]),
                    5,
                    response_text="µ\ud83d" if index else "said \u2028 so",
                    reward=draw.choice([math.nan, 0.1, -0.0]),
                    reward_parts={"math": 1 / 3, "none": math.nan},
                    reward_facts={"acc": 0.1, "pred": "ja"},
                    reward_error=draw.choice([None, "it failed"]),
                    reward_cached=draw.random() < 0.5,
                    routed_experts=None if routed is None else torch.randint(-1, 100, shape, dtype=routed),
                    sampled_mask=[draw.random() < 0.7 for _ in ids] if talk else None,
                    episode=talk,
                    kept_tokens=support,
                    log_kept_mass=mass,
                    version_runs=runs if len(runs) > 1 else (),
                )
            )
    return whole, begun


def bits(value):
    """A value that is equal where each float has the same bits."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, SamplingMask | Rollout | PartialRollout | Episode):
        return type(value), {item.name: bits(getattr(value, item.name)) for item in fields(value)}
    return value


def test_every_field_is_put_to_the_test():
    whole, begun = samples(0, range(9), kept=True, routed=torch.int8)
    for found in (whole, begun, [one.episode for one in whole if one.episode is not None]):
        for item in fields(found[0]):
            assert len({repr(bits(getattr(one, item.name))) for one in found}) > 1 or item.name in CONSTANT, item.name


def by_place(found):
    return sorted(found, key=lambda one: (one.prompt.uid, one.sample_index))


TABLES = {"last": torch.full((2, len(SampleTable.FACTS)), math.nan, dtype=torch.float64)}
KINDS = [
    {},
    {"kept": True},
    {"routed": torch.int8},
    {"routed": torch.int16, "kept": True},
]


def written(folder, kind, replicas=2):
    """Two uids on each replica."""
    parts = [samples(replica, (4 * replica, 4 * replica + 1), **kind) for replica in range(replicas)]
    for replica, (whole, begun) in enumerate(parts):
        kept = BufferSnapshot(SampleTable.FACTS, TABLES, whole, begun)
        inflight_samples.write(folder, kept, replica=replica, first=replica == 0)
    return parts


def read(folder, replica, number):
    return inflight_samples.read(folder, replica=replica, num_replicas=number, prompt_at=prompt_at)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_replica_gets_its_samples_back_bit_for_bit(kind, tmp_path):
    parts = written(tmp_path, kind)
    assert all(whole and begun for whole, begun in parts)
    for replica, (whole, begun) in enumerate(parts):
        found = read(tmp_path, replica, 2)
        assert bits(by_place(found.rollouts)) == bits(by_place(whole))
        assert bits(by_place(found.partial_rollouts)) == bits(by_place(begun))
        assert found.columns == SampleTable.FACTS and bits(dict(found.tables)) == bits(TABLES)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_another_number_of_replicas_shares_the_same_samples(number, tmp_path):
    parts = written(tmp_path, {"kept": True}, replicas=3)
    found = [read(tmp_path, replica, number) for replica in range(number)]
    for name, place in (("rollouts", 0), ("partial_rollouts", 1)):
        all_found = [one for kept in found for one in getattr(kept, name)]
        assert bits(by_place(all_found)) == bits(by_place([one for part in parts for one in part[place]]))
    homes = {one.prompt.uid: at for at, kept in enumerate(found) for one in (*kept.rollouts, *kept.partial_rollouts)}
    assert homes == {uid: uid // 4 % number for uid in homes}


def test_a_rank_that_does_not_sample_gets_the_tables_alone(tmp_path):
    written(tmp_path, {})
    found = read(tmp_path, None, 2)
    assert (found.rollouts, found.partial_rollouts) == ([], []) and bits(dict(found.tables)) == bits(TABLES)


def test_a_prompt_keeps_the_ids_with_which_it_was_sampled(tmp_path):
    (whole, begun), _ = written(tmp_path, {})
    longer = inflight_samples.read(
        tmp_path, replica=0, num_replicas=2, prompt_at=lambda uid: replace(prompt_at(uid), prompt_ids=(1, 2, 3, 4))
    )
    assert {one.prompt.prompt_ids for one in (*longer.rollouts, *longer.partial_rollouts)} == {(0, 7), (1, 7)}
    assert bits(by_place(longer.rollouts)) == bits(by_place(whole)) and len(longer.partial_rollouts) == len(begun)


def test_nothing_in_flight_writes_nothing(tmp_path):
    inflight_samples.write(tmp_path, BufferSnapshot(), replica=0, first=True)
    assert list(tmp_path.iterdir()) == []
    assert read(tmp_path, 0, 1) == BufferSnapshot()


def test_a_table_alone_comes_back_without_samples(tmp_path):
    inflight_samples.write(tmp_path, BufferSnapshot(SampleTable.FACTS, TABLES), replica=0, first=True)
    found = read(tmp_path, 0, 1)
    assert (found.rollouts, found.partial_rollouts) == ([], [])


def test_a_full_disk_is_named(tmp_path):
    with full_disk(tmp_path / "disk", "64k") as fill:
        fill()
        (tmp_path / "disk" / inflight_samples.FOLDER).mkdir()
        with pytest.raises(OSError, match=r"No space left.*in_flight/table\.safetensors"):
            written(tmp_path / "disk", {})


def cut(data):
    return data[: len(data) // 2]


DAMAGE = {
    "table.safetensors cut": ("table.safetensors", cut),
    "table.safetensors gone": ("table.safetensors", None),
    "table.safetensors empty": ("table.safetensors", lambda data: b""),
    "tensors cut": ("replica-0.safetensors", cut),
    "tensors gone": ("replica-0.safetensors", None),
    "tensors of another replica": ("replica-0.safetensors", "replica-1.safetensors"),
    "records cut": ("replica-0.json", cut),
    "records of another kind": ("replica-0.json", lambda data: b"{}7"),
    "records no list": ("replica-0.json", lambda data: b"7"),
    "a record without its length": ("replica-0.json", lambda data: data.replace(b'"length"', b'"lenth"')),
    "a length that is a text": ("replica-0.json", lambda data: data.replace(b'"length": ', b'"length": "x", "l": ')),
    "a length below 0": ("replica-0.json", lambda data: data.replace(b'"length": ', b'"length": -')),
    "an episode with another field": ("replica-0.json", lambda data: data.replace(b'"num_turns"', b'"turns_num"')),
    "versions of other tokens": (
        "replica-0.json",
        lambda data: data.replace(b'"version_runs": [[', b'"version_runs": [[1, 1], ['),
    ),
    "log-probabilities of another kind": ("replica-0.safetensors", lambda data: data.replace(b"F64", b"I64")),
    "a table of another kind": ("table.safetensors", lambda data: data.replace(b"F64", b"I64")),
    "no UTF-8": ("replica-0.json", lambda data: b"\xff\xfe" + data),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_in_words(name, tmp_path):
    written(tmp_path, {"kept": True, "routed": torch.int8})
    file, change = DAMAGE[name]
    path = tmp_path / inflight_samples.FOLDER / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(path.with_name(change).read_bytes() if isinstance(change, str) else change(path.read_bytes()))
    with pytest.raises(UserError, match=r"malformed files in_flight/.*Choose another checkpoint"):
        read(tmp_path, 0, 2)


@pytest.mark.slow
def test_any_flipped_bit_gives_samples_or_a_refusal(tmp_path):
    written(tmp_path, {"kept": True, "routed": torch.int16})
    draw = random.Random(1)
    files = sorted((tmp_path / inflight_samples.FOLDER).iterdir())
    refused = 0
    for _ in range(300):
        path = draw.choice(files)
        whole = path.read_bytes()
        changed = bytearray(whole)
        place = draw.randrange(min(len(changed), 2000))
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            read(tmp_path, 0, 2)
        except UserError:
            refused += 1
        path.write_bytes(whole)
    assert refused > 50
