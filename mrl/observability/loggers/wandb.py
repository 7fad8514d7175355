"""Weights & Biases logger, enabled by `observe.wandb_project`; needs the extra `wandb`.

The x axes are the steps of the run (`training/global_step`, `warm_start/step`), and a resumed run continues under the
same id. W&B keeps what was logged after the resumed step and draws both curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mrl.config.config import Config
from mrl.errors import UserError
from mrl.observability.loggers.base import Logger, Opening, Phase, is_installed


class WandB(Logger):
    """Logger enabled by `observe.wandb_project`."""

    def __init__(self, opening: Opening, wandb: Any) -> None:
        """Starts a W&B run, or continues the one whose id is in the run folder."""
        self._wandb = wandb
        marker = opening.run.root / "wandb_id"
        resumed = opening.resume_step is not None and marker.is_file()
        run_id = marker.read_text().strip() if resumed else secrets.token_hex(8)
        try:
            self._run = wandb.init(
                project=opening.config.observe.wandb_project,
                name=opening.config.observe.wandb_name or opening.run.root.name,
                group=opening.config.observe.wandb_group,
                tags=opening.config.observe.wandb_tags or None,
                id=run_id,
                resume="allow",
                dir=str(opening.run.root),
                config=asdict(opening.config),
            )
        except wandb.Error as error:
            raise UserError(
                f"observe.wandb_project is '{opening.config.observe.wandb_project}', but W&B did not start: {error} "
                "Run `wandb login`, set WANDB_MODE=offline, or set observe.wandb_project=null."
            ) from error
        marker.write_text(run_id)
        self._run.define_metric("training/global_step")
        self._run.define_metric("warm_start/step")
        self._run.define_metric("*", step_metric="training/global_step")
        self._run.define_metric("warm_start/*", step_metric="warm_start/step")

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Logs all metrics of a step."""
        axis = "warm_start/step" if phase == "warm_start" else "training/global_step"
        self._run.log({**metrics, axis: step})

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table of the samples."""
        columns = ["prompt", "response", "answer", "reward", "finish_reason"]
        table = self._wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self._run.log({f"samples/{phase}": table, "training/global_step": step})

    def close(self) -> None:
        """Finishes the run and waits for the upload."""
        self._run.finish()


def check(config: Config) -> None:
    """Raises UserError for a project without the package `wandb`, and for other W&B fields without a project."""
    project = config.observe.wandb_project
    others = [name for name in ("wandb_name", "wandb_group", "wandb_tags") if getattr(config.observe, name)]
    if project is None and others:
        raise UserError(
            f"observe.{others[0]} is set, but observe.wandb_project is null, so W&B is off. Set the project."
        )
    if project is not None and not is_installed("wandb"):
        raise UserError(
            f"observe.wandb_project is '{project}', but the package 'wandb' is not installed. "
            "Run `pip install wandb`, or set observe.wandb_project=null."
        )


def open_wandb(opening: Opening) -> WandB | None:
    """Returns the logger if `observe.wandb_project` is set, else None."""
    if opening.config.observe.wandb_project is None:
        return None
    check(opening.config)
    import wandb

    return WandB(opening, wandb)


LOGGER = open_wandb
