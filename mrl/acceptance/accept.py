"""An acceptance run: every check on each engine, in processes of their own, and a page about it.

Owns the processes (a check that hangs or ends its process takes no other one with it), the model folder, the building
of engines, and who counts as there. What is asked is in `checks.py`, what is written in `page.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mrl.acceptance.table import CHECKS, GRAPHS, SETTINGS, Result, Spec
from mrl.config import Config, load
from mrl.engines.trtllm.inspection import NO_IMPORT
from mrl.errors import UserError
from mrl.formats.hf import HfTarget
from mrl.models.hf_config import arch_from_folder
from mrl.preflight.engine import wanted_engine
from mrl.run.prepare import load_model_facts
from mrl.weights.hf import hf_layout
from mrl.weights.init import random_init
from mrl.weights.tensors import allocate

CONTROL = "native"
"""mrl's own engine: what fails with it too is not TensorRT-LLM's."""

ENGINES = (CONTROL, "trtllm", "trtllm_engine")
NO_BUILT = Version("1.3.dev0")
"""First version without the TensorRT backend."""

SPREAD = 4.0
"""Random matrices are so much larger than a training would start from: their answers would be nearly flat, and a wrong
distribution would look like the right one."""

END_S = 10.0
"""From SIGTERM to SIGKILL."""

BEAT_S = 0.2
TAIL_LINES = 15

CONFIG = """
run: {seed: 1}
model:
  preset: qwen2_tiny
  overrides:
    hidden_size: 1024
    intermediate_size: 2816
    num_hidden_layers: 4
    num_attention_heads: 8
    num_key_value_heads: 2
    vocab_size: 32000
  tokenizer: "char:0123456789<>+#"
  dtype: bfloat16
data: {task: addition, task_kwargs: {min_terms: 4, max_terms: 4, max_value: 9, num_val: 0}}
train: {batch_size: 8}
actor: {param_offload: true, grad_offload: true}
rollout:
  n: 4
  prompt_length: 64
  response_length: 64
  max_num_seqs: 32
  max_num_batched_tokens: 2048
  gpu_memory_utilization: 0.3
  enable_prefix_caching: false
  checkpoint_engine: {canary: false}
