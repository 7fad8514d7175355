"""An acceptance run of engines: the same checks on each of them, mrl's own among them as a control.

Owns the model, the order, and the sessions of an engine. Which engines there are, and what each needs before it can be
looked at, is known to `trtllm.py` (TensorRT-LLM) and `vllm.py`. What is asked is in `checks.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from acceptance.model import CONFIG, from_folder, write_random
from acceptance.result import Result
from acceptance.sessions import Sessions, check_names
from mrl.config.config import Config
from mrl.models.hf_config import arch_from_folder

CONTROL = "native"
"""mrl's own engine: what fails with it too is not the other's."""


@dataclass(kw_only=True)
class EngineAcceptance(Sessions):
    """What is to be accepted, and what came of it.

    Attributes:
        module: As of `Sessions`.
        engines: Of `all_engines`.
        all_engines: Every engine that can be looked at.
        settings: Session -> its overrides.
        model_dir: Hugging Face folder; None: a random model.
        num_ranks: Ranks of the job, which are one replica.
        launcher: Words before each session's command.
    """

    module: str = "acceptance.checks"
    engines: Sequence[str]
    all_engines: Sequence[str]
    settings: Mapping[str, Sequence[str]]
    model_dir: Path | None = None
    num_ranks: int = 1
    launcher: Sequence[str] = ()

    def __post_init__(self) -> None:
        """As of `Sessions`.

        Raises:
            UserError: There is no such engine, too.
        """
        check_names("engine", self.engines, self.all_engines)
        super().__post_init__()
        sizes = [f"rollout.tensor_model_parallel_size={self.num_ranks}"] if self.num_ranks > 1 else []
        self.overrides = [*sizes, *self.overrides]  # a session's own come after them
        self.versions: dict[str, str] = {}

    def run(self) -> list[Result]:
        """Every check on each engine, in the order of the page.

        Raises:
            UserError: What is to be looked at is not installed, or the config or the model folder is not what it
                should be.
        """
        self.versions = self.installed()
        (self.folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        config = self.load(())
        model = self._model(config)
        for engine in self.engines:
            own = self.prepared(engine, [f"rollout.name={engine}", *model])
            if own is not None:
                self._accept(engine, own)
        order = list(self.known)
        self.results.sort(key=lambda result: (self.engines.index(result.engine), order.index(result.check)))
        return self.results

    # what differs

    @abstractmethod
    def installed(self) -> dict[str, str]:
        """Versions.

        Raises:
            UserError: What is to be looked at is not there.
        """

    def prepared(self, engine: str, own: list[str]) -> list[str] | None:
        """An engine's overrides, after what it needs was made; None: it was given up."""
        return own

    def without(self, engine: str, session: str) -> str:
        """Why an engine has no such session; "" where it has."""
        return ""

    def overrides_of(self, session: str, own: Sequence[str]) -> list[str]:
        """Of a session, from those of its engine."""
        return [*own, *self.settings[session]]

    # sessions

    def _accept(self, engine: str, own: Sequence[str]) -> None:
        (self.folder / engine).mkdir(exist_ok=True)
        for session in self.settings:
            wanted = [name for name in self.checks if self.known[name].session == session]
            if not wanted:
                continue
            if any((each.engine, each.check, each.status) == (engine, "start", "fails") for each in self.results):
                self.give_up(engine, wanted, "skipped", "the engine did not start")
            elif why := self.without(engine, session):
                self.give_up(engine, wanted, "skipped", why)
            else:
                self.session(engine, session, wanted, self.overrides_of(session, own), launcher=self.launcher)

    def _model(self, config: Config) -> list[str]:
        """Overrides that name a folder with weights; it is written where the model is random."""
        if self.model_dir is None:
            return write_random(config, self.folder / "model")
        arch_from_folder(self.model_dir)
        return from_folder(self.model_dir)
