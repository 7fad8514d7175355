"""First stage of a rehearsal: the checks of a real run, on a machine that could not run it.

The rules are those of `mrl train` (`trainer/run_plan.py`) and `mrl plan` (`commands/plan/fit.py`), at the real sizes
and ranks. Missing files that exist only on the cluster get a hint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrl.commands.plan.fit import check_fits, device_of
from mrl.commands.plan.memory import memory_by_stage
from mrl.commands.rehearse.placeholders import FLAG, missing_paths, with_placeholders
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
        config: Real config, with placeholders for missing files.
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
        report: Receives the world size and warnings.
        placeholders: Replace missing files by placeholders.

    Raises:
        UserError: A mistake in the config, model folder, data, rewards or run folder.
    """
    missing = missing_paths(config)
    if missing and placeholders:
        config, replacements = with_placeholders(config)
        report.warnings += replacements
        missing = {}
    size = world_size(config, file, requested_ranks)
    report.world_size = size.ranks
    try:
        found = check_run(config, report.world_size, tell=report.warnings.append)
    except UserError as error:
        if not missing:
            raise
        hint = f"\nTo rehearse without files that exist only on the cluster ({', '.join(missing)}), add {FLAG}."
        raise UserError(f"{error}{hint}") from error
    try:
        check_fits(found, hardware, memory_by_stage(found, device_of(hardware, found.grid)))
    except UserError as error:
        report.warnings.append(f"mrl plan rejects the real run: {error}")
    report.warnings += found.warnings
    prompts = [*found.first_prompts, *found.validation[:NUM_VAL]]
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    config = replace(config, data=found.config.data)  # local files, where the config has names on the hub
    return RealRun(config, found, longest, f"{format_count(size.ranks, 'rank')} ({size.why})")