reward: {functions: [{name: exact_match}]}
observe: {console: plain, tensorboard: false, report: false}
"""
"""A model small enough for minutes, with heads of 128 as its kernels know them."""


@dataclass
class Acceptance:
    """What is to be accepted, and what came of it.

    Attributes:
        folder: Of everything that is written.
        tools: Folder with the converters and tools/build_trtllm_engine.py.
        engines: Of `ENGINES`.
        checks: Of `CHECKS`.
        overrides: Of the config, for all sessions.
        model_dir: Hugging Face folder; None: a random model.
        num_ranks: Ranks of the job, which are one replica.
        launcher: Words before each session's command.
        start_timeout_s: Longest start of an engine, s; also of a build.
        timeout_s: Longest check, s.
        tell: Called with a line of progress.
    """

    folder: Path
    tools: Path
    engines: Sequence[str] = ENGINES
    checks: Sequence[str] = tuple(CHECKS)
    overrides: Sequence[str] = ()
    model_dir: Path | None = None
    num_ranks: int = 1
    launcher: Sequence[str] = ()
    start_timeout_s: float = 300.0
    timeout_s: float = 120.0
    tell: Callable[[str], None] = field(default=lambda line: None)

    def __post_init__(self) -> None:
        """Makes the folders.

        Raises:
            UserError: An engine or a check has no such name, or the folder exists.
        """
        for what, asked, known in (("engine", self.engines, ENGINES), ("check", self.checks, CHECKS)):
            unknown = [name for name in asked if name not in known]
            if unknown:
                raise UserError(f"there is no {what} '{unknown[0]}'; known: {', '.join(known)}.")
        if (self.folder / "config.yaml").exists():
            raise UserError(f"'{self.folder}' has an acceptance run already. Name another --output_dir.")
        self.folder = self.folder.resolve()
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self.results: list[Result] = []
        self.versions: dict[str, str] = {}

    def run(self) -> list[Result]:
        """Every check on each engine, in the order of the page.

        Raises:
            UserError: TensorRT-LLM is not installed, or the config or the model folder is not what it should be.
        """
        self.versions = self._installed()
        (self.folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        config = self._load(())
        model = self._model(config)
        for engine in self.engines:
            own = [f"rollout.name={engine}", *model]
            missing = self._missing(engine)
            if missing:
                self._give_up(engine, self.checks, "skipped", missing)
            elif engine == "trtllm_engine":
                own += ["rollout.enforce_eager=true"]
                built = self._build(own)
                if built is not None:
                    self._accept(engine, [*own, f"rollout.engine_dir={built}"])
            else:
                self._accept(engine, own)
        order = list(CHECKS)
        self.results.sort(key=lambda result: (self.engines.index(result.engine), order.index(result.check)))
        return self.results

    # sessions

    def _accept(self, engine: str, own: Sequence[str]) -> None:
        (self.folder / engine).mkdir(exist_ok=True)
        for session, settings in SETTINGS.items():
            wanted = [name for name in self.checks if CHECKS[name].session == session]
            if not wanted:
                continue
            if any((result.engine, result.check) == (engine, "start") for result in self._failing()):
                self._give_up(engine, wanted, "skipped", "the engine did not start")
                continue
            if engine == "trtllm_engine" and session == GRAPHS:
                self._give_up(engine, wanted, "skipped", "ModelRunner captures no CUDA graphs")
                continue
            self._session(engine, session, wanted, [*own, *settings])

    def _session(self, engine: str, session: str, wanted: Sequence[str], overrides: Sequence[str]) -> None:
        """The checks of a session, in as many processes as they need."""
        left = [name for name in wanted if name not in ("start", "end")]
        for number in range(len(left) + 1):
            name = f"{engine}-{session}" + (f"-{number + 1}" if number else "")
            log, lines = self.folder / "logs" / f"{name}.log", self.folder / "logs" / f"{name}.jsonl"
            spec = Spec(
                config=str(self.folder / "config.yaml"),
                overrides=[*self._given(), *overrides, f"run.output_dir={self.folder / engine / name}"],
                checks=left,
                lines=str(lines),
                folder=str(self.folder / engine),
            )
            file = lines.with_suffix(".json")
            file.write_text(json.dumps(asdict(spec), indent=1), encoding="utf-8")
            lines.touch()
            words = [*self.launcher, sys.executable, "-m", "mrl.acceptance.session", str(file)]
            at, said = self._watch(words, log, lines, engine, wanted)
            if not said:
                return
            again = at == "start" and self._has(engine, "start")  # after a check that ended the process before
            if at in wanted and not again:
                self._add(Result(engine, at, "fails", said, {}, log=str(log)))
            if at == "start":
                rest = [name for name in wanted if not self._has(engine, name)]
                why = "the engine did not start" + (f": {said}" if again or "start" not in wanted else "")
                self._give_up(engine, rest, "skipped", why, log)
                return
            if at == "end":
                return
            left = left[left.index(at) + 1 :]
            if not left:
                return

    def _watch(
        self, words: Sequence[str], log: Path, lines: Path, engine: str, wanted: Sequence[str]
    ) -> tuple[str, str]:
        """Waits for a session; (check that it was at, why it ended there), "" where it ended as it should."""
        at, seen, since = "start", 0, time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while True:
                status = process.poll()
                whole = lines.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be half written
                found = [json.loads(line) for line in whole]
                for line in found[seen:]:
                    at, since = line.get("begins", at), time.monotonic()
                    if line.get("ended") in wanted and not self._has(engine, line["ended"]):
                        status_, said, facts = line["outcome"]
                        self._add(Result(engine, line["ended"], status_, said, facts, line["took_s"], str(log)))
                seen = len(found)
                limit = self.start_timeout_s if at == "start" else self.timeout_s
                if status is not None and (status != 0 or at != "end"):
                    return at, f"the process ended with status {status}: {_last(log)}"
                if status is not None:
                    if "end" in wanted:
                        self._add(Result(engine, "end", "works", "", {}, time.monotonic() - since, str(log)))
                    return at, ""
                if time.monotonic() - since > limit:
                    return at, f"no answer in {limit:g} s; the last of its log: {_last(log)}"
                time.sleep(BEAT_S)
        finally:
            _end(process)

    # what must be there

    def _installed(self) -> dict[str, str]:
        """Versions; TensorRT-LLM is imported in a process of its own."""
        needed = set(self.engines) != {CONTROL}
        if needed and importlib.util.find_spec("tensorrt_llm") is None:
            raise UserError(
                "TensorRT-LLM is not installed; nothing else was looked at. Start this in NVIDIA's container "
                "(nvcr.io/nvidia/tensorrt-llm/release; 1.2 or 1.3 for rollout.name=trtllm, below 1.3 for "
                "trtllm_engine), with mrl installed there by `pip install -e .`."
            )
        log = self.folder / "logs" / "versions.log"
        text = self._command([sys.executable, "-m", "mrl.engines.trtllm.inspection"], log)
        found: dict[str, str] = {} if text else json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
        if needed and not found.get("tensorrt_llm", NO_IMPORT).startswith(NO_IMPORT):
            return found
        if needed or text:
            raise UserError(
                f"TensorRT-LLM is installed, but {text or found['tensorrt_llm']} (all of it in {log}). Start this in "
                "the container that it came with."
            )
        return found

    def _missing(self, engine: str) -> str:
        """Why an engine cannot be there; "" where it can."""
        if engine != "trtllm_engine":
            return ""
        version = self.versions["tensorrt_llm"]
        try:
            if Version(version) >= NO_BUILT:
                return f"TensorRT-LLM {version} has no TensorRT backend; 1.3 removed it"
        except InvalidVersion:
            self.tell(f"TensorRT-LLM's version '{version}' is none; built engines are tried")
        return ""

    def _model(self, config: Config) -> list[str]:
        """Overrides that name a folder with weights; it is written where the model is random."""
        if self.model_dir is not None:
            arch_from_folder(self.model_dir)
            return _from_folder(self.model_dir)
        arch, tokenizer = load_model_facts(config)
        folder, layout = self.folder / "model", hf_layout(arch, config.model.dtype)
        tensors = allocate(layout)
        random_init(arch, layout, tensors, config.run.seed)
        for tensor in tensors.values():
            tensor.mul_(SPREAD if tensor.dim() > 1 else 1.0)
        folder.mkdir()
        target, records = HfTarget(arch, config.model.dtype), {}
        for file in target.files:
            records[file.name] = target.write(folder / file.name, file, ((name, tensors[name]) for name in file.layout))
        target.finish(folder, records)
        tokenizer.save(folder)
        return _from_folder(folder)

    def _build(self, own: Sequence[str]) -> Path | None:
        """The folder of engines for the run's sizes, made as preflight tells users to; None: that failed."""
        config = self._load(own)
        if config.rollout.engine_dir is not None:
            return Path(config.rollout.engine_dir)
        model = config.model.path or ""
        wanted = wanted_engine(config, arch_from_folder(model))
        checkpoint, engines = self.folder / "trtllm_checkpoint", self.folder / "trtllm_engines"
        places = {"MODEL": model, "CHECKPOINT": str(checkpoint), "ENGINES": str(engines)}
        for line in wanted.commands().splitlines():
            words = [places.get(word, word) for word in shlex.split(line)]
            tool = Path(words[1])
            log = self.folder / "logs" / f"{tool.stem}.log"
            self.tell(f"trtllm_engine: {tool.name}")
            said = self._command([sys.executable, str(self.tools / tool.name), *words[2:]], log)
            if said:
                self._give_up("trtllm_engine", self.checks, "fails", f"{tool.name}: {said}", log, others="skipped")
                return None
        return engines

    def _command(self, words: Sequence[str], log: Path) -> str:
        """Runs a command to its end; why it failed, "" where it did not."""
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    words, stdout=output, stderr=subprocess.STDOUT, timeout=self.start_timeout_s, check=False
                )
        except subprocess.TimeoutExpired:
            return f"no end in {self.start_timeout_s:g} s; the last of its log: {_last(log)}"
        return "" if done.returncode == 0 else f"exit status {done.returncode}: {_last(log)}"

    # results

    def _load(self, more: Sequence[str]) -> Config:
        return load(self.folder / "config.yaml", [*self._given(), *more])

    def _given(self) -> list[str]:
        """Overrides of the user; a session's own come after them."""
        sizes = [f"rollout.tensor_model_parallel_size={self.num_ranks}"] if self.num_ranks > 1 else []
        return [*sizes, *self.overrides]

    def _has(self, engine: str, check: str) -> bool:
        return any((result.engine, result.check) == (engine, check) for result in self.results)

    def _failing(self) -> list[Result]:
        return [result for result in self.results if result.status == "fails"]

    def _add(self, result: Result) -> None:
        self.results.append(result)
        self.tell(f"{result.engine}: {result.check} {result.status}" + (f": {result.said}" if result.said else ""))

    def _give_up(
        self, engine: str, checks: Sequence[str], status: str, why: str, log: Path | None = None, others: str = ""
    ) -> None:
        """The same word for each check; after the first one `others`, if given."""
        for number, check in enumerate(checks):
            word = others if others and number else status
            self._add(Result(engine, check, word, why, {}, log="" if log is None else str(log)))  # type: ignore[arg-type]


def _from_folder(folder: Path) -> list[str]:
    return [f"model.path={folder.resolve()}", "model.preset=null", "~model.overrides", "model.tokenizer=null"]


def _last(log: Path) -> str:
    """The last line that says something, which in Python is the error."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    told = [line for line in lines[-TAIL_LINES:] if "Error" in line or "error" in line]
    return (told or [line for line in lines if line] or ["nothing"])[-1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a session and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
