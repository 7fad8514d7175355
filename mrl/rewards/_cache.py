"""Cache of scores, so that samples that a resumed run generates again are not scored again.

The key is a digest of the data row, the tokens, and the functions with their sources and arguments. Files consist of
lines with a checksum, appended as answers arrive, so that a kill loses at most the line being written. Failures are not
cached. Imports no torch.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any

from mrl.rewards._bound_reward import Outcome
from mrl.rewards._signatures import Sample

MIB = 1 << 20

_PROMPT_FIELDS = ("prompt", "answer", "question", "data_source", "row")
"""Fields of a sample that come from its prompt."""

_prompt_fields = attrgetter(*_PROMPT_FIELDS)
_response_fields = attrgetter(*(item.name for item in fields(Sample) if item.name not in _PROMPT_FIELDS))

_DIGEST_BYTES = 16

NEW, OLD = ".jsonl", ".old.jsonl"
"""Suffixes of a cache's two files: when the new one reaches half of the size limit, it replaces the old one."""


class ScoreCache:
    """Scores of one replica, in memory and in two files; thread-safe.

    A write error, such as a full disk, ends the writing but not the run.
    """

    def __init__(self, folder: Path, name: str, limit_mb: int) -> None:
        """Reads the scores of this replica, and within the size limit those of others (of another parallel layout).

        Args:
            folder: Folder of the files, created if missing.
            name: Name of this replica's files, without suffix.
            limit_mb: Size of the two files together, MiB; memory use is about the same.
        """
        self._new, self._old = folder / f"{name}{NEW}", folder / f"{name}{OLD}"
        self._half_bytes = limit_mb * MIB // 2
        self._scores: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._lock = threading.Lock()
        self._file, self._written = -1, 0
        room = 2 * self._half_bytes
        for path in self._files(folder):
            room -= path.stat().st_size
            if room < 0 and path not in (self._new, self._old):
                continue
            self._before |= _read(path)
        self._open(folder)

    def get(self, key: str) -> list[Outcome] | None:
        """Returns the scores of a key; None if unknown."""
        with self._lock:
            found = self._scores.get(key)
            if found is None:
                found = self._before.get(key)
                if found is not None:
                    self._keep([(key, found)])  # moves used scores from the old file to the new one
        if found is None:
            return None
        return [Outcome(**one) if isinstance(one, dict) else Outcome(one) for one in json.loads(found)]

    def put(self, scored: Iterable[tuple[str, Sequence[Outcome]]]) -> None:
        """Stores the scores of keys; skips keys with a failed outcome."""
        kept = [
            (key, _text([outcome.as_json for outcome in outcomes]))
            for key, outcomes in scored
            if not any(outcome.error for outcome in outcomes)
        ]
        with self._lock:
            self._keep(kept)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _files(self, folder: Path) -> list[Path]:
        """Returns this replica's files, oldest first, then those of others, newest first."""
        try:
            others = [path for path in folder.glob(f"*{NEW}") if path not in (self._new, self._old)]
            others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            return []
        return [path for path in (self._old, self._new) if path.is_file()] + others

    def _open(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._written = os.fstat(self._file).st_size
            if self._written:
                os.write(self._file, b"\n")  # completes a line that a kill cut
        except OSError:
            self._file = -1

    def _keep(self, scored: Sequence[tuple[str, str]]) -> None:
        lines = b""
        for key, value in scored:
            line = _line(f"{key} {value}".encode())
            if self._written + len(lines) + len(line) > self._half_bytes:
                self._write(lines)
                self._rotate()
                lines = b""
            self._scores[key] = value
            lines += line
        self._write(lines)

    def _write(self, lines: bytes) -> None:
        if self._file < 0 or not lines:
            return
        try:
            self._written += os.write(self._file, lines)
        except OSError:
            self._close()

    def _rotate(self) -> None:
        """Replaces the old file and scores by the new ones, and starts a new file."""
        if self._file < 0:
            return
        self._close()
        try:
            os.replace(self._new, self._old)
        except OSError:
            return
        self._before, self._scores = self._scores, {}
        self._open(self._new.parent)


def _text(values: list[Any]) -> str:
    """Returns the values as JSON; for finite floats `repr` is equal and faster."""
    return repr(values) if all(type(one) is float for one in values) else json.dumps(values)


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _read(path: Path) -> dict[str, str]:
    """Reads key -> scores from all lines with a valid checksum."""
    found: dict[str, str] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        mark, _, body = line.partition(b" ")
        if mark == b"%08x" % zlib.crc32(body):
            key, _, value = body.decode().partition(" ")
            found[key] = value
    return found


class _Keys:
    """Cache keys of the samples that functions of one identity score."""

    def __init__(self, identity: str) -> None:
        self._functions = _digest([identity])
        self._prompts: dict[tuple[int, ...], bytes] = {}

    def of(self, samples: Sequence[Sample]) -> list[str | None]:
        """Returns the keys of samples that are scored in one call; None for each if a value has no `repr`.

        Samples must outlive this object: digests of prompts are looked up by the ids of their objects.
        """
        digest = blake2b(self._functions, digest_size=_DIGEST_BYTES)
        try:
            for sample in samples:
                digest.update(self._prompt_digest(sample))
                digest.update(_digest(_response_fields(sample)))
        except (TypeError, ValueError, RecursionError):
            return [None] * len(samples)
        key = digest.hexdigest()
        return [f"{key}-{place}" if place else key for place in range(len(samples))]

    def _prompt_digest(self, sample: Sample) -> bytes:
        values = _prompt_fields(sample)
        known = tuple(map(id, values))
        digest = self._prompts.get(known)
        if digest is None:
            digest = self._prompts[known] = _digest(values)
        return digest


def _digest(values: Sequence[Any]) -> bytes:
    return blake2b(repr(values).encode(), digest_size=_DIGEST_BYTES).digest()


def functions_identity(functions: Sequence[tuple[str, Mapping[str, Any], str]]) -> str:
    """Returns a text that identifies functions: the name, kwargs and source digest of each."""
    listed = [[name, dict(kwargs), source] for name, kwargs, source in functions]
    return json.dumps(listed, sort_keys=True, default=repr)


@dataclass
class CacheLookup:
    """Cache lookup of a batch: which rows have scores and which are to be computed.

    Attributes:
        cache: Cache for lookups and new scores; None disables caching.
        found: Row -> cached outcomes.
        to_compute: Rows to compute, grouped by call.
        keys: Row to compute -> cache key.
        same: Row -> row in `to_compute` with an equal sample, whose outcomes it shares.
    """

    cache: ScoreCache | None
    found: dict[int, list[Outcome]] = field(default_factory=dict)
    to_compute: list[tuple[int, ...]] = field(default_factory=list)
    keys: dict[int, str | None] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def look_up(
        cache: ScoreCache | None, identity: str, samples: Sequence[Sample], units: Iterable[tuple[int, ...]]
    ) -> CacheLookup:
        """Looks up all samples; without a cache all are to be computed.

        Args:
            cache: The replica's cache, or None.
            identity: Identity of the functions, see `functions_identity`.
            samples: Samples by row.
            units: Rows of each call; a call's scores are used only if all of its rows are cached.
        """
        lookup, first, keys_of = CacheLookup(cache), dict[str | None, tuple[int, ...]](), _Keys(identity).of
        for unit in units:
            keys = [None] * len(unit) if cache is None else keys_of([samples[row] for row in unit])
            if (same := first.get(keys[0])) is not None:
                lookup.same.update(zip(unit, same, strict=True))
                continue
            known = [None if cache is None or key is None else cache.get(key) for key in keys]
            if None not in known:
                lookup.found.update(zip(unit, known, strict=True))  # type: ignore[arg-type]
                continue
            if keys[0] is not None:
                first[keys[0]] = unit
            lookup.to_compute.append(unit)
            lookup.keys.update(zip(unit, keys, strict=True))
        return lookup

    def keep(self, computed: Iterable[tuple[int, Sequence[Outcome]]]) -> None:
        """Stores computed outcomes of rows in `to_compute`."""
        if self.cache is not None:
            self.cache.put((key, outcomes) for row, outcomes in computed if (key := self.keys[row]) is not None)

    def known_scores(self, computed: Mapping[int, list[Outcome]]) -> dict[int, list[Outcome]]:
        """Returns row -> outcomes of all rows that are cached, computed, or equal to a computed one."""
        known = {**self.found, **computed}
        return known | {row: known[first] for row, first in self.same.items() if first in known}
