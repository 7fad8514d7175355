"""Refuses what `megatron` must not pass on to Megatron: unknown fields, values of another type, and broken rules.

Owns the rules of guarded fields, which need the rest of the config; the classes of all fields are in
`config/megatron_fields/table.py`. What is left out is never refused: a field at its own value, Megatron's or mrl's,
changes nothing. It imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrl.config.config import Config, MegatronConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.config.megatron_fields.defaults import ddp_defaults, overlaps_gradients
from mrl.config.megatron_fields.installed import CLASSES, fields_of, version
from mrl.config.megatron_fields.table import TABLE, Verdict, is_own, own_value, te_only
from mrl.config.megatron_fields.values import DTYPES, expected, fits
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.transformer_engine import asked_for
from mrl.parallel_layout import Grid

CP_WAYS = ("p2p", "a2a")
"""What TransformerEngine does for packed sequences, with process groups of one level."""


SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables with which TransformerEngine's backends of attention are switched off."""
BACKENDS = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}
"""attention_backend -> the values of SWITCHES that Megatron sets, and takes no others."""


@dataclass(frozen=True)
class Asked:
    """A field that is set, and what it is held against.

    Attributes:
        value: As it was given.
        beside: What else its section sets.
    """

    value: Any
    beside: Mapping[str, Any]
    config: Config
    grid: Grid
    arch: ArchSpec


Needs = tuple[Callable[[Asked], Any], str]
"""Whether a field may be set, and why not."""


def section_of(config: MegatronConfig, section: str) -> dict[str, Any]:
    """What `megatron.<section>` sets."""
    found: dict[str, Any] = getattr(config, section)
    return found


def changes(config: MegatronConfig) -> Iterator[tuple[str, str, Any, Any]]:
    """(section, field, value without `megatron`, given value) of each known field that is given another value."""
    for section in CLASSES:
        known = fields_of(section)
        for name, value in section_of(config, section).items():
            if name in known and not is_own(section, name, value):
                yield section, name, own_value(section, name), value


def name_rules(config: Config) -> Iterator[str]:
    """A message for each field that the installed Megatron lacks, or whose value is of another type."""
    for section in CLASSES:
        given = section_of(config.megatron, section)
        known = fields_of(section) if given else {}
        for name, value in given.items():
            key = f"megatron.{section}.{name}"
            if name not in known:
                yield f"{key} is unknown to megatron-core {version()}.{_meant(str(name), section)}"
            elif (section, name) not in TABLE:
                yield f"{key} is new in megatron-core {version()}, and not known to mrl. Leave it out."
            elif TABLE[section, name].kind != "derived" and not fits(known[name].kind, value):
                takes = expected(known[name].kind) or "an object of Python, which no config can give: leave it out"
                yield f"{key}={_shown(value)} came, expected {takes}."


def megatron_rules(config: Config, arch: ArchSpec, grid: Grid) -> Iterator[str]:
    """A message for each field that is refused, with the reason and what to do."""
    for section, name, refusal, can_be_forced in _refusals(config, arch, grid):
        if not (can_be_forced and config.megatron.unchecked):
            way = " megatron.unchecked=true lets it through, and no check of mrl covers it." if can_be_forced else ""
            yield f"megatron.{section}.{name} is refused: {refusal}.{way}"


def forced(config: Config, arch: ArchSpec, grid: Grid) -> list[str]:
    """A warning for each field that `megatron.unchecked` lets through, which no check of mrl covers."""
    if not config.megatron.unchecked:
        return []
    return [
        f"megatron.unchecked lets megatron.{section}.{name} through, which mrl refuses: {refusal}"
        for section, name, refusal, can_be_forced in _refusals(config, arch, grid)
        if can_be_forced
    ]


