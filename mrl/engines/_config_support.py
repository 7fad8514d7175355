"""What an engine does with each field of `rollout`: the form in which it declares that.

Owns the form, what is the same in every engine, and the messages that follow from a declaration. An engine's `FIELDS`
has one `Use` for each field that `EVERYWHERE` does not explain, by its key below `rollout`.
`trainer/validation/rollout.py` asks for the refusals before anything starts; `trainer/validation/docs_engine_table.py`
writes the page. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mrl.config.config import RolloutConfig, SpeculativeConfig


@dataclass(frozen=True)
class Refusal:
    """Values of a field that an engine cannot do.

    Attributes:
        which: They, in words that follow "refused": "above 1"; "": all but the default.
        why: The reason, which is part of the message.
        holds: Whether a run has such a value; None: another rule of the preflight says so, with this reason.
        instead: What to do, as a sentence.
        on_a_cpu: It is one on a CPU only.
    """

    which: str
    why: str
    holds: Callable[[RolloutConfig], bool] | None = None
    instead: str = ""
    on_a_cpu: bool = False

    @property
    def words(self) -> str:
        """For a table; where another rule tells figures, which values are enough."""
        said = " ".join(filter(None, ["**refused**", "on a CPU" if self.on_a_cpu else "", self.which]))
        return said if self.which and self.holds is None else f"{said}: {self.why}"


@dataclass(frozen=True)
class Use:
    """What becomes of a field in an engine.

    Attributes:
        does: What it means there; "": nothing, and each value but the default is refused.
        passed_as: What the other side calls it, arguments of its `LLM` by their bare names.
        refuses: What is not taken.
    """

    does: str = ""
    passed_as: tuple[str, ...] = ()
    refuses: tuple[Refusal, ...] = ()

    @property
    def words(self) -> str:
        """For a table."""
        names = ", ".join(f"`{name}`" for name in self.passed_as)
        return "; ".join(filter(None, [names, self.does, *(refusal.words for refusal in self.refuses)]))


Fields = Mapping[str, Use]
"""Key below `rollout` -> what becomes of it."""


def passed(*names: str, does: str = "", refuses: tuple[Refusal, ...] = ()) -> Use:
    """A field that the other side is told by these names."""
    return Use(does, names, refuses)


def refused(why: str, holds: Callable[[RolloutConfig], bool] | None = None, instead: str = "") -> Use:
    """A field without a meaning in an engine."""
    return Use(refuses=(Refusal("", why, holds, instead),))


EVERYWHERE: Fields = {
    "name": Use("chooses the engine"),
    "num_ranks": Use("the last ranks of the job hold the engine and nothing else; 0: every rank does"),
    "nnodes": Use("the same, in nodes"),
    "n_gpus_per_node": Use("ranks of each of `nnodes`"),
    "val_kwargs.n": Use("as `n`, in evaluations"),
    "val_kwargs.do_sample": Use("as `do_sample`, in evaluations"),
    "val_kwargs.temperature": Use("as `temperature`, in evaluations; 0: greedy"),
    "val_kwargs.top_k": Use("as `top_k`, in evaluations"),
    "val_kwargs.top_p": Use("as `top_p`, in evaluations"),
    "val_kwargs.min_p": Use("as `min_p`, in evaluations"),
    "multi_turn.enable": Use("true: episodes, by rounds: each turn of all that go on is one call of the engine"),
    "multi_turn.max_assistant_turns": Use("an episode ends there"),
    "multi_turn.max_user_turns": Use("an episode ends after the turn that follows the last"),
    "multi_turn.max_parallel_calls": Use("more calls of a turn are not made"),
    "multi_turn.max_tool_response_length": Use("characters; a longer answer is cut"),
    "multi_turn.tool_response_truncate_side": Use("what a longer answer keeps"),
    "multi_turn.format": Use("how calls are read"),
    "multi_turn.tokenization_sanity_check_mode": Use("how strictly the chat template is looked at before a run"),
    "agent.environment": Use("what the policy talks with"),
    "agent.environment_kwargs": Use("of its constructor"),
    "agent.num_workers": Use("processes of a replica's first rank"),
    "agent.time_limit_s": Use("a later answer fails its sample"),
    "agent.memory_limit_mb": Use("of a worker"),
    "checkpoint_engine.update_weights_bucket_megabytes": Use("size of the transport's buckets"),
}
"""Of each engine that does not say otherwise."""

ENGINE_DIR = refused(
    "only rollout.name=trtllm_engine has a folder of engines", lambda r: r.engine_dir is not None, "Leave it out."
)
"""Of engines that are not built."""


def not_on_policy(why: str) -> Use:
    """`true_on_policy` of an engine whose numbers are not the actor's in every bit."""
    return refused(why, lambda rollout: rollout.true_on_policy, "Use rollout.name=native on a CPU, or leave it out.")


def no_drafts(why: str, instead: str) -> Fields:
    """The section `speculative` of an engine that has no drafts whose tokens are known to stay the same."""
    return {
        f"speculative.{name}": refused(why, _drafts_otherwise(name, value), instead)
        for name, value in vars(SpeculativeConfig()).items()
    }


def _drafts_otherwise(name: str, value: object) -> Callable[[RolloutConfig], bool]:
    return lambda rollout: getattr(rollout.speculative, name) != value


_WHOLE = "it samples whole responses: nothing would stop early"
_STOPS = "Use rollout.name=native, or leave it out."
WHOLE_RESPONSES: Fields = {
    "over_sample_rate": refused(_WHOLE, lambda r: r.over_sample_rate > 0, _STOPS),
    "over_age": refused(_WHOLE, lambda r: r.over_age != "wait", _STOPS),
    "mask_offpolicy": refused(_WHOLE, lambda r: r.mask_offpolicy, _STOPS),
}
"""Of engines that cannot stop between two tokens and go on later."""

ANOTHERS = Refusal("of another engine", "nothing would read it")
"""Arguments in `engine_kwargs`."""


def refusals(fields: Fields, rollout: RolloutConfig, *, on_a_cpu: bool) -> Iterator[str]:
    """A message for each field whose value the engine of `rollout.name` cannot do.

    Args:
        fields: The engine's.
        rollout: The section.
        on_a_cpu: Whether the run is known to be on a CPU.
    """
    for key, refusal in broken(fields, rollout, on_a_cpu=on_a_cpu):
        where = f"rollout.name={rollout.name}{' on a CPU' if refusal.on_a_cpu else ''}"
        said = f"rollout.{key}={value_of(rollout, key)} is refused with {where}: {refusal.why}. {refusal.instead}"
        yield said.rstrip()


def broken(fields: Fields, rollout: RolloutConfig, *, on_a_cpu: bool) -> Iterator[tuple[str, Refusal]]:
    """The same as keys below `rollout`, with the refusal of each."""
    for key, use in fields.items():
        for refusal in use.refuses:
            if refusal.holds is not None and (on_a_cpu or not refusal.on_a_cpu) and refusal.holds(rollout):
                yield key, refusal


def value_of(rollout: RolloutConfig, key: str) -> object:
    """The value at a key below `rollout`."""
    found: object = rollout
    for part in key.split("."):
        found = getattr(found, part)
    return found
