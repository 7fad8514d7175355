"""Startup and shutdown of a run, also after an error.

Order: watchdog, rendezvous, process groups, run folder and its lock, checkpoint to resume from, log, `Trainer`.
Everything that can be checked without a process group is checked earlier, in `run_plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from mrl.checkpoint.formats.hub import check_same_models
from mrl.checkpoint.run_dir.checkpoint import CheckpointManager, ResumePoint
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.checkpoint.run_dir.run_lock import MAX_SILENCE_S, acquire_run_lock, current_owner
from mrl.distributed import launch
from mrl.distributed.collectives import check_same_on_all_ranks, raise_on_all_ranks
from mrl.distributed.watchdog import abort
from mrl.distributed.watchdog.signals import FAILED
from mrl.distributed.watchdog.watchdog import MARGIN_S, SAMPLING_S, Watchdog
from mrl.errors import UserError, disk_errors, first_line, out_of_memory
from mrl.megatron import parallel_state
from mrl.models import transformer_engine
from mrl.observability.evaluation_progress import ProgressLine
from mrl.observability.log_file import record_process
from mrl.observability.run_log import RunLog
from mrl.observability.timers import CurrentPhase, Timers
from mrl.trainer.run_context import RunContext
from mrl.trainer.run_plan import RunPlan, check_resume
from mrl.trainer.trainer import Trainer
from mrl.trainer.user_objects import check_same_objects, describe_objects, objects_notes


@contextmanager
def open_trainer(plan: RunPlan, *, log: bool = True, trains: bool = True) -> Iterator[Trainer]:
    """Collective over the job: initializes torch.distributed, builds the job, and shuts both down at the end.

    Args:
        plan: Result of `build_run_plan`.
        log: False to only read the run folder.
        trains: False for an evaluation, which needs neither critic nor teachers.
    """
    run, timeout_s = plan.config.run, plan.config.run.collective_timeout_s + MARGIN_S
    current = CurrentPhase()
    watchdog = Watchdog(
        launch.get_launcher_env(),
        where=current.describe,
        collective_timeout_s=run.collective_timeout_s,
        heartbeat_timeout_s=run.heartbeat_timeout_s,
        device_is_busy=launch.device_is_busy if launch.choose_device(run.device) == "cuda" else None,
        advice=lambda: _resume_advice(plan.run),
        secret=launch.job_token,
    )
    with watchdog:
        store = launch.job_store(launch.connect_store(timeout_s)) if plan.grid.world_size > 1 else None
        if store is not None:
            watchdog.start(store)
        device = launch.init_distributed(run.device, num_threads=run.num_threads, timeout_s=SAMPLING_S, store=store)
        failed = True
        try:
            groups = parallel_state.initialize(plan.grid, seed=run.seed, timeout_s=timeout_s, sampling_s=SAMPLING_S)
            check_same_models(plan.config)
            check_same_objects(plan.config)
            _check_same_data(plan)
            with (
                disk_errors(),
                _run_folder(plan, groups.rank, device, watchdog, log=log) as (checkpoints, found, run_log),
            ):
                timers = Timers(device, run_log.phase, current)
                context = RunContext(groups, device, run_log, timers, watchdog.record_forward, checkpoints, found)
                trainer = Trainer(plan, context, trains=trains)
                try:
                    with disk_errors():
                        yield trainer
                except BaseException as error:
                    if isinstance(error, UserError):
                        error.at = current.describe() if current.has_begun else ""
                    watchdog.report_error(error)
                    raise
                finally:
                    trainer.close()
            failed = False
        except BaseException as error:
            watchdog.report_error(error)  # before the shutdown, because other ranks may be waiting in a collective
            if plan.grid.world_size == 1 and out_of_memory(error):
                raise UserError(
                    f"The run does not fit into the memory of this machine: {first_line(error)}. `mrl plan` shows how "
                    "much it needs. Use a smaller model, shorter or fewer sequences, or more ranks."
                ) from error
            raise
        finally:
            parallel_state.destroy()
            launch.shutdown_distributed(in_order=not failed)


@contextmanager
def _run_folder(
    plan: RunPlan, rank: int, device: torch.device, watchdog: Watchdog, *, log: bool
) -> Iterator[tuple[CheckpointManager, ResumePoint | None, RunLog]]:
    """Collective over the job: locks the run folder, finds the checkpoint to resume from and opens the log.

    If the folder is only read (`log` is False), it is not locked, and the log only shows progress.
    """
    config, run, size = plan.config, plan.run, plan.grid.world_size
    if not log:
        with RunLog(config, run, None, rank=-1) as run_log:
            if rank == 0 and config.observe.console != "off":
                run_log.add(ProgressLine())
            yield CheckpointManager(run.checkpoints, config.checkpoint), None, run_log
        return
    with raise_on_all_ranks():
        if rank == 0:
            run.create()
    silent_s = min(config.run.heartbeat_timeout_s, MAX_SILENCE_S)
    with acquire_run_lock(run.root, current_owner(size, silent_s), rank) as owner:
        owner.start_heartbeat(silent_s, lambda why: _abort_lost_lock(why, watchdog, run))
        layers = transformer_engine.described(config, plan.arch, device.type)
        notes = [*owner.notes, layers, *objects_notes(config)]
        checkpoints = CheckpointManager(run.checkpoints, config.checkpoint, notes.append, owner.check)
        found = checkpoints.find_latest(repair=True)
        step = found.step if found else None
        notes += found.notes if found else []
        with raise_on_all_ranks():
            check_resume(config, run, step)
            if rank == 0:
                facts = {"device": launch.device_name(device), "layers": layers, "objects": describe_objects(config)}
                changes = run.start(config, resume_step=step, world_size=size, facts=facts)
                if changes:
                    notes += ["settings changed since the last start:", *(f"  {change}" for change in changes)]
        with record_process(run.log, rank), RunLog(config, run, step, rank=rank) as run_log:
            checkpoints.log = run_log.note
            for note in notes:
                run_log.note(note)
            yield checkpoints, found, run_log


def _check_same_data(plan: RunPlan) -> None:
    """Collective over the job: checks that all ranks read the same training data.

    Raises:
        UserError: A host's files, or its cache of the hub, have other rows.
    """
    check_same_on_all_ranks(
        plan.source.fingerprint,
        "reads other training data than rank 0 (data.train_files)",
        "Copy the same files to every host, or name files that all hosts share.",
    )


def _abort_lost_lock(why: str, watchdog: Watchdog, run: RunDir) -> NoReturn:
    """Aborts this process from the lock's thread, because another job has taken over the run folder."""
    watchdog.report_error(RuntimeError(why))
    abort.print_error(why, lambda: _resume_advice(run))
    abort.hard_exit(FAILED)


def _resume_advice(run: RunDir) -> str:
    steps = run.committed_steps()
    if not steps:
        return f"There is no checkpoint yet in {run.root}: the same command starts from the beginning."
    return f"The last checkpoint in {run.root} is of step {steps[-1]}: the same command resumes from it."
