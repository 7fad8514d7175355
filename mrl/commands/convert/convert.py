"""One checkpoint format into another: the loop, its processes, its proof.

Owns `convert`: each file of the target is filled tensor by tensor from the source, which may have another format and
another parallel layout; neither knows the other. At most two tensors of the target are in memory (`filler.py`).
The work is restartable and shared between processes by `checkpoint/io/partial_folder.py`; the
manifest, `manifest.json` beside the weights, holds the hashes of both sides and the bijection (`layout_proof.py`).
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
from mrl.checkpoint.io.hashed_writer import hash_file
from mrl.checkpoint.io.partial_folder import MANIFEST, PartialFolder, disk_errors
from mrl.commands.convert.filler import PART_ELEMENTS, Filler
from mrl.commands.convert.layout_proof import Proof, prove
from mrl.errors import UserError
from mrl.resharding.copy_op import ITEM_BYTES, num_bytes
from mrl.resharding.regions import volume

Progress = Callable[[int], None]
"""Called with the bytes of the target that were written since the last call."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion will do, known before it begins.

    Attributes:
        num_tensors: Tensors in the target's files.
        num_bytes: Their bytes.
        file_bytes: File -> bytes of its tensors.
        peak_bytes: Largest buffers that one process holds, without the interpreter's own memory.
        proof: The bijection.
        dtype_changes: "float32 -> bfloat16" -> elements, for dtypes that differ.
    """

    num_tensors: int
    num_bytes: int
    file_bytes: dict[str, int]
    peak_bytes: int
    proof: Proof
    dtype_changes: dict[str, int]


def plan_conversion(source: Source, target: Target) -> Conversion:
    """Checks the source's headers and the target's layout; reads and writes no weight.

    Raises:
        UserError: The source is damaged or does not fit its config.
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
    return Conversion(
        proof.stored_tensors, sum(file_bytes.values()), file_bytes, widest, proof, dict(sorted(changes.items()))
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
    """Writes a target; any number of processes may call it with equal arguments at the same time and share the work.

    Args:
        source: Open for reading; it can be pickled where `num_workers` is above 1, as `target`.
        target: What to write.
        folder: Its folder, to be made; `FOLDER.partial` until it is whole.
        plan: What `plan_conversion` said of them; None: it is asked here.
        num_workers: Processes that this call starts, itself included.
        allow_nan: Write values that are infinite or not a number; the manifest counts them.
        progress: Called in this process.

    Returns:
        The manifest; None where other processes still work on the rest, and the last of them finishes the folder.

    Raises:
        UserError: The source is damaged or changed meanwhile, values are not finite, the folder exists, was begun with
            other arguments or cannot be written. What is done is kept and continued by the next call.
        RuntimeError: The target's layout is wrong, or a worker died.
    """
    plan = plan or plan_conversion(source, target)
    arguments = _arguments(source, target, allow_nan)
    partial = PartialFolder(folder)
    if partial.finished(arguments):
        return _manifest_of(partial)
    with partial.session(arguments):
        if partial.finished(arguments):  # by another process, since the question above
            partial.discard()
            return _manifest_of(partial)
        _check_space(partial, plan)
        job = _Job(source, target, partial, allow_nan, progress or (lambda num_bytes: None))
        if num_workers > 1:
            _with_workers(job, _Work(source, target, Path(folder), arguments, allow_nan), num_workers - 1)
        else:
            job.run()
        with partial.finishing() as mine:
            if mine and job.is_done():
                job.finish(arguments, plan)
    return _manifest_of(partial) if partial.finished(arguments) else None


class _Job:
    """The parts of one conversion: the files of the target to write, those of the source to hash."""

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
        """Works until every part is done or with another process."""
        with ThreadPoolExecutor(1) as beside:
            hashing = beside.submit(self._hash_source)
            try:
                for file in self._target.files:
                    with self._partial.claim(_target_part(file.name)) as claim:
                        if claim is not None:
                            self._make(file, claim.earlier)
            except BaseException:
                self._stopped = True
                raise
            hashing.result()

    def is_done(self) -> bool:
        """Whether every part is."""
        parts = [_target_part(file.name) for file in self._target.files]
        parts += [_source_part(name) for name in self._source.files]
        return all(self._partial.record(part) is not None for part in parts)

    def finish(self, arguments: dict[str, Any], plan: Conversion) -> None:
        """Writes everything that is not a weight, and gives the folder its name."""
        partial, source = self._partial, self._source
        if _signatures(source) != arguments["source"]["files"]:
            raise UserError(f"'{source.folder}' changed while it was read. Remove '{partial.path}' and begin again.")
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
        """Writes one file, unless an earlier process did and it is still what that one wrote."""
        path = self._partial.path / file.name
        size = sum(num_bytes(stored) for stored in file.layout.values())
        if earlier is not None and _is_as_recorded(path, earlier):
            self._partial.add_record(_target_part(file.name), earlier)
            self._progress(size)
            return
        temporary = self._partial.temporary(file.name)
        try:
            written = self._target.write(temporary, file, self._counted(file))
            record = {"num_bytes": temporary.stat().st_size, "xxh3": written.get("xxh3") or hash_file(temporary)}
            self._partial.place(temporary, file.name)
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
                if claim.earlier not in (None, record):
                    raise UserError(
                        f"'{path}' is not what it was when the conversion was begun. Remove '{self._partial.path}' and "
                        "begin again."
                    )
                self._partial.add_record(_source_part(name), record)


def _with_workers(job: _Job, work: Callable[[SimpleQueue[str]], None], count: int) -> None:
    """Runs `work` in `count` more processes beside `job`; what one of them cannot do ends all."""
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
    """What a worker does; it travels to a new process."""

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
    """All that the bytes of the target depend on."""
    layout = xxhash.xxh3_64()
    for file in target.files:
        layout.update(repr((file.name, file.layout)).encode())
    return {
        "source": {**_without_tensors(source.describe()), "files": _signatures(source)},
        "target": {**_without_tensors(target.describe()), "layout": layout.hexdigest()},
        "allow_nan": allow_nan,
    }


def _signatures(source: Source) -> dict[str, Any]:
    """File -> size and time of the last change: cheap to compare before and after."""
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
    """Refuses at once what cannot fit; what is there already needs no room."""
    try:
        there = sum((partial.path / name).stat().st_size for name in partial.names())
        free = shutil.disk_usage(partial.path).free
    except FileNotFoundError:  # another process has moved a file, or finished the folder
        return
    if plan.num_bytes - there > free:
        raise UserError(
            f"'{partial.path}' needs {(plan.num_bytes - there) / 1e9:.2f} GB more, but {free / 1e9:.2f} GB are free. "
            "Make room and repeat the command; what is done is kept."
        )


def _hashed(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "xxh3": hash_file(path)}


def _is_as_recorded(path: Path, record: dict[str, Any]) -> bool:
    return path.is_file() and _hashed(path) == {key: record[key] for key in ("num_bytes", "xxh3")}


def _manifest_of(partial: PartialFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((partial.final / MANIFEST).read_text(encoding="utf-8"))
    return found


def _target_part(name: str) -> str:
    return f"target {name}"


def _source_part(name: str) -> str:
    return f"source {name}"
