"""Expands a shell script with bash into the command lines that it would start, without starting or changing anything.

Bash runs in restricted mode with a few programs that only print (see `bash_prelude.py`). If the kernel supports it, it
is also confined: no network, no writes outside a temporary folder, no signals to the parent process. Scripts that the
script sources or starts are expanded with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.commands.from_verl.bash_prelude import PRELUDE, PROGRAMS, RENAMED
from mrl.commands.from_verl.batch_job import BatchJob, batch_job
from mrl.commands.from_verl.redirections import NOWHERE, without_redirections
from mrl.config.verl_keys.trainer_programs import MENTIONED, program
from mrl.distributed.launch import get_env
from mrl.distributed.worker_processes.folders import temporary_folder
from mrl.errors import UserError

LIMIT_S = 20
MEMORY_MB, FILE_MB = 1024, 64
MAX_BYTES = 1 << 20
"""Largest script, bytes."""
MAX_PRINTED_BYTES = 1 << 20
"""Most output of an expansion, bytes."""
MAX_RECORDED_BYTES = 8 << 20
"""Largest size of the records of an expansion (command lines that the script would start), bytes."""
_LOOK_S = 0.2
"""Interval at which the size of the records is checked, s."""
ROUNDS = 40
"""Largest number of expansions of a script; each adds the texts that the previous one requested."""
FIRST_DESCRIPTOR = 100
"""Lowest number of the descriptor that records are written to."""
NOT_SET = "_IS_NOT_SET"
"""Suffix of the placeholder for an unset variable: NAME_IS_NOT_SET."""

_INSTEAD = "Give its command line instead."

_HOME = str(Path(__file__).resolve().parents[3])
_BOOT = (
    "import json, os, sys\nhome, folder, bash, *words = sys.argv[1:]\nsys.path.insert(0, home)\n"
    "from mrl.distributed.worker_processes.landlock_seccomp import Confinement, confine\n"
    f"limits = dict(memory_mb={MEMORY_MB}, file_mb={FILE_MB}, cpu_s={LIMIT_S})\n"
    "confine(Confinement(writable=(folder,), calls='worker', **limits))\n"
    "kept = {name: value for name, value in os.environ.items() if name not in ('BASH_ENV', 'ENV', 'SHELLOPTS')}\n"
    "os.execve(bash, ['bash', '--norc', '--noprofile', '-c', *words], kept)"
)
_NAMES = ".bashrc .bash_profile .profile .zshrc activate conda.sh mamba.sh set_env.sh setvars.sh bashrc profile"
_SET_UP = frozenset(_NAMES.split())
"""Scripts that set up a shell, not a run."""

_RESTRICTED = re.compile(r"(?m)^.*?: (?:line \d+: )?([\w./+@~-]*/[\w./+@~-]*): restricted: cannot specify")
_UNSET = re.compile(r"(?m): line \d+: ([A-Za-z_]\w*)(?:\[\d+\])?: (?:unbound variable$|)(.*)$")


@dataclass
class Expansion:
    """Result of an expansion.

    Attributes:
        commands: Arguments of each command line, in order.
        unset: Unset variables and argument positions that the script needs; the expansion used `NAME_IS_NOT_SET` and
            `ARGUMENT_1_IS_NOT_SET` for them.
        lacks: Scripts that it sources and that do not exist.
        said: Output of bash and the script.
        status: Exit status of the script.
        job: Job of SLURM that the script is or starts; None: it does neither.
    """

    commands: list[list[str]] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    said: str = ""
    status: int = 0
    job: BatchJob | None = None

    @property
    def trainers(self) -> list[list[str]]:
        """Command lines that start a program of verl."""
        return [words for words in self.commands if any(map(program, words))]


def expand(text: str, name: str, arguments: Sequence[str] = ()) -> Expansion:
    """Expands a script as if bash ran it from its path in the working directory.

    Args:
        text: Text of the script.
        name: Path of the script: `$0` and BASH_SOURCE.
        arguments: Arguments of the script.

    Raises:
        UserError: There is no bash; the script is too large or not text; or the expansion does not end, prints too much
            or starts too many programs.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise UserError(f"'{name}' has more than {MAX_BYTES >> 20} MiB. {_INSTEAD}")
    if "\0" in text:
        raise UserError(f"'{name}' has a NUL character, so it is not a shell script. Give a script or a command line.")
    texts: dict[str, str] = {}
    by_path: set[str] = set()
    unset: dict[str, str] = {}
    job = batch_job(text)
    of_job = {} if job is None else {name: value for name, value in job.variables().items() if not get_env(name)}
    lacks: list[str] = []
    positions: list[str] = []
    found = Expansion()
    for _ in range(ROUNDS):
        records, said, status = _run(text, name, arguments, texts, by_path, of_job | unset)
        found = Expansion(
            [words for kind, words in records if kind == "run"], [*positions, *unset], lacks, said, status,
        )  # fmt: skip
        wanted = [(kind, words[0]) for kind, words in records if kind != "run" and words and words[0] not in texts]
        for kind, key in wanted:
            texts[key] = _ready(key if kind == "text" else _read(key, lacks))
        paths = set(_RESTRICTED.findall(said)) - by_path
        by_path |= paths
        if wanted or paths:
            continue
        if found.trainers:
            break
        needed = [one for one in _needed(text, said) if one not in unset and not one.endswith(NOT_SET)]
        unset |= {variable: f"{variable}{NOT_SET}" for variable in needed}
        if not needed:
            if not status or arguments or not (count := _positions(text, said)):
                break
            arguments = [f"ARGUMENT_{position}{NOT_SET}" for position in range(1, count + 1)]
            positions = [str(position) for position in range(1, count + 1)]
    found.job = next((one for one in map(batch_job, texts.values()) if one and one.options and not job), job)
    return found


