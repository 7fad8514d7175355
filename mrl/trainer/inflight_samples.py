"""Samples in flight, in a commit: written by the replicas that have them, read by those that have them next.

Owns the files. Which prompts are in flight is in state.json (`rollout/buffer.py`).

    in_flight/table.safetensors            rows of the samples that are whole
    in_flight/replica-<k>.json             of each sample all but its tokens
    in_flight/replica-<k>.safetensors      tokens and what belongs to them, one sample after the other
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mrl.checkpoint.io.atomic_files import write_file
from mrl.errors import UserError
from mrl.types import Begun, Episode, Prompt, Rollout, Support

FOLDER = "in_flight"


@dataclass(frozen=True)
class KeptSamples:
    """What a rank holds of the samples in flight.

    Attributes:
        columns: Of the tables.
        tables: By name.
        rollouts: Whole responses.
        begun: Responses that go on.
    """

    columns: tuple[str, ...] = ()
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    rollouts: Sequence[Rollout] = ()
    begun: Sequence[Begun] = ()


def write(folder: Path, kept: KeptSamples, *, replica: int | None, first: bool) -> None:
    """Writes this rank's part.

    Args:
        folder: Of the commit; nothing is written where nothing is in flight.
        kept: The rank's.
        replica: Whose samples this rank writes; None: nobody's.
        first: This rank writes the tables.

    Raises:
        OSError: The disk does not take it. It names the file.
    """
    if not kept.tables:
        return
    (folder / FOLDER).mkdir(exist_ok=True)
    if first:
        tensors = {name: rows.clone() for name, rows in kept.tables.items()}  # a file's may share no memory
        write_file(folder / FOLDER / "table.safetensors", save(tensors, {"columns": json.dumps(kept.columns)}))
    if replica is not None:
        records, tensors = _packed([*kept.rollouts, *kept.begun])
        write_file(folder / FOLDER / f"replica-{replica}.json", json.dumps(records).encode())
        write_file(folder / FOLDER / f"replica-{replica}.safetensors", save(tensors))


def read(folder: Path, *, replica: int | None, num_replicas: int, prompt_at: Callable[[int], Prompt]) -> KeptSamples:
    """What this rank holds from now on.

    Args:
        folder: Of the commit.
        replica: Of this rank; None: it does not sample.
        num_replicas: Of the job now: what replica k had, replica k modulo this number has.
        prompt_at: The prompt with a uid.

    Raises:
        UserError: A file cannot be read, or has something else than a run leaves there.
    """
    if not (folder / FOLDER).is_dir():
        return KeptSamples()
    rollouts: list[Rollout] = []
    begun: list[Begun] = []
    parts = {int(path.stem.split("-")[1]): path for path in (folder / FOLDER).glob("replica-*.json")}
    for number, path in sorted(parts.items()):
        if number % num_replicas == replica:
            with _left_by_a_run(folder, path):
                records = json.loads(path.read_bytes())
                tensors, _ = _tensors(path.with_suffix(".safetensors"), _DTYPES)
                found = _unpacked(records, tensors, prompt_at)
            rollouts += [sample for sample in found if isinstance(sample, Rollout)]
            begun += [sample for sample in found if isinstance(sample, Begun)]
    table = folder / FOLDER / "table.safetensors"
    with _left_by_a_run(folder, table):
        tables, told = _tensors(table, {})
        columns = tuple(map(str, json.loads(told["columns"])))
        for name, rows in tables.items():
            if rows.dtype != torch.float64 or rows.dim() != 2 or rows.size(1) != len(columns):
                raise ValueError(f"{name} is {rows.dtype} {list(rows.shape)}, expected float64 [rows, {len(columns)}]")
    return KeptSamples(columns, tables, rollouts, begun)


@contextmanager
def _left_by_a_run(folder: Path, path: Path) -> Iterator[None]:
    """Inside, a file that cannot be read, or does not fit, is a UserError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint '{folder}' is of no run of mrl: its {FOLDER}/{path.stem}.* cannot be read, or has something "
            f"else than a run leaves there ({type(error).__name__}: {error}). Give another checkpoint."
        ) from error


