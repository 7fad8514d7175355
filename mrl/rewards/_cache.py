"""Scores that were computed before: what a resumed run samples again is not scored again.

Owns the key of a score (the row, the tokens, and the functions with their sources and arguments), and the files that
hold scores: lines with a checksum, appended as answers come, so that a kill loses at most what is being written. A
failure is no score and is not kept. Imports no torch.
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

from mrl.rewards._call import Outcome
from mrl.rewards._signatures import Sample

MIB = 1 << 20

_OF_PROMPT = ("prompt", "answer", "question", "data_source", "row")
"""Fields of a sample that it has from its prompt."""

_of_prompt = attrgetter(*_OF_PROMPT)
_own = attrgetter(*(item.name for item in fields(Sample) if item.name not in _OF_PROMPT))

_DIGEST_BYTES = 16

NEW, OLD = ".jsonl", ".old.jsonl"
"""Endings of a cache's two files: at half of its size the new one takes the place of the old one."""


class ScoreCache:
    """The scores of one replica, in memory and in two files; safe to use from several threads.

    A disk that takes no more ends the writing, not the run.
    """

    def __init__(self, folder: Path, name: str, limit_mb: int) -> None:
        """Reads what is there: this replica's scores, and while there is room those of others (another layout).

        Args:
            folder: Made where it is not there.
            name: Of the replica's files.
            limit_mb: Size of its files together, MiB, and about that of the memory.
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
        """The scores under this key; None where there are none."""
        with self._lock:
            found = self._scores.get(key)
            if found is None:
                found = self._before.get(key)
                if found is not None:
                    self._keep([(key, found)])  # what is used stays
        if found is None:
            return None
        return [Outcome(**one) if isinstance(one, dict) else Outcome(one) for one in json.loads(found)]

    def put(self, scored: Iterable[tuple[str, Sequence[Outcome]]]) -> None:
        """Keeps scores by their keys, unless one of a key's is a failure."""
        kept = [
            (key, _text([outcome.told for outcome in outcomes]))
            for key, outcomes in scored
            if not any(outcome.error for outcome in outcomes)
        ]
        with self._lock:
            self._keep(kept)

    def close(self) -> None:
        """The files stay."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _files(self, folder: Path) -> list[Path]:
        """Its own first, in the order in which they were written, then those of others, the latest first."""
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
                os.write(self._file, b"\n")  # ends a line that a kill cut
        except OSError:
            self._file = -1

    def _keep(self, scored: Sequence[tuple[str, str]]) -> None:
        lines = b""
        for key, value in scored:
            line = _line(f"{key} {value}".encode())
            if self._written + len(lines) + len(line) > self._half_bytes:
                self._write(lines)
                self._turn()
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

    def _turn(self) -> None:
        """What was new is old, and what was old is gone."""
        if self._file < 0:
            return
        self._close()
        try:
            os.replace(self._new, self._old)
        except OSError:
            return
        self._before, self._scores = self._scores, {}
        self._open(self._new.parent)


def _text(told: list[Any]) -> str:
    """As JSON; of finite numbers that is what Python writes."""
    return repr(told) if all(type(one) is float for one in told) else json.dumps(told)


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _read(path: Path) -> dict[str, str]:
    """Key -> scores of every whole line."""
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
    """Names of scores by the functions of this identity."""

    def __init__(self, identity: str) -> None:
        self._functions = _digest([identity])
        self._prompts: dict[tuple[int, ...], bytes] = {}

    def of(self, samples: Sequence[Sample]) -> list[str | None]:
        """Of samples that are scored in one call; None where a row cannot be told from another.

        Samples must live as long as this: that they have one prompt is seen by what they hold being one object.
        """
        told = blake2b(self._functions, digest_size=_DIGEST_BYTES)
        try:
            for sample in samples:
                told.update(self._of_prompt(sample))
                told.update(_digest(_own(sample)))
        except (TypeError, ValueError, RecursionError):
            return [None] * len(samples)
        key = told.hexdigest()
        return [f"{key}-{place}" if place else key for place in range(len(samples))]

    def _of_prompt(self, sample: Sample) -> bytes:
        values = _of_prompt(sample)
        known = tuple(map(id, values))
        digest = self._prompts.get(known)
        if digest is None:
            digest = self._prompts[known] = _digest(values)
        return digest


def _digest(values: Sequence[Any]) -> bytes:
    return blake2b(repr(values).encode(), digest_size=_DIGEST_BYTES).digest()


def identity_of(functions: Sequence[tuple[str, Mapping[str, Any], str]]) -> str:
    """Of functions: the name, the arguments and the digest of the source of each."""
    told = [[name, dict(kwargs), source] for name, kwargs, source in functions]
    return json.dumps(told, sort_keys=True, default=repr)


@dataclass
class Spared:
    """Samples of a batch by what is known of them.

    Attributes:
        cache: Where they are looked up and kept.
        found: Row -> outcomes that were there.
        asked: Rows to compute, those of one call together.
        keys: Row to compute -> its key.
        same: Row -> the row in `asked` that it equals.
    """

    cache: ScoreCache | None
    found: dict[int, list[Outcome]] = field(default_factory=dict)
    asked: list[tuple[int, ...]] = field(default_factory=list)
    keys: dict[int, str | None] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)

    @staticmethod
    def of(
        cache: ScoreCache | None, identity: str, samples: Sequence[Sample], units: Iterable[tuple[int, ...]]
    ) -> Spared:
        """Looks up every sample; without a cache all are asked.

        Args:
            cache: Of the replica.
            identity: Of the functions.
            samples: By row.
            units: Rows that are scored in one call: known only where all of them are.
        """
        spared, first, keys_of = Spared(cache), dict[str | None, tuple[int, ...]](), _Keys(identity).of
        for unit in units:
            keys = [None] * len(unit) if cache is None else keys_of([samples[row] for row in unit])
            if (same := first.get(keys[0])) is not None:
                spared.same.update(zip(unit, same, strict=True))
                continue
            known = [None if cache is None or key is None else cache.get(key) for key in keys]
            if None not in known:
                spared.found.update(zip(unit, known, strict=True))  # type: ignore[arg-type]
                continue
            if keys[0] is not None:
                first[keys[0]] = unit
            spared.asked.append(unit)
            spared.keys.update(zip(unit, keys, strict=True))
        return spared

    def keep(self, computed: Iterable[tuple[int, Sequence[Outcome]]]) -> None:
        """Takes what was computed for rows in `asked`."""
        if self.cache is not None:
            self.cache.put((key, outcomes) for row, outcomes in computed if (key := self.keys[row]) is not None)

    def joined(self, computed: Mapping[int, list[Outcome]]) -> dict[int, list[Outcome]]:
        """Row -> outcomes, of all rows that are known now."""
        known = {**self.found, **computed}
        return known | {row: known[first] for row, first in self.same.items() if first in known}
