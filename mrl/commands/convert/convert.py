"""Conversion of a checkpoint from one format and parallel layout into another.

`convert` fills each file of the target tensor by tensor from the source; the two formats do not know each other. At
most two tensors of the target are in memory (`tensor_writer.py`). `checkpoint/io/partial_folder.py` makes the work
restartable and shares it between processes. The result's `manifest.json` contains hashes of both sides and the
result of the check that every element was copied (`layout_proof.py`).
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from mrl import __version__
from mrl.checkpoint.formats.base import OutFile, Source, Target
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.checkpoint.io.partial_folder import MANIFEST, PartialFolder, disk_errors
from mrl.commands.convert.layout_proof import Proof, prove
from mrl.commands.convert.tensor_writer import PART_ELEMENTS, Filler
from mrl.errors import UserError
from mrl.resharding.copy_op import ITEM_BYTES, num_bytes
from mrl.resharding.regions import volume

Progress = Callable[[int], None]
"""Callback that receives the number of bytes written since the last call."""


@dataclass(frozen=True)
class Conversion:
    """Plan of a conversion.

    Attributes:
        num_tensors: Tensors in the target's files.
        num_bytes: Bytes of these tensors.
        file_bytes: File name -> bytes of its tensors.
        peak_bytes: Peak buffer memory of one process, without the interpreter's own memory.
        proof: Proof that every element is copied.
        dtype_changes: "float32 -> bfloat16" -> number of elements that are cast.
    """

    num_tensors: int
    num_bytes: int
    file_bytes: dict[str, int]
    peak_bytes: int
    proof: Proof
    dtype_changes: dict[str, int]


def plan_conversion(source: Source, target: Target) -> Conversion:
    """Checks the source's headers and the target's layout, without reading or writing weights.

    Raises:
        UserError: The source is damaged or does not match its config.
        RuntimeError: The target's layout is wrong.
    """
    source.check()
    proof = prove(source.arch, (file.layout for file in target.files))
    file_bytes: dict[str, int] = {}
    changes: Counter[str] = Counter()
    widest = 0
    for file in target.files:
        file_bytes[file.name] = 0
        for stored in file.layout.values():
            size = num_bytes(stored)
            file_bytes[file.name] += size
            for piece in stored.pieces:
                elements, dtype = volume(piece.src), source.dtype(piece.hf_name)
                widest = max(widest, 2 * size + min(elements, PART_ELEMENTS) * ITEM_BYTES[dtype])
                if dtype != stored.dtype:
                    changes[f"{dtype} -> {stored.dtype}"] += elements
    peak = widest + target.buffer_bytes
    return Conversion(
        proof.stored_tensors, sum(file_bytes.values()), file_bytes, peak, proof, dict(sorted(changes.items()))
    )


def convert(
    source: Source,
    target: Target,
    folder: str | Path,
    *,
    plan: Conversion | None = None,
    num_workers: int = 1,
    allow_nan: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any] | None:
    """Converts a checkpoint; processes that call it concurrently with equal arguments share the work.

    Args:
        source: Opened source checkpoint; picklable if `num_workers` is above 1, like `target`.
        target: Target format and layout.
        folder: Folder to create; named `FOLDER.partial` until complete.
        plan: Result of `plan_conversion`; None: computed here.
        num_workers: Number of processes that this call uses, itself included.
        allow_nan: True to write infinite and NaN values and count them in the manifest.
        progress: Callback for written bytes, called in this process.

    Returns:
        The manifest; None if other processes still work, the last of which completes the folder.

    Raises:
        UserError: The source is damaged or changed during the conversion, values are not finite, or the folder exists,
            was started with other arguments or cannot be written. A later call continues the finished part.
        RuntimeError: The target's layout is wrong, or a worker died.
    """
    plan = plan or plan_conversion(source, target)
    arguments = _arguments(source, target, allow_nan)
    partial = PartialFolder(folder)
    if partial.is_finished(arguments):
        return _manifest_of(partial)
    with partial.session(arguments):
        if partial.is_finished(arguments):  # another process finished since the check above
            partial.discard()
            return _manifest_of(partial)
        _check_space(partial, plan)
        job = _Job(source, target, partial, allow_nan, progress or (lambda num_bytes: None))
        if num_workers > 1:
            _with_workers(job, _Work(source, target, Path(folder), arguments, allow_nan), num_workers - 1)
        else:
            job.run()
        with partial.finishing() as is_last:
            if is_last and job.is_done():
                job.finish(arguments, plan)
    return _manifest_of(partial) if partial.is_finished(arguments) else None


class _Job:
    """Work of one process in a conversion: files of the target to write and files of the source to hash."""

    def __init__(
        self, source: Source, target: Target, partial: PartialFolder, allow_nan: bool, progress: Progress
    ) -> None:
        self._source = source
        self._target = target
        self._partial = partial
        self._filler = Filler(source, allow_nan=allow_nan)
        self._progress = progress
        self._stopped = False

    def run(self) -> None:
        """Works until every file is done or claimed by another process."""
        with ThreadPoolExecutor(1) as executor:
            hashing = executor.submit(self._hash_source)
            try:
                for file in self._target.files:
                    with self._partial.claim(_target_part(file.name)) as claim:
                        if claim is not None:
                            self._make(file, claim.earlier_record)
            except BaseException:
                self._stopped = True
                raise
            hashing.result()

    def is_done(self) -> bool:
        """Returns whether every file is written or hashed."""
        parts = [_target_part(file.name) for file in self._target.files]
        parts += [_source_part(name) for name in self._source.files]
        return all(self._partial.record(part) is not None for part in parts)

    def finish(self, arguments: dict[str, Any], plan: Conversion) -> None:
        """Writes the files without weights and the manifest, and renames the folder."""
        partial, source = self._partial, self._source
        if _signatures(source) != arguments["source"]["files"]:
            raise UserError(f"'{source.folder}' changed while it was read. Remove '{partial.path}' and start again.")
        records = {file.name: partial.record(_target_part(file.name)) or {} for file in self._target.files}
        with disk_errors(partial.path):
            self._target.finish(partial.path, {name: record["written"] for name, record in records.items()})
        small = [name for name in partial.names() if name not in records]
        files = {name: _hashed(partial.path / name) for name in small}
        files |= {name: {key: record[key] for key in ("num_bytes", "xxh3")} for name, record in records.items()}
        not_finite = {name: count for record in records.values() for name, count in record["not_finite"].items()}
        partial.finish(
            {
                "mrl": __version__,
                "source": {
                    "folder": str(source.folder),
                    **_without_tensors(source.describe()),
                    "files": {name: partial.record(_source_part(name)) for name in source.files},
                },
                "target": {**self._target.describe(), "files": dict(sorted(files.items()))},
                "bijection": plan.proof.as_dict(),
                "dtype_changes": plan.dtype_changes,
                "not_finite": not_finite,
                "arguments": arguments,
            }
        )

    def _make(self, file: OutFile, earlier: dict[str, Any] | None) -> None:
        """Writes one file, unless an earlier process wrote it and its hash still matches."""
        path = self._partial.path / file.name
        size = sum(num_bytes(stored) for stored in file.layout.values())
        if earlier is not None and _is_as_recorded(path, earlier):
            self._partial.add_record(_target_part(file.name), earlier)
            self._progress(size)
            return
        temporary = self._partial.temporary(file.name)
        try:
            written = self._target.write(temporary, file, self._counted(file))
            record = {"num_bytes": temporary.stat().st_size, "xxh3": written.get("xxh3") or xxh3_file(temporary)}
            self._partial.publish(temporary, file.name)
        finally:
            temporary.unlink(missing_ok=True)
        self._partial.add_record(
            _target_part(file.name), {**record, "written": written, "not_finite": self._filler.not_finite}
        )

    def _counted(self, file: OutFile) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._filler.fill(file.layout):
            yield name, tensor
            self._progress(num_bytes(file.layout[name]))

    def _hash_source(self) -> None:
        for name in self._source.files:
            if self._stopped:
                return
            with self._partial.claim(_source_part(name)) as claim:
                if claim is None:
                    continue
                path = self._source.folder / name
                record = _hashed(path)
                if claim.earlier_record not in (None, record):
                    raise UserError(
                        f"'{path}' has changed since the conversion was started. Remove '{self._partial.path}' and "
                        "start again."
                    )
                self._partial.add_record(_source_part(name), record)


def _with_workers(job: _Job, work: Callable[[SimpleQueue[str]], None], count: int) -> None:
    """Runs `work` in `count` processes and `job` in this one; a failure in one of them ends all."""
    context = multiprocessing.get_context("spawn")
    failures: SimpleQueue[str] = context.SimpleQueue()
    workers = [context.Process(target=work, args=(failures,), daemon=True) for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        job.run()
        for worker in workers:
            worker.join()
            if worker.exitcode:
                if not failures.empty():
                    raise UserError(failures.get())
                raise RuntimeError(f"a worker of the conversion died with exit code {worker.exitcode}")
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
                worker.join()


@dataclass(frozen=True)
class _Work:
    """Picklable entry point of a worker process."""

    source: Source
    target: Target
    folder: Path
    arguments: dict[str, Any]
    allow_nan: bool

    def __call__(self, failures: SimpleQueue[str]) -> None:
        torch.set_num_threads(1)
        partial = PartialFolder(self.folder)
        try:
            with self.source as source, partial.session(self.arguments):
                _Job(source, self.target, partial, self.allow_nan, lambda num_bytes: None).run()
        except UserError as error:
            failures.put(str(error))
            raise SystemExit(2) from error


def _arguments(source: Source, target: Target, allow_nan: bool) -> dict[str, Any]:
    """Returns everything that determines the target's bytes, for comparison with an earlier start."""
    layout = xxhash.xxh3_64()
    for file in target.files:
        layout.update(repr((file.name, file.layout)).encode())
    return {
        "source": {**_without_tensors(source.describe()), "files": _signatures(source)},
        "target": {**_without_tensors(target.describe()), "layout": layout.hexdigest()},
        "allow_nan": allow_nan,
    }


