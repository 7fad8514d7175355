"""What the real run refuses, known on a machine that could not run it: the first stage of a rehearsal.

Owns what is told of a path that only the cluster has. The rules are those of `mrl train` (`trainer/resolve.py`) and of
`mrl plan` (`commands/plan/fit.py`), at the real sizes and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.commands.plan.fit import check_fits, device_of
from mrl.commands.plan.memory import memory_by_stage
from mrl.commands.rehearse.placeholders import FLAG, missing_paths, with_stand_ins
from mrl.commands.rehearse.report import Report
from mrl.commands.rehearse.settings import NUM_VAL
from mrl.config.config import Config
from mrl.errors import UserError
from mrl.observability.hardware import Hardware
from mrl.observability.text_format import counted
from mrl.trainer.resolve import Resolved, check_run
from mrl.trainer.validation.world_size import world_size


@dataclass(frozen=True)
class RealRun:
    """A run that could start on its cluster.

    Attributes:
        config: What was asked for, with what stands in for missing files.
        found: The same, resolved at its world size.
        prompt_length: Longest of the first prompts, tokens.
        ranks: Its world size, and who said so, in words.
    """

    config: Config
    found: Resolved
    prompt_length: int
    ranks: str


def check_real_run(
    config: Config, file: str, asked: int | None, hardware: Hardware, report: Report, *, stand_ins: bool
) -> RealRun:
    """Everything that a real run refuses before its first step and that needs no rank.

    Args:
        config: What was asked for.
        file: Where it stands; its name may say nodes x GPUs.
        asked: Ranks of the real run; None: by the rule of `trainer/validation/world_size.py`.
        hardware: Its GPUs.
        report: Gets the world size, and warnings.
        stand_ins: Whether something may take the place of files that are not here.

    Raises:
        UserError: A mistake in the config, the model folder, the data, the rewards or the run folder.
    """
    missing = missing_paths(config)
    if missing and stand_ins:
        config, told = with_stand_ins(config)
        report.warnings += told
        missing = {}
    size = world_size(config, file, asked)
    report.world_size = size.ranks
    try:
        found = check_run(config, report.world_size, tell=report.warnings.append)
    except UserError as error:
        if not missing:
            raise
        hint = f"\nTo rehearse without what is on the cluster only ({', '.join(missing)}), add {FLAG}."
        raise UserError(f"{error}{hint}") from error
    try:
        check_fits(found, hardware, memory_by_stage(found, device_of(hardware, found.grid)))
    except UserError as error:
        report.warnings.append(f"mrl plan refuses the real run: {error}")
    report.warnings += found.warnings
    prompts = [*found.peeked, *found.validation[:NUM_VAL]]
    longest = max(len(prompt.prompt_ids) for prompt in prompts)
    return RealRun(config, found, longest, f"{counted(size.ranks, 'rank')} ({size.why})")