def fitting(config: Config, arch: ArchSpec, grid: Grid) -> tuple[Config, list[str]]:
    """The config without the fields that would be refused, or that only TransformerEngine has where it cannot be.

    Returns:
        The config, and what was left out, each with the reason.
    """
    left_out: list[str] = []
    while True:
        names = [
            (section, name, why)
            for section, name, why, can_be_forced in _refusals(config, arch, grid)
            if not (can_be_forced and config.megatron.unchecked) or (te_only(section, name) and not te_possible(config))
        ]
        if not names:
            return config, left_out
        left_out += [f"megatron.{section}.{name}: {why}" for section, name, why in names]
        kept: dict[str, Any] = {
            section: {
                name: value
                for name, value in section_of(config.megatron, section).items()
                if (section, name) not in {(of, which) for of, which, _ in names}
            }
            for section in CLASSES
        }
        config = replace(config, megatron=replace(config.megatron, **kept))


def check_switches(config: Config, variables: Mapping[str, str]) -> None:
    """Refuses switches of TransformerEngine's attention in the environment that say something else than the config.

    Megatron sets and checks them whether TransformerEngine is in use or not.

    Args:
        config: The run.
        variables: Those of SWITCHES that are set.

    Raises:
        UserError: With the backend that they would mean.
    """
    backend = str(config.megatron.transformer.get("attention_backend") or "auto")
    takes = dict(zip(SWITCHES, BACKENDS.get(backend, ""), strict=False))
    wrong = {name: value for name, value in variables.items() if takes.get(name, value) != value}
    if not wrong:
        return
    shown = " ".join(f"{name}={value}" for name, value in wrong.items())
    meant = [
        name
        for name, values in BACKENDS.items()
        if name != "local" and all(variables.get(key, on) == on for key, on in zip(SWITCHES, values, strict=True))
    ]
    hint = f" (they mean {' or '.join(meant)})" if meant else ""
    raise UserError(
        f"the environment has {shown}, and Megatron refuses it with megatron.transformer.attention_backend={backend}. "
        f"Unset {', '.join(wrong)}, and choose with megatron.transformer.attention_backend: auto, flash, fused or "
        f"unfused{hint}."
    )


def te_possible(config: Config) -> bool:
    """Whether the run may be one with TransformerEngine; the machine itself says it as the model is built."""
    return config.run.device != "cpu" and asked_for(config)


def _refusals(config: Config, arch: ArchSpec, grid: Grid) -> Iterator[tuple[str, str, str, bool]]:
    """Section, field, reason, and whether `megatron.unchecked` lets it through."""
    for section in CLASSES:
        given = section_of(config.megatron, section)
        for name, value in given.items():
            verdict = TABLE.get((section, name), Verdict("free"))
            if verdict.kind == "derived":
                yield section, name, verdict.why, False
            elif not is_own(section, name, value):
                for reason in _reasons(section, name, verdict, Asked(value, given, config, grid, arch)):
                    yield section, name, reason, True


def _reasons(section: str, name: str, verdict: Verdict, asked: Asked) -> Iterator[str]:
    if verdict.why:
        yield verdict.why
        return
    if name.startswith("moe_") and asked.arch.moe is None:
        yield "it would have no effect because the model has no experts"
        return
    if te_only(section, name) and not te_possible(asked.config):
        yield (
            "only TransformerEngine has it, which is not in use with run.device=cpu, model.dtype=float32 or "
            "actor.transformer_impl=local"
        )
        return
    unmet = (why for needs, why in RULES.get(verdict.rule, ()) if not needs(asked))
    yield from itertools.islice(unmet, 1)


def _meant(name: str, section: str) -> str:
    elsewhere = [other for other in CLASSES if other != section and name in fields_of(other)]
    if elsewhere:
        return f" It is a field of megatron.{elsewhere[0]}."
    return did_you_mean(name, fields_of(section)) or " Look its fields up in Megatron's documentation."


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _set(name: str) -> Callable[[Asked], Any]:
    """Whether another field of the section is set, and not to false or null."""
    return lambda asked: asked.beside.get(name)


def _none(key: str) -> str:
    return f"it has no effect without {key}"


def _has_shared_expert(asked: Asked) -> bool:
    return asked.arch.moe is not None and bool(asked.arch.moe.shared_intermediate_size)


def _gathers(asked: Asked) -> bool:
    """Whether weights are gathered while the forward runs."""
    megatron = asked.config.megatron
    on = {**ddp_defaults(asked.config.actor, megatron, te=te_possible(asked.config)), **megatron.ddp}
    return bool(on.get("overlap_param_gather"))