def _positions(text: str, said: str) -> int:
    """Returns the number of arguments that the script requires: it counts them, or stops at one that is not set."""
    if "$#" not in text and not re.search(r"line \d+: \$?[1-9]: unbound variable", said):
        return 0
    return max(map(int, re.findall(r"\$\{?([1-9])", text)), default=0)


def _needed(text: str, said: str) -> list[str]:
    """Returns the variables without which the script stops: unset under `set -u`, or by `${NAME:?}`."""
    stopped = {match[1]: match[0] for match in _UNSET.finditer(said)}
    return [
        name
        for name, line in stopped.items()
        if line.endswith("unbound variable") or re.search(rf"\$\{{{name}:?\?", text)
    ]


def _read(path: str, lacks: list[str]) -> str:
    """Returns a script's text; "" for scripts that only set up a shell, and for missing ones."""
    if Path(path).name in _SET_UP:
        return ""
    try:
        if os.path.getsize(path) > MAX_BYTES:
            raise ValueError("too large")
        text = Path(path).read_text(encoding="utf-8")
        if "\0" in text:
            raise ValueError("not text")
        return text
    except (OSError, ValueError):
        lacks.append(path)
        return ""


def _ready(text: str) -> str:
    """Rewrites a script so that restricted bash accepts it."""
    text = without_redirections(text.replace("\r\n", "\n"))
    for name, other in RENAMED.items():
        text = re.sub(
            rf"(?<![\w.$]){name}(?=\+?=|\[)|(?<=\$){name}\b|(?<=\$\{{){name}\b|(?<=\$\{{[#!]){name}\b", other, text
        )
    return text


