"""Samples of the rollout buffer in a checkpoint; each replica writes its own.

    in_flight/table.safetensors            sample table of complete groups
    in_flight/replica-<k>.json             metadata of each sample of replica k
    in_flight/replica-<k>.safetensors      packed tokens, log-probabilities and masks of these samples

The metadata of groups is in state.json (`rollout/buffer.py`).
"""

from __future__ import annotations

import json
import math
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
from mrl.types import Episode, PartialRollout, Prompt, Rollout, SamplingMask

FOLDER = "in_flight"


@dataclass(frozen=True)
class BufferSnapshot:
    """Content of the rollout buffer on one rank.

    Attributes:
        columns: Column names of the tables.
        tables: Rows of the tables, fp64 [N, columns], by name; see `RolloutBuffer.tables`.
        rollouts: Finished responses.
        partial_rollouts: Partial responses.
    """

    columns: tuple[str, ...] = ()
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    rollouts: Sequence[Rollout] = ()
    partial_rollouts: Sequence[PartialRollout] = ()


def write(folder: Path, kept: BufferSnapshot, *, replica: int | None, first: bool) -> None:
    """Writes this rank's samples; nothing for an empty buffer.

    Args:
        folder: Checkpoint folder.
        kept: Content of the buffer on this rank.
        replica: Replica whose samples this rank writes; None: none.
        first: True on the rank that writes the tables.

    Raises:
        OSError: A file cannot be written; the error names it.
    """
    if not kept.tables:
        return
    (folder / FOLDER).mkdir(exist_ok=True)
    if first:
        tensors = {name: rows.clone() for name, rows in kept.tables.items()}  # safetensors rejects shared memory
        write_file(folder / FOLDER / "table.safetensors", save(tensors, {"columns": json.dumps(kept.columns)}))
    if replica is not None:
        records, tensors = _packed([*kept.rollouts, *kept.partial_rollouts])
        write_file(folder / FOLDER / f"replica-{replica}.json", json.dumps(records).encode())
        write_file(folder / FOLDER / f"replica-{replica}.safetensors", save(tensors))


def read(folder: Path, *, replica: int | None, num_replicas: int, prompt_at: Callable[[int], Prompt]) -> BufferSnapshot:
    """Reads the samples of this rank's replica.

    Args:
        folder: Checkpoint folder.
        replica: Replica of this rank; None if the rank does not sample.
        num_replicas: Number of replicas now. Samples of replica k move to replica k modulo this number.
        prompt_at: Function that returns the prompt with a uid.

    Raises:
        UserError: A file is unreadable or malformed.
    """
    if not (folder / FOLDER).is_dir():
        return BufferSnapshot()
    rollouts: list[Rollout] = []
    partials: list[PartialRollout] = []
    parts = {int(path.stem.split("-")[1]): path for path in (folder / FOLDER).glob("replica-*.json")}
    for number, path in sorted(parts.items()):
        if number % num_replicas == replica:
            with _malformed_is_user_error(folder, path):
                records = json.loads(path.read_bytes())
                tensors, _ = _tensors(path.with_suffix(".safetensors"), _DTYPES)
                found = _unpacked(records, tensors, prompt_at)
            rollouts += [sample for sample in found if isinstance(sample, Rollout)]
            partials += [sample for sample in found if isinstance(sample, PartialRollout)]
    table = folder / FOLDER / "table.safetensors"
    with _malformed_is_user_error(folder, table):
        tables, metadata = _tensors(table, {})
        columns = tuple(map(str, json.loads(metadata["columns"])))
        for name, rows in tables.items():
            if rows.dtype != torch.float64 or rows.dim() != 2 or rows.size(1) != len(columns):
                raise ValueError(f"{name} is {rows.dtype} {list(rows.shape)}, expected float64 [rows, {len(columns)}]")
    return BufferSnapshot(columns, tables, rollouts, partials)


@contextmanager
def _malformed_is_user_error(folder: Path, path: Path) -> Iterator[None]:
    """Converts errors of an unreadable or malformed file into a UserError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(
            f"Checkpoint '{folder}' has unreadable or malformed files {FOLDER}/{path.stem}.* "
            f"({type(error).__name__}: {error}). Choose another checkpoint."
        ) from error


def _tensors(path: Path, dtypes: Mapping[str, torch.dtype]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors and the metadata of a safetensors file; `dtypes` are the required data types."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not iterable itself
        for name, tensor in found.items():
            if tensor.dtype != dtypes.get(name, tensor.dtype):
                raise ValueError(f"{name} is {tensor.dtype}, expected {dtypes[name]}")
        return found, file.metadata() or {}


def _packed(samples: Sequence[Rollout | PartialRollout]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Returns JSON records of the samples, and their ragged fields packed: "ids" [R], "logprobs" [R] and so on."""
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
        if sample.kept_tokens is not None:
            record["kept"] = sample.kept_tokens.ids_K.numel()
            parts.setdefault("support_ids", []).append(sample.kept_tokens.ids_K)
            parts.setdefault("support_counts", []).append(sample.kept_tokens.counts_R)
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
"""Fields of `Rollout` that are JSON-serializable."""


_DTYPES = {
    "ids": torch.int64,
    "logprobs": torch.float64,
    "mask": torch.bool,
    "log_kept_mass": torch.float64,
    "support_ids": torch.int32,
    "support_counts": torch.int32,
}
"""Data types of the packed tensors; that of routing records depends on the number of experts."""


class _PackedReader:
    """Sequential reader of packed tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._at = dict.fromkeys(tensors, 0)

    def next(self, name: str, count: int) -> Tensor:
        """Returns the next `count` entries of a tensor."""
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
) -> list[Rollout | PartialRollout]:
    reader, found = _PackedReader(tensors), list[Rollout | PartialRollout]()
    prompts: dict[int, Prompt] = {}
    for record in records:
        uid, count = int(record["uid"]), int(record["length"])
        if uid not in prompts:
            prompts[uid] = replace(prompt_at(uid), prompt_ids=tuple(map(int, record["prompt_ids"])))
        support, log_mass = None, list[float]()
        if record["kept"] is not None:
            counts_R = reader.next("support_counts", count)
            support = SamplingMask(reader.next("support_ids", int(record["kept"])), counts_R)
            log_mass = reader.next("log_kept_mass", count).tolist()
        ids, logprobs = reader.next("ids", count).tolist(), reader.next("logprobs", count).tolist()
        runs = tuple((int(version), int(length)) for version, length in record["version_runs"])
        if runs and sum(length for _, length in runs) != count:
            raise ValueError(f"sample {record['sample_index']} of prompt {uid} has {count} tokens, versions of {runs}")
        index, finished = int(record["sample_index"]), record.get("whole")
        if finished is None:
            found.append(
                PartialRollout(prompts[uid], index, tuple(ids), tuple(logprobs), runs, support, tuple(log_mass))
            )
            continue
        shape, episode = finished["routed"], finished["episode"]
        if episode is not None:
            turns, rewards = tuple(map(tuple, episode["turns"])), tuple(map(float, episode["turn_rewards"]))
            episode = Episode(**{**episode, "turns": turns, "turn_rewards": rewards})
        found.append(
            Rollout(
                prompts[uid],
                index,
                ids,
                logprobs,
                **{name: finished[name] for name in _PLAIN},
                sampled_mask=reader.next("mask", count).tolist() if finished["has_mask"] else None,
                routed_experts=reader.next("routed", math.prod(shape)).view(shape) if shape is not None else None,
                episode=episode,
                kept_tokens=support,
                log_kept_mass=log_mass,
                version_runs=runs,
            )
        )
    return found
