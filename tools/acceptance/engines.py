"""Acceptance run of rollout engines: the same checks on each engine, with mrl's own as a control.

Selects the model, the order, and the sessions of an engine. `trtllm.py` and `vllm.py` define the engines and their
preparation; the checks are in `checks.py`.
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
"""mrl's own engine; a check that also fails with it does not blame the other engine."""


@dataclass(kw_only=True)
class EngineAcceptance(Sessions):
    """Acceptance run of rollout engines; see `Sessions` for more fields.

    Attributes:
        module: Module of the checks.
        engines: Engines to check, out of `all_engines`.
        all_engines: Names of all known engines.
        settings: Config overrides of each session.
        model_dir: Hugging Face folder; None: a random model.
        num_ranks: Number of ranks in the job, which form one replica.
        launcher: Words in front of each session's command.
    """

    module: str = "acceptance.checks"
    engines: Sequence[str]
    all_engines: Sequence[str]
    settings: Mapping[str, Sequence[str]]
    model_dir: Path | None = None
    num_ranks: int = 1
    launcher: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Checks the names of engines and checks, and creates the folders.

        Raises:
            UserError: A name is unknown, or the folder already has a run.
        """
        check_names("engine", self.engines, self.all_engines)
        super().__post_init__()
        sizes = [f"rollout.tensor_model_parallel_size={self.num_ranks}"] if self.num_ranks > 1 else []
        self.overrides = [*sizes, *self.overrides]  # a session's own overrides are appended and win
        self.versions: dict[str, str] = {}

    def run(self) -> list[Result]:
        """Runs all checks on each engine and returns the results in the order of the page.

        Raises:
            UserError: The engine's package is not installed, or the config or the model folder is invalid.
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

    # overridden by engines

    @abstractmethod
    def installed(self) -> dict[str, str]:
        """Returns the versions of relevant packages.

        Raises:
            UserError: The engine's package is not installed.
        """

    def prepared(self, engine: str, own: list[str]) -> list[str] | None:
        """Prepares an engine and returns its overrides; None if that failed and results were recorded."""
        return own

    def without(self, engine: str, session: str) -> str:
        """Returns why an engine does not have a session; "" if it does."""
        return ""

    def overrides_of(self, session: str, own: Sequence[str]) -> list[str]:
        """Returns the overrides of a session, given those of its engine."""
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
        """Returns overrides that select a folder with weights; writes a random model if none was given."""
        if self.model_dir is None:
            return write_random(config, self.folder / "model")
        arch_from_folder(self.model_dir)
        return from_folder(self.model_dir)