def _run(
    text: str, name: str, arguments: Sequence[str], texts: dict[str, str], by_path: set[str], unset: dict[str, str]
) -> tuple[list[tuple[str, list[str]]], str, int]:
    """Expands the script once; returns records, output and exit status."""
    bash = shutil.which("bash")
    if bash is None:
        raise UserError(f"'{name}' is a shell script, and there is no bash to expand it. {_INSTEAD}")
    with temporary_folder("verl") as folder:
        programs = Path(folder) / "programs"
        programs.mkdir()
        for one in PROGRAMS:
            if (place := shutil.which(one)) is not None:
                (programs / one).symlink_to(place)
        with open(Path(folder) / "records", "ab+") as file:
            # Above the descriptors that the prelude uses, however many files this process has open.
            records = os.fdopen(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR), "ab+")
        with records:
            prelude = _filled(
                folder=folder, programs=str(programs), source=name, fd=str(records.fileno()), keys=list(texts),
                texts=list(texts.values()), slashes=by_path, unset=unset,
            )  # fmt: skip
            # Linux limits one argument to 128 KiB, so bash reads the script from a file.
            script = Path(folder) / "script"
            script.write_text(prelude + _ready(text), encoding="utf-8", errors="surrogateescape", newline="")
            words = [f'MRL_CODE=$(<{shlex.quote(str(script))}); eval -- "$MRL_CODE"', name, *arguments]
            said, status = _communicate(
                [sys.executable, "-I", "-c", _BOOT, _HOME, folder, bash, *words], records.fileno(), name
            )
            records.seek(0)
            return list(_records(records.read())), said, status


def _filled(
    *,
    folder: str,
    programs: str,
    source: str,
    fd: str,
    keys: list[str],
    texts: list[str],
    slashes: set[str],
    unset: dict[str, str],
) -> str:
    values = {
        "programs": shlex.quote(programs), "folder": shlex.quote(folder), "source": shlex.quote(source), "fd": fd,
        "nowhere": str(NOWHERE), "held": str(NOWHERE + 1),
        "keys": shlex.join(keys), "texts": shlex.join(texts), "trainers": f"({MENTIONED})".replace("\\b", ""),
        "slashes": "\n".join(f'{one}() {{ command_not_found_handle {one} "$@"; }}' for one in sorted(slashes)),
    }  # fmt: skip
    values["unset"] = " ".join(f"{variable}={shlex.quote(value)}" for variable, value in unset.items())
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], PRELUDE)


def _communicate(words: list[str], fd: int, name: str) -> tuple[str, int]:
    try:
        process = subprocess.Popen(
            words, pass_fds=(fd,), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise UserError(f"'{name}' cannot be expanded by bash: {error}. {_INSTEAD}") from error
    try:
        return _printed(process, fd, name), process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _printed(process: subprocess.Popen[bytes], records: int, name: str) -> str:
    """Returns the output of an expansion after its end; `records` is the descriptor of the file of records."""
    end, said = time.monotonic() + LIMIT_S, bytearray()
    with selectors.DefaultSelector() as selector:
        if process.stdout is not None:
            selector.register(process.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_LOOK_S):
                if part := os.read(key.fd, MAX_BYTES):
                    said += part
                else:
                    selector.unregister(key.fileobj)
            if len(said) > MAX_PRINTED_BYTES:
                raise UserError(
                    f"'{name}' prints more than {MAX_PRINTED_BYTES >> 20} MiB when bash expands it. {_INSTEAD}"
                )
            if os.fstat(records).st_size > MAX_RECORDED_BYTES:
                raise UserError(f"'{name}' starts too many programs when bash expands it. {_INSTEAD}")
            if time.monotonic() > end:
                raise UserError(
                    f"'{name}' does not end within {LIMIT_S} s when bash expands it: it waits for something, or "
                    f"loops. {_INSTEAD}"
                )
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise UserError(f"'{name}' does not end within {LIMIT_S} s. {_INSTEAD}") from error
    return said.decode("utf-8", "replace")


def _records(raw: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yields kind and words of each record; see `bash_prelude.py`."""
    fields = raw.decode("utf-8", "replace").replace("\1", "\n").split("\0")[:-1]
    words: dict[str, list[str]] = {}
    parts: dict[str, str] = {}
    for process, kind, text in zip(*[iter(fields)] * 3, strict=False):
        if kind == "part":
            parts[process] = parts.get(process, "") + text
        elif kind == "word":
            words.setdefault(process, []).append(parts.pop(process, "") + text)
        else:
            yield kind, words.pop(process, [])
