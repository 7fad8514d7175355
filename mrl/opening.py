"""How a job comes up, and how it ends.

Owns the order: watchdog, ranks, process groups, run folder, the commit to go on from, log, job; and that all of it is
taken down again, also after an error. What can be refused without a process group was refused before (`prepare.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mrl.checkpoint import Checkpoints, Found
from mrl.distributed import launch
from mrl.distributed.collectives import together
from mrl.distributed.watchdog import MARGIN_S, Watchdog
from mrl.errors import UserError
from mrl.job import Job
from mrl.megatron import parallel
from mrl.observe.run_dir import RunDir
from mrl.observe.run_log import RunLog
from mrl.prepare import Plan, check_resume


@contextmanager
def open_job(plan: Plan, *, log: bool = True) -> Iterator[Job]:
    """Collective over the job: ranks up, job built; ended in order, also after an error.

    Args:
        plan: From `prepare`.
        log: False: the run folder is only read.
    """
    run, timeout_s = plan.config.run, plan.config.run.collective_timeout_s + MARGIN_S
    watchdog = Watchdog(
        launch.environment(),
        collective_timeout_s=run.collective_timeout_s,
        heartbeat_timeout_s=run.heartbeat_timeout_s,
        on_gpu=launch.choose_device(run.device) == "cuda",
        advice=lambda: _kept(plan.run),
    )
    with watchdog:
        store = launch.meet(timeout_s) if plan.grid.world_size > 1 else None
        if store is not None:
            watchdog.start(store)
        device = launch.start(run.device, num_threads=run.num_threads, timeout_s=timeout_s, store=store)
        failed = True
        try:
            groups = parallel.initialize(plan.grid, seed=run.seed, timeout_s=timeout_s)
            found, notes = _take_up(plan, groups.rank, launch.device_name(device)) if log else (None, [])
            with RunLog(
                plan.config, plan.run, found.step if found else None, rank=groups.rank if log else -1
            ) as run_log:
                job = Job(plan, groups, device, run_log, found)
                watchdog.where = lambda: job.timers.where
                for note in notes:
                    run_log.note(note)
                try:
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
            raise
        finally:
            parallel.destroy()
            launch.stop(in_order=not failed)


def _take_up(plan: Plan, rank: int, device_name: str) -> tuple[Found | None, list[str]]:
    """Collective over the job: the commit to go on from, and what is to be told; rank 0 records the start."""
    found = Checkpoints(plan.run.checkpoints, plan.config.checkpoint).newest(mends=True)
    step = found.step if found else None
    notes = [*found.notes] if found else []
    with together():
        check_resume(plan.config, plan.run, step)
        if rank == 0:
            size = plan.grid.world_size
            changes = plan.run.start(plan.config, resume_step=step, world_size=size, device_name=device_name)
            if changes:
                notes += ["settings changed since the last start:", *(f"  {change}" for change in changes)]
    return found, notes


def _kept(run: RunDir) -> str:
    steps = run.committed_steps()
    if not steps:
        return f"There is no checkpoint yet in {run.root}: the same command starts again."
    return f"The last checkpoint is of step {steps[-1]}, in {run.root}: the same command goes on from there."
