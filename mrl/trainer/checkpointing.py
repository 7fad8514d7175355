"""Checkpoints of a run: writes and loads actor, critic, their optimizers, training state and buffered samples.

`checkpoint/run_dir/checkpoint.py` makes a checkpoint folder appear atomically.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.run_dir.checkpoint import CheckpointManager, PendingCheckpoint, ResumePoint
from mrl.checkpoint.run_dir.manifest import STATE_FILE, read_json_object
from mrl.config.config import CheckpointConfig
from mrl.config.peft_folder import ADAPTER_FOLDER
from mrl.distributed.collectives import any_rank, raise_on_all_ranks
from mrl.distributed.groups import ProcessGroups
from mrl.errors import UserError
from mrl.megatron import checkpoint as megatron_checkpoint
from mrl.megatron.actor import Actor
from mrl.megatron.critic import Critic
from mrl.megatron.trainable_model import TrainableModel
from mrl.observability.run_log import RunLog
from mrl.observability.timers import Timers
from mrl.trainer import inflight_samples
from mrl.trainer.actor_weights import ActorWeights
from mrl.trainer.preemption import RunProgress
from mrl.trainer.rank_roles import on_trainers
from mrl.trainer.training_state import SavedState, TrainingState, malformed_state_is_user_error, parse_state


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written.

    Attributes:
        standing: Training state in the checkpoint.
        unfinished: Its folder.
        writing: Background writers of the models.
        waited_s: Seconds that training waited for the start.
    """

    standing: SavedState
    unfinished: PendingCheckpoint
    writing: megatron_checkpoint.PendingWrites
    waited_s: float


