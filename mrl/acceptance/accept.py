"""An acceptance run of TensorRT-LLM: every check on each engine.

Owns which engines are looked at, the building of engines, and who counts as there. What is asked is in `checks.py`, the
processes are in `sessions.py`, the model in `model.py`, what is written in `page.py`.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mrl.acceptance.model import CONFIG, from_folder, write_random
from mrl.acceptance.result import Check, Result
from mrl.acceptance.sessions import Sessions, check_names
from mrl.acceptance.table import ASLEEP, CHECKS, FP8, GRAPHS, SETTINGS
from mrl.config import Config
from mrl.engines.trtllm.inspection import NO_IMPORT
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.preflight.engine import wanted_engine

CONTROL = "native"
"""mrl's own engine: what fails with it too is not TensorRT-LLM's."""

ENGINES = (CONTROL, "trtllm", "trtllm_engine")
NO_BUILT = Version("1.3.dev0")
"""First version without the TensorRT backend."""

NO_GRAPHS = "ModelRunner captures no CUDA graphs"
NOT_BUILT = {GRAPHS: NO_GRAPHS, ASLEEP: NO_GRAPHS, FP8: "a refit brings a built engine no FP8"}
"""Session -> why a built engine has none."""


@dataclass(kw_only=True)
class Acceptance(Sessions):
    """What is to be accepted, and what came of it.

    Attributes:
        known: As of `Sessions`.
        module: As of `Sessions`.
        checks: Of `CHECKS`.
        engines: Of `ENGINES`.
        model_dir: Hugging Face folder; None: a random model.
        num_ranks: Ranks of the job, which are one replica.
        launcher: Words before each session's command.
    """

    known: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    module: str = "mrl.acceptance.checks"
    checks: Sequence[str] = tuple(CHECKS)
    engines: Sequence[str] = ENGINES
    model_dir: Path | None = None
    num_ranks: int = 1
    launcher: Sequence[str] = ()

    def __post_init__(self) -> None:
        """As of `Sessions`.

        Raises:
            UserError: There is no such engine, too.
        """
        check_names("engine", self.engines, ENGINES)
        super().__post_init__()
        sizes = [f"rollout.tensor_model_parallel_size={self.num_ranks}"] if self.num_ranks > 1 else []
        self.overrides = [*sizes, *self.overrides]  # a session's own come after them
        self.versions: dict[str, str] = {}

    def run(self) -> list[Result]:
        """Every check on each engine, in the order of the page.

        Raises:
            UserError: TensorRT-LLM is not installed, or the config or the model folder is not what it should be.
        """
        self.versions = self._installed()
        (self.folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        config = self.load(())
        model = self._model(config)
        for engine in self.engines:
            own = [f"rollout.name={engine}", *model]
            missing = self._missing(engine)
            if missing:
                self.give_up(engine, self.checks, "skipped", missing)
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
            if any((each.engine, each.check, each.status) == (engine, "start", "fails") for each in self.results):
                self.give_up(engine, wanted, "skipped", "the engine did not start")
                continue
            if engine == "trtllm_engine" and session in NOT_BUILT:
                self.give_up(engine, wanted, "skipped", NOT_BUILT[session])
                continue
            self.session(engine, session, wanted, [*own, *settings], launcher=self.launcher)

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
        text = self.command([sys.executable, "-m", "mrl.engines.trtllm.inspection"], log)
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
        if self.model_dir is None:
            return write_random(config, self.folder / "model")
        arch_from_folder(self.model_dir)
        return from_folder(self.model_dir)

    def _build(self, own: Sequence[str]) -> Path | None:
        """The folder of engines for the run's sizes, made as preflight tells users to; None: that failed."""
        config = self.load(own)
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
            said = self.command([sys.executable, str(self.tools / tool.name), *words[2:]], log)
            if said:
                self.give_up("trtllm_engine", self.checks, "fails", f"{tool.name}: {said}", log, others="skipped")
                return None
        return engines
