"""Acceptance run of TensorRT-LLM: all checks on each of its engines.

Prepares the engines and reports versions. The checks are in `checks.py`, their order in `engines.py`, the processes in
`sessions.py`, the model in `model.py`, and the page in `page.py`.
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

from acceptance.engines import CONTROL, EngineAcceptance
from acceptance.result import Check
from acceptance.trtllm_table import ASLEEP, CHECKS, FP8, GRAPHS, SETTINGS
from mrl.engines.trtllm.engine_dir import wanted_engine
from mrl.engines.trtllm.inspection import NO_IMPORT
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder

ENGINES = (CONTROL, "trtllm", "trtllm_engine")
NO_BUILT = Version("1.3.dev0")
"""First version without the TensorRT backend."""

NO_GRAPHS = "ModelRunner captures no CUDA graphs"
NOT_BUILT = {GRAPHS: NO_GRAPHS, ASLEEP: NO_GRAPHS, FP8: "weight syncs of built engines do not support FP8"}
"""Reason built engines do not have a session."""


@dataclass(kw_only=True)
class Acceptance(EngineAcceptance):
    """Acceptance run of TensorRT-LLM; see `EngineAcceptance` for the fields."""

    known: Mapping[str, Check] = field(default_factory=lambda: CHECKS)
    checks: Sequence[str] = tuple(CHECKS)
    engines: Sequence[str] = ENGINES
    all_engines: Sequence[str] = ENGINES
    settings: Mapping[str, Sequence[str]] = field(default_factory=lambda: SETTINGS)

    def prepared(self, engine: str, own: list[str]) -> list[str] | None:
        """Returns an engine's overrides after building engines for `trtllm_engine`; None if that failed."""
        if engine != "trtllm_engine":
            return own
        missing = self._missing()
        if missing:
            self.give_up(engine, self.checks, "skipped", missing)
            return None
        own = [*own, "rollout.enforce_eager=true"]
        built = self._build(own)
        return None if built is None else [*own, f"rollout.engine_dir={built}"]

    def without(self, engine: str, session: str) -> str:
        """Returns why a session is not available with built engines; "" if available."""
        return NOT_BUILT.get(session, "") if engine == "trtllm_engine" else ""

    def installed(self) -> dict[str, str]:
        """Returns the versions of relevant packages; imports TensorRT-LLM in a separate process."""
        needed = set(self.engines) != {CONTROL}
        if needed and importlib.util.find_spec("tensorrt_llm") is None:
            raise UserError(
                "TensorRT-LLM is not installed; nothing was checked. Start this in NVIDIA's container "
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
                f"TensorRT-LLM is installed, but {text or found['tensorrt_llm']} (full output in {log}). Start this in "
                "TensorRT-LLM's container."
            )
        return found

    def _missing(self) -> str:
        """Returns why built engines are not supported by the installed version; "" if they are."""
        version = self.versions["tensorrt_llm"]
        try:
            if Version(version) >= NO_BUILT:
                return f"TensorRT-LLM {version} has no TensorRT backend; 1.3 removed it"
        except InvalidVersion:
            self.tell(f"cannot parse TensorRT-LLM's version '{version}'; trying built engines")
        return ""

    def _build(self, own: Sequence[str]) -> Path | None:
        """Builds engines for the run's sizes by validation's commands; returns the folder, None on failure."""
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