def _dtype(value: Any) -> str:
    """Torch's name of a type that may be written as Megatron does."""
    return DTYPES.get(str(value), str(value))


def _cp_ways(asked: Asked) -> bool:
    ways = asked.value if isinstance(asked.value, list) else [asked.value]
    return all(way in CP_WAYS for way in ways)


INTERLEAVED: Needs = (
    lambda asked: asked.grid.vpp > 1,
    _none("parallel.virtual_pipeline_model_parallel_size"),
)
DISTRIBUTED: Needs = (
    lambda asked: asked.config.actor.use_distributed_optimizer,
    _none("actor.use_distributed_optimizer=true"),
)
OVERLAPPED: Needs = (
    lambda asked: overlaps_gradients(asked.config.actor, te=te_possible(asked.config)),
    _none("actor.overlap_grad_reduce=true: there is one bucket"),
)
PIPELINED: Needs = (lambda asked: asked.grid.pp > 1, _none("a pipeline (parallel.pipeline_model_parallel_size)"))
PRECISE: Needs = (_set("use_precision_aware_optimizer"), _none("use_precision_aware_optimizer: true"))
RECOMPUTED = {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"}
"""What Megatron takes in recompute_modules."""
NOT_HYBRID: Needs = (
    lambda asked: not asked.beside.get("optimizer_cpu_offload"),
    "it would have no effect with optimizer_cpu_offload: true, whose master weights and moments are float32",
)

RULES: dict[str, tuple[Needs, ...]] = {
    "te": (),
    "attention": (
        (
            lambda asked: asked.value != "local",
            "attention is mrl's own or TransformerEngine's, never Megatron's: flash, fused, unfused or auto",
        ),
    ),
    "router_fusion": (
        (
            lambda asked: asked.config.actor.router_replay == "none",
            "Megatron's fused router chooses the experts itself, and actor.router_replay would do nothing",
        ),
    ),
    "activation_offload": (
        (_set("cpu_offloading"), _none("cpu_offloading: true")),
        (lambda asked: asked.grid.pp == 1, "Megatron does not offload activations in a pipeline"),
        (
            lambda asked: asked.config.actor.recompute == "none" and not asked.beside.get("recompute_granularity"),
            "activations that are recomputed are not offloaded: actor.recompute must be none",
        ),
    ),
    "fine_offload": (
        (_set("fine_grained_activation_offloading"), _none("fine_grained_activation_offloading: true")),
        (_set("offload_modules"), "it needs offload_modules, a list of what is offloaded"),
    ),
    "recompute": (
        (
            lambda asked: asked.config.actor.recompute == "none",
            "actor.recompute says already what is recomputed; set it to none",
        ),
        (_set("recompute_granularity"), _none("recompute_granularity: full or selective")),
        (
            lambda asked: (
                asked.beside["recompute_granularity"] != "full"
                or (
                    (asked.beside.get("recompute_method") in ("uniform", "block"))
                    and asked.beside.get("recompute_num_layers") is not None
                )
            ),
            "recompute_granularity: full needs recompute_method (uniform or block) and recompute_num_layers",
        ),
        (
            lambda asked: (
                asked.beside["recompute_granularity"] != "selective" or asked.beside.get("recompute_num_layers") is None
            ),
            "recompute_granularity: selective takes recompute_modules, and no recompute_num_layers",
        ),
        (
            lambda asked: {*(asked.beside.get("recompute_modules") or ())} <= RECOMPUTED,
            f"recompute_modules takes some of {', '.join(sorted(RECOMPUTED))}",
        ),
    ),
    "shared_overlap": (
        (_has_shared_expert, "it would have no effect because the model has no shared expert"),
        (
            lambda asked: asked.config.actor.moe_token_dispatcher_type == "alltoall" and not _gathers(asked),
            "it needs actor.moe_token_dispatcher_type=alltoall, and overlap_param_gather: false in megatron.ddp, as "
            "nothing would wait for the weight of the shared expert's gate",
        ),
    ),
    "flex": (
        (
            lambda asked: asked.config.actor.moe_token_dispatcher_type == "flex",
            _none("actor.moe_token_dispatcher_type=flex"),
        ),
    ),
    "context": (
        (lambda asked: asked.grid.cp > 1, _none("parallel.context_parallel_size above 1")),
        (_cp_ways, f"for packed sequences TransformerEngine has {' and '.join(CP_WAYS)}"),
    ),
    "interleaved": (INTERLEAVED,),
    "pipeline": (PIPELINED,),
    "param_gather": (DISTRIBUTED, OVERLAPPED),
    "aligned": ((_set("overlap_param_gather"), _none("overlap_param_gather: true")), INTERLEAVED),
    "buckets": (OVERLAPPED,),
    "distributed": (DISTRIBUTED,),
    "low_gradients": (
        (lambda asked: not asked.beside.get("grad_reduce_in_fp32", True), _none("grad_reduce_in_fp32: false")),
        DISTRIBUTED,
    ),
    "gradients": ((lambda asked: asked.config.model.dtype != "float32", _none("model.dtype=bfloat16")),),
    "registered": (
        (
            lambda asked: not (asked.config.actor.param_offload or asked.config.actor.grad_offload),
            "NCCL knows its buffers by their address: set actor.param_offload and actor.grad_offload to false",
        ),
    ),
    "symmetric": ((_set("nccl_ub"), _none("nccl_ub: true")),),
    "precision": (
        (
            lambda asked: asked.config.actor.use_distributed_optimizer,
            "Megatron has it for the distributed optimizer: set actor.use_distributed_optimizer=true",
        ),
    ),
    "remainders": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda asked: _dtype(asked.beside.get("main_params_dtype", "float32")) == "float32",
            _none("main_params_dtype: float32"),
        ),
    ),
    "masters": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda asked: _dtype(asked.value) in ("float32", "float16"),
            "TransformerEngine keeps master weights in float32 or float16",
        ),
    ),
    "main_gradients": (
        PRECISE,
        (
            lambda asked: _dtype(asked.value) in ("float32", "bfloat16"),
            "the gradients' buffer is float32, or bfloat16 with grad_reduce_in_fp32: false in megatron.ddp",
        ),
        (
            lambda asked: (
                (_dtype(asked.value) == "float32") == asked.config.megatron.ddp.get("grad_reduce_in_fp32", True)
            ),
            "megatron.ddp says of what type the gradients' buffer is: float32, or bfloat16 with grad_reduce_in_fp32: "
            "false; give both, or neither",
        ),
    ),
    "moments": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda asked: _dtype(asked.value) != "uint8",
            "moments of 8 bits are tensors of TransformerEngine's own, which offloading does not reach: float32, "
            "bfloat16 or float16",
        ),
    ),
    "hybrid": (
        (
            _set("use_precision_aware_optimizer"),
            "it needs use_precision_aware_optimizer: true, as on Megatron's own command line; without it the device "
            "keeps a second set of master weights",
        ),
        (
            lambda asked: asked.beside.get("decoupled_weight_decay", True),
            "what steps on the host is AdamW: it needs decoupled_weight_decay: true",
        ),
    ),
    "fraction": (
        (_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),
        (lambda asked: 0 < asked.value <= 1, "expected is a part of 1 (0.5 is half): above 0, at most 1"),
    ),
    "of_hybrid": ((_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),),
    "hybrid_overlap": (
        (_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),
        (
            lambda asked: (
                asked.config.megatron.ddp.get("grad_reduce_in_fp32", True)
                or asked.beside.get("optimizer_offload_fraction", own_value("optimizer", "optimizer_offload_fraction"))
                == 1
            ),
            "Megatron makes bfloat16 gradients float32 in another stream than the one in which the device's part is "
            "stepped, which does not wait: leave out grad_reduce_in_fp32: false in megatron.ddp, or offload all",
        ),
    ),
    "qk_norm": (
        (lambda asked: asked.arch.qk_norm, "it would have no effect because the model norms no queries and keys"),
    ),
}
"""A rule of the table -> what its field needs, and what is said where that is missing."""
