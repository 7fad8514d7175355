"""Declarations of what an engine does with each field of `rollout`, and the refusals that follow from them.

An engine's `FIELDS` has one `FieldSupport` per key below `rollout`, except for those in `COMMON_FIELDS`.
`trainer/validation/rollout.py` raises the refusals before anything starts; `trainer/validation/docs_engine_table.py`
prints the table of the documentation. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mrl.config.config import RolloutConfig, SpeculativeConfig


@dataclass(frozen=True)
class Refusal:
    """Values of a field that an engine does not support.

    Attributes:
        which: Description of the values, to follow "refused": "above 1"; "": all but the default.
        why: Reason, part of the message.
        holds: Returns whether a config has such a value; None: another validation rule refuses it, with this reason.
        instead: Advice, as a sentence.
        cpu_only: Whether the refusal applies only on a CPU.
    """

    which: str
    why: str
    holds: Callable[[RolloutConfig], bool] | None = None
    instead: str = ""
    cpu_only: bool = False

    @property
    def words(self) -> str:
        """Text for the documentation table."""
        said = " ".join(filter(None, ["**refused**", "on a CPU" if self.cpu_only else "", self.which]))
        return said if self.which and self.holds is None else f"{said}: {self.why}"


@dataclass(frozen=True)
class FieldSupport:
    """Use of a field in an engine.

    Attributes:
        does: Effect of the field; "": none, and each value but the default is refused.
        passed_as: Names of the engine's arguments that get the value; those of its `LLM` without a prefix.
        refuses: Values that are not supported.
    """

    does: str = ""
    passed_as: tuple[str, ...] = ()
    refuses: tuple[Refusal, ...] = ()

    @property
    def words(self) -> str:
        """Text for the documentation table."""
        names = ", ".join(f"`{name}`" for name in self.passed_as)
        return "; ".join(filter(None, [names, self.does, *(refusal.words for refusal in self.refuses)]))


Fields = Mapping[str, FieldSupport]
"""Key below `rollout` -> its use."""


def passed(*names: str, does: str = "", refuses: tuple[Refusal, ...] = ()) -> FieldSupport:
    """Returns the use of a field that is passed on as these arguments."""
    return FieldSupport(does, names, refuses)


def refused(why: str, holds: Callable[[RolloutConfig], bool] | None = None, instead: str = "") -> FieldSupport:
    """Returns the use of a field that has no meaning in an engine."""
    return FieldSupport(refuses=(Refusal("", why, holds, instead),))


COMMON_FIELDS: Fields = {
    "name": FieldSupport("chooses the engine"),
    "num_ranks": FieldSupport("the last ranks of the job only run the engine; 0: every rank runs it"),
    "nnodes": FieldSupport("the same, in nodes"),
    "n_gpus_per_node": FieldSupport("ranks per node of `nnodes`"),
    "val_kwargs.n": FieldSupport("as `n`, in evaluations"),
    "val_kwargs.do_sample": FieldSupport("as `do_sample`, in evaluations"),
    "val_kwargs.temperature": FieldSupport("as `temperature`, in evaluations; 0: greedy"),
    "val_kwargs.top_k": FieldSupport("as `top_k`, in evaluations"),
    "val_kwargs.top_p": FieldSupport("as `top_p`, in evaluations"),
    "val_kwargs.min_p": FieldSupport("as `min_p`, in evaluations"),
    "multi_turn.enable": FieldSupport(
        "true: multi-turn episodes, in rounds: one engine call per turn of all running episodes"
    ),
    "multi_turn.max_assistant_turns": FieldSupport("an episode ends there"),
    "multi_turn.max_user_turns": FieldSupport("an episode ends after the turn that follows the last reply"),
    "multi_turn.max_parallel_calls": FieldSupport("further tool calls of a turn are not executed"),
    "multi_turn.max_tool_response_length": FieldSupport("characters; a longer response is truncated"),
    "multi_turn.tool_response_truncate_side": FieldSupport("what remains of a longer response"),
    "multi_turn.format": FieldSupport("syntax of tool calls"),
    "multi_turn.tokenization_sanity_check_mode": FieldSupport("how strictly the chat template is checked before a run"),
    "agent.environment": FieldSupport("environment of the episodes"),
    "agent.environment_kwargs": FieldSupport("arguments of its constructor"),
    "agent.num_workers": FieldSupport("worker processes of a replica's first rank"),
    "agent.time_limit_s": FieldSupport("a later reply fails its sample"),
    "agent.memory_limit_mb": FieldSupport("memory of a worker"),
    "checkpoint_engine.update_weights_bucket_megabytes": FieldSupport("size of the weight sync's buckets"),
}
"""Uses that apply to every engine unless it overrides them."""

ENGINE_DIR = refused(
    "only rollout.name=trtllm_engine reads prebuilt engines", lambda r: r.engine_dir is not None, "Remove it."
)
"""Use of `engine_dir` in engines that are not built ahead of time."""


def no_true_on_policy(why: str) -> FieldSupport:
    """Returns the use of `true_on_policy` for an engine that is not bitwise equal to the actor."""
    return refused(why, lambda rollout: rollout.true_on_policy, "Use rollout.name=native on a CPU, or remove it.")


def no_speculation(why: str, instead: str) -> Fields:
    """Returns the uses of the section `speculative` for an engine whose drafts could change tokens."""
    return {
        f"speculative.{name}": refused(why, _drafts_otherwise(name, value), instead)
        for name, value in vars(SpeculativeConfig()).items()
    }


def _drafts_otherwise(name: str, value: object) -> Callable[[RolloutConfig], bool]:
    return lambda rollout: getattr(rollout.speculative, name) != value


_NO_PARTIAL = "the engine cannot pause and resume responses"
_USE_NATIVE = "Use rollout.name=native, or remove it."
NO_PARTIAL_ROLLOUTS: Fields = {
    "over_sample_rate": refused(_NO_PARTIAL, lambda r: r.over_sample_rate > 0, _USE_NATIVE),
    "over_age": refused(_NO_PARTIAL, lambda r: r.over_age != "wait", _USE_NATIVE),
    "mask_offpolicy": refused(_NO_PARTIAL, lambda r: r.mask_offpolicy, _USE_NATIVE),
}
"""Uses for engines that cannot pause between two tokens."""

OTHER_ENGINE = Refusal("of another engine", "nothing would read it")
"""Refusal of arguments of another engine in `engine_kwargs`."""


def refusals(fields: Fields, rollout: RolloutConfig, *, on_a_cpu: bool) -> Iterator[str]:
    """Yields a message for each field whose value the engine does not support.

    Args:
        fields: Uses of the engine.
        rollout: `rollout` section.
        on_a_cpu: Whether the run is known to be on a CPU.
    """
    for key, refusal in unsupported_fields(fields, rollout, on_a_cpu=on_a_cpu):
        where = f"rollout.name={rollout.name}{' on a CPU' if refusal.cpu_only else ''}"
        said = f"rollout.{key}={value_of(rollout, key)} is refused with {where}: {refusal.why}. {refusal.instead}"
        yield said.rstrip()


def unsupported_fields(fields: Fields, rollout: RolloutConfig, *, on_a_cpu: bool) -> Iterator[tuple[str, Refusal]]:
    """Yields the key and the refusal of each field whose value the engine does not support."""
    for key, use in fields.items():
        for refusal in use.refuses:
            if refusal.holds is not None and (on_a_cpu or not refusal.cpu_only) and refusal.holds(rollout):
                yield key, refusal


def value_of(rollout: RolloutConfig, key: str) -> object:
    """Returns the value at a key below `rollout`."""
    found: object = rollout
    for part in key.split("."):
        found = getattr(found, part)
    return found