class Checkpointing:
    """Writer and reader of the run's checkpoints; every method except `close` is collective over the job.

    Attributes:
        checkpoints: Checkpoint folders of the run.
        resume_point: Checkpoint to resume from; None for a new run.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        checkpoints: CheckpointManager,
        resume_point: ResumePoint | None,
        *,
        groups: ProcessGroups,
        actor: Actor | None,
        critic: Critic | None,
        weights: ActorWeights,
        state: TrainingState,
        progress: RunProgress,
        timers: Timers,
        log: RunLog,
        on_written: Callable[[int, Path], None],
    ) -> None:
        self.checkpoints, self.resume_point = checkpoints, resume_point
        models = {"actor": actor, "critic": critic}
        self._models: dict[str, TrainableModel] = {name: model for name, model in models.items() if model is not None}
        self._groups = groups
        self._config, self._weights, self._state = config, weights, state
        self._progress, self._timers, self._log = progress, timers, log
        self._savers = {name: megatron_checkpoint.Saver(model) for name, model in self._models.items()}
        self._pending: _Pending | None = None
        self._on_written = on_written
        self._has_warned = False

    @property
    def pending_writes(self) -> megatron_checkpoint.PendingWrites | None:
        """Background writers of the unfinished checkpoint; None if there is none."""
        return None if self._pending is None else self._pending.writing

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collective over the job: writes a checkpoint, from which `resume` continues with the same results.

        Args:
            step: Number of steps done.
            metrics: Metrics of that step, among them `checkpoint.best_metric`.
        """
        standing = self._progress.record_state(step, metrics)
        self._begin(standing, async_save=self._config.async_save, export=self._config.export_hf)
        if not self._config.async_save:
            self.finish_pending(wait=True)
        self._log.step(step, self._timers.metrics())

    def write_saved_state(self, saved_state: SavedState) -> None:
        """Collective over the job: at a stop, writes this state and the current weights; waits until they are on disk.

        Leaves out the Hugging Face export if the time does not suffice for it.
        """
        if self._pending is None or self._pending.standing is not saved_state:
            export = self._config.export_hf and not any_rank(not self._progress.has_time_to_export())
            if self._config.export_hf and not export:
                self._log.note(
                    "this checkpoint gets no Hugging Face export, because the stop leaves too little time "
                    "(run.stop_timeout_s, run.term_timeout_s). mrl convert megatron-to-hf can make it; "
                    "with adapters it needs the model as --base."
                )
            self._begin(saved_state, async_save=False, export=export)
        self.finish_pending(wait=True)

    def finish_pending(self, *, wait: bool = False) -> None:
        """Collective over the job: finishes the checkpoint that is being written once all ranks have written.

        Args:
            wait: True to wait for all ranks; False to do nothing if some are still writing.
        """
        pending = self._pending
        if pending is None or not (wait or self.checkpoints.is_written(pending.unfinished)):
            return
        self._pending = None
        began = time.monotonic()
        with self._timers.phase("save_checkpoint"):
            path = self.checkpoints.finish_save(pending.unfinished)
            if self.checkpoints.rank == 0:
                self._drop_unused_references()
        pending.standing.is_saved = True
        waited_s, written_s = pending.waited_s + time.monotonic() - began, pending.writing.seconds
        self._progress.record_save_time(save_s=waited_s + written_s)
        warning = self._progress.short_timeouts()
        if warning and not self._has_warned:
            self._has_warned = True
            self._log.note(f"WARNING {warning}")
        times = f", written in the background in {written_s:.1f} s; training waited {waited_s:.1f} s"
        self._log.note(f"checkpoint {path}{times if written_s else ''}")
        self._on_written(pending.unfinished.step, path)

    def close(self) -> None:
        """Discards an unfinished checkpoint, when the job ends by an error or Ctrl-C."""
        if self.pending_writes is not None:
            self.pending_writes.cancel()
        self._pending = None

    def _begin(self, standing: SavedState, *, async_save: bool, export: bool) -> None:
        """Collective over the job: starts writing a checkpoint, after the previous one is finished."""
        self.finish_pending(wait=True)
        started: list[megatron_checkpoint.PendingWrites] = []

        def write(folder: Path) -> megatron_checkpoint.PendingWrites:
            each = []
            for name, saver in self._savers.items():
                each.append(saver.begin(folder / name, async_save=async_save))
                if len(self._savers) > 1:
                    self._models[name].offload()
            groups = self._groups
            replica = groups.grid.replica(groups.rank) if groups.is_replica_leader else None
            first = groups.rank == groups.grid.samplers.start
            inflight_samples.write(folder, standing.samples, replica=replica, first=first)
            started.append(megatron_checkpoint.PendingWrites(each))
            if export:
                self._weights.export(folder / "hf")
                if self._weights.has_adapters:
                    self._weights.export_adapters(folder / ADAPTER_FOLDER)
            return started[0]

        metric = standing.metrics.get(self._config.best_metric)
        began = time.monotonic()
        self._log.sync()
        with self._timers.phase("save_checkpoint"):
            unfinished = self.checkpoints.begin_save(standing.state["step"], write, standing.state, metric)
        self._pending = _Pending(standing, unfinished, started[0], time.monotonic() - began)
        if async_save:
            self._progress.reserve_for_async_save()

    def resume(self) -> int | None:
        """Collective over the job: loads the run's last checkpoint, or the initial weights.

        Returns:
            Number of steps that are done and logged; None if step 0 has no checkpoint yet.
        """
        if self.resume_point is None:
            self._weights.load_initial()
            return None
        path = self.checkpoints.path(self.resume_point.step)
        self._weights.load_base()
        began = time.monotonic()
        self._progress.last_state = parse_state(self.resume_point.state, path)
        state = self._progress.last_state.state
        self._load(path, state)
        loaded_s = self.resume_point.compared_s + time.monotonic() - began
        self._progress.record_save_time(save_s=loaded_s)  # estimate until the first checkpoint of this start is written
        if state["warm_start"] is not None:
            self._log.note(f"resumed from {path}, in the warm start")
            return None
        with raise_on_all_ranks(), malformed_state_is_user_error(path):
            record = self._state.restore(state)
            restarted = self._restore_samples(path, state["in_flight"])
        self._progress.last_state.samples = self._state.snapshot_buffer()
        self._log.note(f"resumed from {path}{restarted}")
        changed = self._state.reference.resume(state["step"], record)
        if changed:
            self._log.note(changed)
        return int(state["step"]) - (state["unlogged"] is not None)

    def _restore_samples(self, path: Path, state: Mapping[str, Any] | None) -> str:
        """Loads the rollout buffer; returns the end of the log line."""
        buffer, groups = self._state.buffer, self._groups
        if state is None:
            return ""
        replica = groups.grid.replica(groups.rank) if groups.is_sampler else None
        num_replicas = groups.grid.num_replicas
        kept = inflight_samples.read(path, replica=replica, num_replicas=num_replicas, prompt_at=self._state.source.at)
        buffer.load_state(state, kept.columns, kept.tables)
        start, size = groups.grid.samplers.start, groups.grid.rollout_size
        buffer.replace_samples(
            kept.rollouts, kept.partial_rollouts, {replica: start + replica * size for replica in range(num_replicas)}
        )
        if state["schedule"] == buffer.state_dict()["schedule"]:
            return ""
        buffer.restart_all()
        return "; buffered prompts are sampled again because the limits on sampling ahead have changed"

    def load_for_evaluation(self, which: str | None) -> str:
        """Collective over the job: loads the weights of a checkpoint; returns its folder or "the initial model".

        Args:
            which: Step of this run or checkpoint folder; None: the run's newest checkpoint, or the initial weights.

        Raises:
            UserError: There is no such checkpoint.
        """
        if which is None:
            found = self.checkpoints.find_latest(repair=False)
            if found is None:
                self._weights.load_initial()
                return "the initial model"
            path, state = self.checkpoints.path(found.step), found.state
        else:
            is_step = which.isascii() and which.isdigit()
            path = self.checkpoints.path(int(which)) if is_step else Path(which)
            if is_step and not path.is_dir():
                raise UserError(
                    f"There is no checkpoint of step {which} in '{self.checkpoints.folder}'. Choose one of its steps: "
                    f"{', '.join(map(str, self.checkpoints.steps())) or 'none'}."
                )
            state = self.checkpoints.read(path)
        self._weights.load_base()
        self._load(path, parse_state(state, path).state)
        return str(path)

    def _load(self, path: Path, state: Mapping[str, Any]) -> None:
        """Loads models and optimizers of a checkpoint whose hashes were verified."""
        with on_trainers(self._groups):
            for name, model in self._models.items():  # empty on ranks that only sample
                with raise_on_all_ranks():
                    megatron_checkpoint.load(path / name, model)
                if len(self._models) > 1:
                    model.offload()
        self._state.policy_version = int(state["policy_version"])

    def _drop_unused_references(self) -> None:
        """Deletes reference folders that no checkpoint uses."""
        try:
            used = {
                read_json_object(self.checkpoints.path(step), STATE_FILE)["reference"]
                for step in self.checkpoints.steps()
            }
        except (UserError, KeyError):
            return  # a checkpoint is damaged, so its reference is unknown
        used.add(self._state.reference.stored_path)  # may be newer than all checkpoints
        self._state.reference.drop_unused(used, self.checkpoints.discard)