def _signatures(source: Source) -> dict[str, Any]:
    """Returns size and modification time of each source file, a cheap check for changes."""
    found = {}
    for name in source.files:
        try:
            status = (source.folder / name).stat()
        except OSError as error:
            raise UserError(f"'{source.folder / name}' cannot be read: {error.strerror or error}.") from error
        found[name] = {"num_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return found


def _without_tensors(description: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key != "tensors"}


def _check_space(partial: PartialFolder, plan: Conversion) -> None:
    """Raises UserError if the remaining files do not fit on the disk."""
    try:
        written = sum((partial.path / name).stat().st_size for name in partial.names())
        free = shutil.disk_usage(partial.path).free
    except FileNotFoundError:  # another process has moved a file, or finished the folder
        return
    if plan.num_bytes - written > free:
        raise UserError(
            f"'{partial.path}' needs {(plan.num_bytes - written) / 1e9:.2f} GB more, but {free / 1e9:.2f} GB are free. "
            "Free space and repeat the command; finished files are kept."
        )


def _hashed(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "xxh3": xxh3_file(path)}


def _is_as_recorded(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and _hashed(path) == {key: record[key] for key in ("num_bytes", "xxh3")}


def _manifest_of(partial: PartialFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((partial.final / MANIFEST).read_text(encoding="utf-8"))
    return found


def _target_part(name: str) -> str:
    return f"target {name}"


def _source_part(name: str) -> str:
    return f"source {name}"
