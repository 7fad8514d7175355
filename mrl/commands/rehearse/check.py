"""First stage of a rehearsal: the checks of a real run, on a machine that could not run it.

The rules are those of `mrl train` (`trainer/run_plan.py`) and `mrl plan` (`commands/plan/plan.py`), at the real sizes
and ranks. Missing files that exist only on the cluster get a hint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.commands.plan.plan import check_memory
from mrl.commands.plan.undownloaded import with_shapes
from mrl.commands.plan.weight_sync_cost import predict_refit
from mrl.commands.rehearse.placeholders import hint_at_placeholders
from mrl.commands.rehearse.report import Report
from mrl.commands.rehearse.settings import NUM_VAL
from mrl.config.config import Config
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import format_count
from mrl.trainer.run_plan import Resolved, check_run
from mrl.trainer.validation.world_size import world_size


@dataclass(frozen=True)
class RealRun:
    """Run that could start on its cluster.

    Attributes:
        config: Real config, with shapes or placeholders for missing files.
        plan: Same config, resolved at its world size.
        prompt_length: Longest of the first prompts, tokens.
        ranks: World size and its origin, in words.
    """

    config: Config
    plan: Resolved
    prompt_length: int
    ranks: str


def check_real_run(
    config: Config, file: str, requested_ranks: int | None, hardware: Hardware, report: Report, *, placeholders: bool
) -> RealRun:
    """Runs all checks of a real run that need no rank.

    Args:
        config: Real config.
        file: Config file, whose name may contain nodes x GPUs.
        requested_ranks: Ranks of the real run; None: by the rule of `trainer/validation/world_size.py`.
        hardware: GPUs of the real run.
        report: Receives the world size, warnings, and why `mrl plan` refuses the run.
        placeholders: Replace missing files by placeholders.

    Raises:
        UserError: A mistake in the config, model folder, data, rewards or run folder.
    """
    config, replacements = with_shapes(config, placeholders=placeholders)
    report.warnings += replacements
    size = world_size(config, file, requested_ranks)
    report.world_size = size.ranks
    with hint_at_placeholders(config):
        found = check_run(config, report.world_size, tell=report.warnings.append)
    try:
        check_memory(found, hardware, predict_refit(found.config, found.arch, found.grid, hardware))
    except UserError as error:
        report.plan_refuses = str(error)
    report.warnings += found.warnings
    prompts = [*found.first_prompts, *found.validation[:NUM_VAL]]
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    config = replace(config, data=found.config.data)  # local files, where the config has names on the hub
    return RealRun(config, found, longest, f"{format_count(size.ranks, 'rank')} ({size.why})")
