"""Rules of the section `rollout`: lengths, sampling, speculative decoding, quantization. Imports no torch.

Each engine's `FIELDS` (`engines/_field_support.py`) has the fields that it supports, and its `CAPABILITIES`
(`engines/_capabilities.py`) the rules between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mrl.config import registry, user_code
from mrl.config.config import Config, RolloutConfig, SpeculativeConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.engines import _field_support
from mrl.engines._capabilities import engine_capabilities, engines_with_arguments
from mrl.models._positions import position_limit
from mrl.models.base import ArchSpec


def length_rules(config: Config) -> Iterator[str]:
    """Yields a message for each length limit that is smaller than it must be."""
    rollout = config.rollout
    both = rollout.prompt_length + rollout.response_length
    longest = config.rollout.max_sequence_length
    if longest < both:
        yield (
            f"rollout.max_model_len={longest} is below rollout.prompt_length={rollout.prompt_length} + "
            f"rollout.response_length={rollout.response_length} = {both}. Raise it, or remove it."
        )
    if config.actor.max_tokens_per_microbatch < both:
        yield (
            f"actor.max_tokens_per_microbatch={config.actor.max_tokens_per_microbatch} is below the longest sequence, "
            f"rollout.prompt_length + rollout.response_length = {both}, and a sequence is never split. Raise it to at "
            "least that."
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.prompt_length:
        yield (
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below rollout.prompt_length="
            f"{rollout.prompt_length} with rollout.enable_chunked_prefill=false, so long prompts cannot be prefilled. "
            "Raise it, or set rollout.enable_chunked_prefill=true."
        )


def position_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message if sequences can exceed the model's positions."""
    longest, limit = config.rollout.max_sequence_length, position_limit(arch)
    if longest <= limit:
        return
    advice, scaling = "Lower these lengths.", arch.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        advice = (
            "With rope_type 'dynamic' the frequencies of longer sequences depend on their length, so that a token's "
            "log-probability would depend on tokens after it. Lower these lengths, or set rope_type to 'yarn' in the "
            "model's config.json."
        )
    elif limit != arch.max_position_embeddings:
        advice = f"With its rope_scaling it has positions for {limit} tokens. {advice}"
    yield (
        f"Sequences of {longest} tokens (rollout.max_model_len, or rollout.prompt_length + "
        f"rollout.response_length) exceed the model's max_position_embeddings={arch.max_position_embeddings}. {advice}"
    )


def latent_attention_rules(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message if the engine would quantize a model with latent attention."""
    if arch.mla is not None and config.rollout.quantization is not None:
        yield (
            f"rollout.quantization={config.rollout.quantization}: '{arch.family}' has multi-head latent attention, "
            "for whose matrices mrl has no quantization in the engine yet. Remove it."
        )


def sampling_rules(config: Config) -> Iterator[str]:
    """Yields a message for each broken rule about the engine and its sampling."""
    rollout, val = config.rollout, config.rollout.val_kwargs
    engines = registry.names("engines")
    if rollout.name not in engines and not user_code.is_user_code(rollout.name):
        yield (
            f"rollout.name={rollout.name} is unknown; expected one of {', '.join(engines)}, or a path "
            f"{user_code.FORMS}.{did_you_mean(rollout.name, engines)}"
        )
    if not rollout.do_sample and rollout.n > 1:
        yield f"rollout.do_sample=false gives rollout.n={rollout.n} equal samples of each prompt. Set rollout.n=1."
    if val.greedy and val.n > 1:
        why = "temperature=0" if val.do_sample else "do_sample=false"
        yield (
            f"rollout.val_kwargs.n={val.n} with {why} scores the same answer {val.n} times. Set rollout.val_kwargs.n=1."
        )
    if rollout.name in engines:
        capabilities = engine_capabilities(rollout.name)
        yield from _field_support.refusals(capabilities.fields, rollout, on_a_cpu=config.run.device == "cpu")
        yield from capabilities.config_errors(rollout)
    yield from _engine_arguments(rollout)
    yield from _quantization_rules(config)
    yield from _speculative_rules(rollout.speculative)
    if any(not text for text in rollout.stop):
        yield "rollout.stop contains an empty string, which would end every response at once. Remove it."


def _engine_arguments(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message for each refused argument in `rollout.engine_kwargs`."""
    known = engines_with_arguments()
    for engine, given in rollout.engine_kwargs.items():
        key = f"rollout.engine_kwargs.{engine}"
        arguments = engine_capabilities(engine).arguments if engine in known else None
        if arguments is None:
            yield (
                f"{key} is refused: only the engines {' and '.join(known)} take arguments of their own, under "
                f"rollout.engine_kwargs.{rollout.name if rollout.name in known else known[0]}. Set other "
                "engines with the keys of rollout."
            )
        elif not isinstance(given, Mapping | None):
            yield f"{key} is {given}, expected a mapping such as {arguments.EXAMPLE}."
        elif given and rollout.name != engine:
            yield f"{key} is refused with rollout.name={rollout.name}: nothing would read it. Remove it."
        else:
            yield from arguments.refusals(rollout)


def _speculative_rules(drafts: SpeculativeConfig) -> Iterator[str]:
    """Yields a message for each setting of speculative decoding without effect."""
    for name, value in vars(SpeculativeConfig()).items():
        if drafts.method is None and getattr(drafts, name) != value:
            yield (
                f"rollout.speculative.{name}={getattr(drafts, name)} would have no effect without "
                "rollout.speculative.method=ngram. Set the method, or remove it."
            )
    shortest, longest = drafts.prompt_lookup_min, drafts.prompt_lookup_max
    if shortest > longest:
        yield (
            f"rollout.speculative.prompt_lookup_min={shortest} is above rollout.speculative.prompt_lookup_max="
            f"{longest}, so no n-gram would be looked up. Lower the minimum or raise the maximum."
        )


def _quantization_rules(config: Config) -> Iterator[str]:
    """Yields a message if quantized rollouts would be trained on without importance weights."""
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    if rollout.quantization is not None and not correction.uses_rollout_logprobs:
        yield (
            f"rollout.quantization={rollout.quantization} with algorithm.rollout_correction.bypass_mode=false and no "
            "rollout_is would train on samples of the quantized weights as if the actor had sampled them. Set "
            "algorithm.rollout_correction.rollout_is=token."
        )
