"""Refuses lengths and sampling settings that do not go together, or not with the engine or the model.

Owns the rules of `rollout`. What an engine does with each field, and what it refuses, stands with it (`FIELDS`,
`engines/_config_support.py`); whether built engines fit in `engine.py`. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mrl.config import registry, user_code
from mrl.config.config import Config, RolloutConfig, SpeculativeConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.engines import _config_support
from mrl.engines.trtllm import engine_kwargs as trtllm_passed
from mrl.engines.trtllm import routing
from mrl.engines.vllm import engine_kwargs as vllm_passed
from mrl.models.base import ArchSpec

PASSED = {"trtllm": trtllm_passed, "vllm": vllm_passed}
"""Engine -> what it is handed beside the keys of `rollout`."""


def length_rules(config: Config) -> Iterator[str]:
    """A message for each length that leaves no room for another."""
    rollout = config.rollout
    both = rollout.prompt_length + rollout.response_length
    longest = config.rollout.longest
    if longest < both:
        yield (
            f"rollout.max_model_len={longest} is below rollout.prompt_length={rollout.prompt_length} + "
            f"rollout.response_length={rollout.response_length} = {both}."
        )
    if config.actor.max_tokens_per_microbatch < both:
        yield (
            f"actor.max_tokens_per_microbatch={config.actor.max_tokens_per_microbatch} is below the longest sequence, "
            f"rollout.prompt_length + rollout.response_length = {both}: a sequence is never split."
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.prompt_length:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below rollout.prompt_length="
            f"{rollout.prompt_length} and rollout.enable_chunked_prefill=false: such a prompt could not be read."
        )


def position_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """A message where sequences are longer than the model can read."""
    longest = config.rollout.longest
    if longest > arch.max_position_embeddings:
        yield (
            f"sequences of {longest} tokens (rollout.max_model_len, or rollout.prompt_length + "
            f"rollout.response_length) exceed the model's max_position_embeddings={arch.max_position_embeddings}."
        )


def sampling_rules(config: Config) -> Iterator[str]:
    """A message for each broken rule about the engine and how it samples."""
    rollout, val = config.rollout, config.rollout.val_kwargs
    engines = registry.names("engines")
    if rollout.name not in engines and not user_code.is_own(rollout.name):
        yield (
            f"rollout.name={rollout.name} is no engine of this version; it has {', '.join(engines)}."
            f"{did_you_mean(rollout.name, engines)} Or give a path {user_code.FORMS}."
        )
    if not rollout.do_sample and rollout.n > 1:
        yield f"rollout.do_sample=false makes rollout.n={rollout.n} equal samples of a prompt. Set rollout.n=1."
    if val.greedy and val.n > 1:
        why = "temperature=0" if val.do_sample else "do_sample=false"
        yield f"rollout.val_kwargs.n={val.n} with {why} scores the same answer {val.n} times."
    if rollout.name in engines:
        declared = registry.find("engines", rollout.name, "FIELDS")
        yield from _config_support.refusals(declared, rollout, on_a_cpu=config.run.device == "cpu")
    yield from routing.refusals(rollout)
    yield from _engine_arguments(rollout)
    yield from _quantization_rules(config)
    yield from _speculative_rules(rollout.speculative)
    if any(not text for text in rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once."


def _engine_arguments(rollout: RolloutConfig) -> Iterator[str]:
    """A message for each argument that is not handed on to the engine."""
    for engine, given in rollout.engine_kwargs.items():
        key = f"rollout.engine_kwargs.{engine}"
        if engine not in PASSED:
            yield (
                f"{key} is refused: only the engines {' and '.join(PASSED)} take arguments of their own, under "
                f"rollout.engine_kwargs.{rollout.name if rollout.name in PASSED else next(iter(PASSED))}. What other "
                "engines are told are the keys of rollout."
            )
        elif not isinstance(given, Mapping | None):
            yield f"{key}={given} came, expected a mapping such as {PASSED[engine].EXAMPLE}."
        elif given and rollout.name != engine:
            yield f"{key} is refused with rollout.name={rollout.name}: nothing would read it. Leave it out."
        else:
            yield from PASSED[engine].refusals(rollout)


def _speculative_rules(drafts: SpeculativeConfig) -> Iterator[str]:
    """A message where settings of drafts say nothing, or would find none."""
    for name, value in vars(SpeculativeConfig()).items():
        if drafts.method is None and getattr(drafts, name) != value:
            yield (
                f"rollout.speculative.{name}={getattr(drafts, name)} without rollout.speculative.method=ngram: nothing "
                "would read it."
            )
    least, most = drafts.prompt_lookup_min, drafts.prompt_lookup_max
    if least > most:
        yield (
            f"rollout.speculative.prompt_lookup_min={least} is above rollout.speculative.prompt_lookup_max={most}: no "
            "end of a sequence would be looked for."
        )


def _quantization_rules(config: Config) -> Iterator[str]:
    """A message where nothing corrects what quantised weights sample."""
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    if rollout.quantization is not None and not correction.takes_sampled:
        yield (
            f"rollout.quantization={rollout.quantization} with algorithm.rollout_correction.bypass_mode=false and no "
            "rollout_is: samples of the quantised weights would train as if the actor had drawn them. Set "
            "algorithm.rollout_correction.rollout_is=token."
        )