def _tensors(path: Path, dtypes: Mapping[str, torch.dtype]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A file's tensors, and what it says besides."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
        for name, tensor in found.items():
            if tensor.dtype != dtypes.get(name, tensor.dtype):
                raise ValueError(f"{name} is {tensor.dtype}, expected {dtypes[name]}")
        return found, file.metadata() or {}


def _packed(samples: Sequence[Rollout | Begun]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Records, and the ragged rest joined: "ids" [R], "logprobs" [R] and so on."""
    records = []
    parts: dict[str, list[Tensor]] = {"ids": [], "logprobs": [], "mask": [], "log_kept_mass": []}
    for sample in samples:
        parts["ids"].append(torch.tensor(sample.response_ids, dtype=torch.int64))
        parts["logprobs"].append(torch.tensor(sample.rollout_logprobs, dtype=torch.float64))
        record: dict[str, Any] = {
            "uid": sample.prompt.uid,
            "prompt_ids": list(sample.prompt.prompt_ids),
            "sample_index": sample.sample_index,
            "length": len(sample.response_ids),
            "version_runs": [list(run) for run in sample.version_runs],
            "kept": None,
        }
        if sample.support is not None:
            record["kept"] = sample.support.ids_K.numel()
            parts.setdefault("support_ids", []).append(sample.support.ids_K)
            parts.setdefault("support_counts", []).append(sample.support.counts_R)
            parts["log_kept_mass"].append(torch.tensor(sample.log_kept_mass, dtype=torch.float64))
        if isinstance(sample, Rollout):
            mask, routed = sample.sampled_mask, sample.routed_experts
            record["whole"] = {name: getattr(sample, name) for name in _PLAIN}
            record["whole"]["episode"] = None if sample.episode is None else asdict(sample.episode)
            record["whole"]["has_mask"] = mask is not None
            record["whole"]["routed"] = None if routed is None else list(routed.shape)
            if mask is not None:
                parts["mask"].append(torch.tensor(mask, dtype=torch.bool))
            if routed is not None:
                parts.setdefault("routed", []).append(routed.flatten())
        records.append(record)
    return records, {name: torch.cat(found) for name, found in parts.items() if found}


_PLAIN = (
    "finish_reason",
    "policy_version",
    "response_text",
    "reward",
    "reward_parts",
    "reward_facts",
    "reward_error",
    "reward_cached",
)
"""Fields of a rollout that are JSON as they are."""


_DTYPES = {
    "ids": torch.int64,
    "logprobs": torch.float64,
    "mask": torch.bool,
    "log_kept_mass": torch.float64,
    "support_ids": torch.int32,
    "support_counts": torch.int32,
}
"""Of the joined tensors; experts have the smallest that holds them."""


class _Reader:
    """Takes parts of joined tensors, one after the other."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._at = dict.fromkeys(tensors, 0)

    def next(self, name: str, count: int) -> Tensor:
        """The next so many; none are asked for of what is not there."""
        if not count:
            return self._tensors[name][:0] if name in self._tensors else torch.zeros(0)
        start = self._at[name]
        self._at[name] = start + count
        found = self._tensors[name][start : start + count]
        if found.numel() != count:
            raise ValueError(f"{name} has {self._tensors[name].numel()} entries, expected {start + count} or more")
        return found


def _unpacked(
    records: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], prompt_at: Callable[[int], Prompt]
) -> list[Rollout | Begun]:
    reader, found = _Reader(tensors), list[Rollout | Begun]()
    prompts: dict[int, Prompt] = {}
    for record in records:
        uid, count = int(record["uid"]), int(record["length"])
        if uid not in prompts:
            prompts[uid] = replace(prompt_at(uid), prompt_ids=tuple(map(int, record["prompt_ids"])))
        support, log_mass = None, list[float]()
        if record["kept"] is not None:
            counts_R = reader.next("support_counts", count)
            support = Support(reader.next("support_ids", int(record["kept"])), counts_R)
            log_mass = reader.next("log_kept_mass", count).tolist()
        ids, logprobs = reader.next("ids", count).tolist(), reader.next("logprobs", count).tolist()
        runs = tuple((int(version), int(length)) for version, length in record["version_runs"])
        if runs and sum(length for _, length in runs) != count:
            raise ValueError(f"sample {record['sample_index']} of prompt {uid} has {count} tokens, versions of {runs}")
        index, whole = int(record["sample_index"]), record.get("whole")
        if whole is None:
            found.append(Begun(prompts[uid], index, tuple(ids), tuple(logprobs), runs, support, tuple(log_mass)))
            continue
        shape, episode = whole["routed"], whole["episode"]
        if episode is not None:
            turns, rewards = tuple(map(tuple, episode["turns"])), tuple(map(float, episode["turn_rewards"]))
            episode = Episode(**{**episode, "turns": turns, "turn_rewards": rewards})
        found.append(
            Rollout(
                prompts[uid],
                index,
                ids,
                logprobs,
                **{name: whole[name] for name in _PLAIN},
                sampled_mask=reader.next("mask", count).tolist() if whole["has_mask"] else None,
                routed_experts=reader.next("routed", _product(shape)).view(shape) if shape is not None else None,
                episode=episode,
                support=support,
                log_kept_mass=log_mass,
                version_runs=runs,
            )
        )
    return found


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
