"""How a job comes up, and how it ends.

Owns the order: watchdog, ranks, process groups, run folder, the commit to go on from, log, job; and that all of it is
taken down again, also after an error. What can be refused without a process group was refused before (`resolve.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from mrl.checkpoint.formats.hub import check_same_models
from mrl.checkpoint.run_dir.checkpoint import Checkpoints, Found
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.checkpoint.run_dir.run_lock import LONGEST_SILENCE_S, take, this_process
from mrl.distributed import launch
from mrl.distributed.collectives import together
from mrl.distributed.watchdog import abort
from mrl.distributed.watchdog.signals import FAILED
from mrl.distributed.watchdog.watchdog import MARGIN_S, SAMPLING_S, Watchdog
from mrl.errors import UserError, disk_errors, first_line, out_of_memory
from mrl.megatron import parallel_state
from mrl.models import transformer_engine
from mrl.observability.run_log import RunLog
from mrl.trainer.resolve import Plan, check_resume
from mrl.trainer.trainer import Job


@contextmanager
def open_job(plan: Plan, *, log: bool = True, trains: bool = True) -> Iterator[Job]:
    """Collective over the job: ranks up, job built; ended in order, also after an error.

    Args:
        plan: From `prepare`.
        log: False: the run folder is only read.
        trains: False: the actor is only evaluated.
    """
    run, timeout_s = plan.config.run, plan.config.run.collective_timeout_s + MARGIN_S
    watchdog = Watchdog(
        launch.environment(),
        collective_timeout_s=run.collective_timeout_s,
        heartbeat_timeout_s=run.heartbeat_timeout_s,
        device_is_busy=launch.device_is_busy if launch.choose_device(run.device) == "cuda" else None,
        advice=lambda: _kept(plan.run),
        secret=launch.job_token,
    )
    with watchdog:
        store = launch.private(launch.meet(timeout_s)) if plan.grid.world_size > 1 else None
        if store is not None:
            watchdog.start(store)
        device = launch.start(run.device, num_threads=run.num_threads, timeout_s=SAMPLING_S, store=store)
        failed = True
        try:
            groups = parallel_state.initialize(plan.grid, seed=run.seed, timeout_s=timeout_s, sampling_s=SAMPLING_S)
            check_same_models(plan.config)
            with (
                disk_errors(),
                _run_folder(plan, groups.rank, device, watchdog, log=log) as (checkpoints, found, run_log),
            ):
                job = Job(plan, groups, device, run_log, checkpoints, found, trains=trains)
                watchdog.where = lambda: job.timers.where
                job.sampler.engine.sampled = watchdog.sampled
                try:
                    with disk_errors():
                        yield job
                except BaseException as error:
                    if isinstance(error, UserError):
                        error.at = job.timers.where if job.timers.has_begun else ""
                    watchdog.tell(error)
                    raise
                finally:
                    job.close()
            failed = False
        except BaseException as error:
            watchdog.tell(error)  # before anything is taken down that the others may wait in
            if plan.grid.world_size == 1 and out_of_memory(error):
                raise UserError(
                    f"the memory of this machine does not hold the run: {first_line(error)}. `mrl plan` says what it "
                    "needs; take a smaller model, shorter or fewer sequences, or more ranks."
                ) from error
            raise
        finally:
            parallel_state.destroy()
            launch.stop(in_order=not failed)


@contextmanager
def _run_folder(
    plan: Plan, rank: int, device: torch.device, watchdog: Watchdog, *, log: bool
) -> Iterator[tuple[Checkpoints, Found | None, RunLog]]:
    """Collective over the job: inside, the run folder is this job's alone; what it goes on from was read.

    Where it is only read (`log` is False) nobody has to own it.
    """
    config, run, size = plan.config, plan.run, plan.grid.world_size
    if not log:
        with RunLog(config, run, None, rank=-1) as silent:
            yield Checkpoints(run.checkpoints, config.checkpoint), None, silent
        return
    with together():
        if rank == 0:
            run.make()
    silent_s = min(config.run.heartbeat_timeout_s, LONGEST_SILENCE_S)
    with take(run.root, this_process(size, silent_s), rank) as owner:
        owner.keep(silent_s, lambda why: _lose(why, watchdog, run))
        layers = transformer_engine.described(config, plan.arch, device.type)
        notes = [*owner.notes, layers]
        checkpoints = Checkpoints(run.checkpoints, config.checkpoint, notes.append, owner.check)
        found = checkpoints.newest(mends=True)
        step = found.step if found else None
        notes += found.notes if found else []
        with together():
            check_resume(config, run, step)
            if rank == 0:
                facts = {"device": launch.device_name(device), "layers": layers}
                changes = run.start(config, resume_step=step, world_size=size, facts=facts)
                if changes:
                    notes += ["settings changed since the last start:", *(f"  {change}" for change in changes)]
        with RunLog(config, run, step, rank=rank) as run_log:
            checkpoints.tell = run_log.note
            for note in notes:
                run_log.note(note)
            yield checkpoints, found, run_log


def _lose(why: str, watchdog: Watchdog, run: RunDir) -> NoReturn:
    """Ends the job wherever its main thread is: another one writes into its folder."""
    watchdog.tell(RuntimeError(why))
    abort.say(why, lambda: _kept(run))
    abort.leave(FAILED)


def _kept(run: RunDir) -> str:
    steps = run.committed_steps()
    if not steps:
        return f"There is no checkpoint yet in {run.root}: the same command starts again."
    return f"The last checkpoint is of step {steps[-1]}, in {run.root}: the same command goes on from there."
