"""Rules of the section `megatron`: unknown fields, wrong types, and fields that need other settings.

`config/megatron_fields/table.py` classifies all fields; `RULES` here has the conditions that need the rest of the
config. A field at its default is always allowed. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mrl.config.config import Config, MegatronConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.config.megatron_fields.defaults import ddp_defaults, overlaps_gradients
from mrl.config.megatron_fields.fp8 import ROW_ALIGNMENT, WIDTH_ALIGNMENT, fp8_training
from mrl.config.megatron_fields.installed import CLASSES, fields_of, version
from mrl.config.megatron_fields.table import TABLE, Verdict, default_value, is_default, te_only
from mrl.config.megatron_fields.values import DTYPES, expected, fits
from mrl.config.megatron_fields.versions import FIRST, first_release, removed_in
from mrl.errors import UserError
from mrl.models._positions import attention_factor
from mrl.models.base import ArchSpec
from mrl.models.transformer_engine import asked_for
from mrl.parallel_layout import ParallelLayout

CP_WAYS = ("p2p", "a2a")
"""Values of cp_comm_type that TransformerEngine supports for packed sequences with one level of process groups."""


SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that enable TransformerEngine's attention backends."""
BACKENDS = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}
"""Values of SWITCHES that Megatron requires, by attention_backend."""


@dataclass(frozen=True)
class RuleContext:
    """Arguments of a rule: the value of a field and its context.

    Attributes:
        value: Value of the field.
        section: All fields that its section of `megatron` sets.
        config: Complete config.
        grid: Parallel layout.
        arch: Architecture of the actor.
    """

    value: Any
    section: Mapping[str, Any]
    config: Config
    grid: ParallelLayout
    arch: ArchSpec


Needs = tuple[Callable[[RuleContext], Any], str]
"""A condition under which a field may be set, and the reason if it is not met."""


def section_of(config: MegatronConfig, section: str) -> dict[str, Any]:
    """Returns the fields that `megatron.<section>` sets."""
    found: dict[str, Any] = getattr(config, section)
    return found


def changes(config: MegatronConfig) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (section, field, default, value) of each known field with another value than its default in mrl."""
    for section in CLASSES:
        known = fields_of(section)
        for name, value in section_of(config, section).items():
            if name in known and not is_default(section, name, value):
                yield section, name, default_value(section, name), value


def name_rules(config: Config) -> Iterator[str]:
    """Yields a message for each field that the installed Megatron lacks or whose value has the wrong type."""
    for section in CLASSES:
        given = section_of(config.megatron, section)
        known = fields_of(section) if given else {}
        for name, value in given.items():
            key = f"megatron.{section}.{name}"
            if name not in known and (section, name) in TABLE:
                yield f"{key} is no field of megatron-core {version()}: {_versions_with(section, name)}"
            elif name not in known:
                yield f"{key} is unknown to megatron-core {version()}.{_meant(str(name), section)}"
            elif (section, name) not in TABLE:
                yield f"{key} is new in megatron-core {version()} and unknown to mrl. Remove it."
            elif TABLE[section, name].kind != "derived" and not fits(known[name].kind, value):
                takes = expected(known[name].kind) or "a Python object, which a config cannot contain: remove it"
                yield f"{key} is {_shown(value)}, expected {takes}."


def megatron_rules(config: Config, arch: ArchSpec, grid: ParallelLayout) -> Iterator[str]:
    """Yields a message for each refused field, with the reason and what to do."""
    for section, name, refusal, can_be_forced in _refusals(config, arch, grid):
        if not (can_be_forced and config.megatron.unchecked):
            way = " To use it without any check, set megatron.unchecked=true." if can_be_forced else ""
            yield f"megatron.{section}.{name} is refused: {refusal}.{way}"


def forced(config: Config, arch: ArchSpec, grid: ParallelLayout) -> list[str]:
    """Returns a warning for each refused field that is used because of `megatron.unchecked`."""
    if not config.megatron.unchecked:
        return []
    return [
        f"megatron.{section}.{name} is used only because of megatron.unchecked=true; mrl would refuse it: {refusal}"
        for section, name, refusal, can_be_forced in _refusals(config, arch, grid)
        if can_be_forced
    ]


def without_refused_fields(config: Config, arch: ArchSpec, grid: ParallelLayout) -> tuple[Config, list[str]]:
    """Removes the fields of `megatron` that would be refused or need an absent TransformerEngine.

    Returns:
        Config without these fields, and for each removed field its name and the reason.
    """
    left_out: list[str] = []
    while True:
        names = [
            (section, name, why)
            for section, name, why, can_be_forced in _refusals(config, arch, grid)
            if not (can_be_forced and config.megatron.unchecked)
            or (te_only(section, name) and not te_possible(config, arch))
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
    """Checks that environment variables for TransformerEngine's attention agree with the config.

    Megatron sets and checks them even if TransformerEngine is not used.

    Args:
        config: Settings of the run.
        variables: Those of SWITCHES that are set, with their values.

    Raises:
        UserError: The variables contradict `attention_backend`.
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
        f"The environment has {shown}, which contradicts megatron.transformer.attention_backend={backend}. "
        f"Unset {', '.join(wrong)}, and set megatron.transformer.attention_backend to auto, flash, fused or "
        f"unfused{hint}."
    )


def te_possible(config: Config, arch: ArchSpec) -> bool:
    """Returns whether TransformerEngine is possible; its installation is checked when the model is built."""
    return config.run.device != "cpu" and asked_for(config, arch)


def _refusals(config: Config, arch: ArchSpec, grid: ParallelLayout) -> Iterator[tuple[str, str, str, bool]]:
    """Yields section, field, reason, and whether `megatron.unchecked` can override the refusal."""
    for section in CLASSES:
        given = section_of(config.megatron, section)
        for name, value in given.items():
            verdict = TABLE.get((section, name), Verdict("free"))
            if verdict.kind == "derived":
                yield section, name, verdict.why, False
            elif not is_default(section, name, value):
                for reason in _reasons(section, name, verdict, RuleContext(value, given, config, grid, arch)):
                    yield section, name, reason, True


def _reasons(section: str, name: str, verdict: Verdict, ctx: RuleContext) -> Iterator[str]:
    if verdict.why:
        yield verdict.why
        return
    if name.startswith("moe_") and ctx.arch.moe is None:
        yield "it would have no effect because the model has no experts"
        return
    if te_only(section, name) and not te_possible(ctx.config, ctx.arch):
        yield (
            "it needs TransformerEngine, which is not used with run.device=cpu, model.dtype=float32, "
            "actor.transformer_impl=local or a model that has local layers alone"
        )
        return
    unmet = (why for needs, why in RULES.get(verdict.rule, ()) if not needs(ctx))
    yield from itertools.islice(unmet, 1)


def _meant(name: str, section: str) -> str:
    elsewhere = [other for other in CLASSES if other != section and name in fields_of(other)]
    if elsewhere:
        return f" It is a field of megatron.{elsewhere[0]}."
    return did_you_mean(name, fields_of(section)) or " Look up the fields in Megatron's documentation."


def _versions_with(section: str, name: str) -> str:
    first, removed = first_release(section, name), removed_in(section, name)
    if removed and first == FIRST:
        return f"{removed} removed it. Remove it, or install an older megatron-core."
    if removed:
        return f"{first} added it and {removed} removed it. Remove it, or install one of the versions in between."
    return f"{first} added it. Remove it, or install megatron-core>={first} (Python 3.12 or later)."


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _set(name: str) -> Callable[[RuleContext], Any]:
    """Returns a condition: another field of the section is set, and not to false or null."""
    return lambda ctx: ctx.section.get(name)


def _none(key: str) -> str:
    return f"it has no effect without {key}"


def _has_shared_expert(ctx: RuleContext) -> bool:
    return ctx.arch.moe is not None and bool(ctx.arch.moe.shared_intermediate_size)


def _gathers(ctx: RuleContext) -> bool:
    """Returns whether weights are all-gathered during the forward pass."""
    megatron = ctx.config.megatron
    on = {**ddp_defaults(ctx.config.actor, megatron, te=te_possible(ctx.config, ctx.arch)), **megatron.ddp}
    return bool(on.get("overlap_param_gather"))


def _dtype(value: Any) -> str:
    """Returns torch's name of a data type in Megatron's or torch's spelling."""
    return DTYPES.get(str(value), str(value))


def _cp_ways(ctx: RuleContext) -> bool:
    ways = ctx.value if isinstance(ctx.value, list) else [ctx.value]
    return all(way in CP_WAYS for way in ways)


def _fp8_runs(ctx: RuleContext) -> bool:
    return ctx.config.run.device == "cpu" or te_possible(ctx.config, ctx.arch)


def _fp8_widths_fit(ctx: RuleContext) -> bool:
    """Returns whether a rank's inputs and outputs of all linear layers are multiples of the recipe's width."""
    arch, grid = ctx.arch, ctx.grid
    queries, keys = arch.num_heads // grid.tp * arch.head_dim, max(1, arch.num_kv_heads // grid.tp) * arch.head_dim
    widths = [arch.hidden_size, queries, queries + 2 * keys]
    if (mla := arch.mla) is not None:
        heads = arch.num_heads // grid.tp
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        widths = [arch.hidden_size, queries, mla.q_lora_rank or 0, mla.cache_dim, mla.kv_lora_rank]
        widths += [expanded, heads * mla.v_head_dim]
    if arch.has_dense_layers:
        widths.append(arch.intermediate_size // grid.tp)
    if arch.moe is not None:
        widths += [arch.moe.intermediate_size // grid.expert_tp, (arch.moe.shared_intermediate_size or 0) // grid.tp]
    return not any(width % WIDTH_ALIGNMENT[ctx.section["fp8_recipe"]] for width in widths)


def _few_plain_layers(ctx: RuleContext) -> bool:
    """Returns whether the layers in bf16 at each end fit a pipeline stage, as Megatron requires."""
    fp8, most = fp8_training(ctx.section), ctx.arch.num_layers // ctx.grid.pp
    return fp8 is None or (0 <= fp8.first_plain <= most and 0 <= fp8.last_plain <= most)


WITH_FP8: Needs = (_set("fp8"), _none("fp8: e4m3 or hybrid"))
FEW_PLAIN: Needs = (
    _few_plain_layers,
    "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must be between 0 and the layers of a pipeline stage",
)
INTERLEAVED: Needs = (
    lambda ctx: ctx.grid.vpp > 1,
    _none("parallel.virtual_pipeline_model_parallel_size"),
)
DISTRIBUTED: Needs = (
    lambda ctx: ctx.config.actor.use_distributed_optimizer,
    _none("actor.use_distributed_optimizer=true"),
)
OVERLAPPED: Needs = (
    lambda ctx: overlaps_gradients(ctx.config.actor, te=te_possible(ctx.config, ctx.arch)),
    _none("actor.overlap_grad_reduce=true: there is one bucket"),
)
PIPELINED: Needs = (lambda ctx: ctx.grid.pp > 1, _none("a pipeline (parallel.pipeline_model_parallel_size)"))
PRECISE: Needs = (_set("use_precision_aware_optimizer"), _none("use_precision_aware_optimizer: true"))
RECOMPUTED = {"core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"}
"""Values that recompute_modules takes; of Megatron's, mla_up_proj is not among them, as latent attention is mrl's."""
FLEX: Needs = (
    lambda ctx: ctx.config.actor.moe_token_dispatcher_type == "flex",
    _none("actor.moe_token_dispatcher_type=flex"),
)
NOT_HYBRID: Needs = (
    lambda ctx: not ctx.section.get("optimizer_cpu_offload"),
    "it would have no effect with optimizer_cpu_offload: true, whose master weights and moments are float32",
)

RULES: dict[str, tuple[Needs, ...]] = {
    "te": (),
    "rope_fusion": (
        (
            lambda ctx: not ctx.value or attention_factor(ctx.arch) == 1.0,
            "TransformerEngine's fused rotary embedding has no factor for cosine and sine, and the model's "
            "rope_scaling (yarn, longrope) has one: leave it out",
        ),
    ),
    "attention": (
        (
            lambda ctx: ctx.value != "local",
            "mrl uses its own attention or TransformerEngine's, not Megatron's local one: set flash, fused, unfused or "
            "auto",
        ),
    ),
    "router_fusion": (
        (
            lambda ctx: ctx.config.actor.router_replay == "none",
            "Megatron's fused router ignores a replayed routing, so actor.router_replay must be none",
        ),
    ),
    "activation_offload": (
        (_set("cpu_offloading"), _none("cpu_offloading: true")),
        (lambda ctx: ctx.grid.pp == 1, "Megatron does not offload activations in a pipeline"),
        (
            lambda ctx: ctx.config.actor.recompute == "none" and not ctx.section.get("recompute_granularity"),
            "recomputed activations cannot be offloaded: set actor.recompute to none, without recompute_granularity",
        ),
    ),
    "fine_offload": (
        (_set("fine_grained_activation_offloading"), _none("fine_grained_activation_offloading: true")),
        (_set("offload_modules"), "it needs offload_modules, a list of what is offloaded"),
    ),
    "recompute": (
        (
            lambda ctx: ctx.config.actor.recompute == "none",
            "actor.recompute sets the recomputation already: set that to none",
        ),
        (_set("recompute_granularity"), _none("recompute_granularity: full or selective")),
        (
            lambda ctx: (
                ctx.section["recompute_granularity"] != "full"
                or (
                    (ctx.section.get("recompute_method") in ("uniform", "block"))
                    and ctx.section.get("recompute_num_layers") is not None
                )
            ),
            "recompute_granularity: full needs recompute_method (uniform or block) and recompute_num_layers",
        ),
        (
            lambda ctx: (
                ctx.section["recompute_granularity"] != "selective" or ctx.section.get("recompute_num_layers") is None
            ),
            "recompute_granularity: selective takes recompute_modules, and no recompute_num_layers",
        ),
        (
            lambda ctx: {*(ctx.section.get("recompute_modules") or ())} <= RECOMPUTED,
            f"recompute_modules takes some of {', '.join(sorted(RECOMPUTED))}",
        ),
    ),
    "shared_overlap": (
        (_has_shared_expert, "it would have no effect because the model has no shared expert"),
        (
            lambda ctx: ctx.config.actor.moe_token_dispatcher_type == "alltoall" and not _gathers(ctx),
            "it needs actor.moe_token_dispatcher_type=alltoall, and overlap_param_gather: false in megatron.ddp, "
            "because nothing would wait for the all-gather of the shared expert's gate weight",
        ),
    ),
    "flex": (FLEX,),
    "flex_backend": (
        FLEX,
        (
            lambda ctx: (
                ctx.value != "hybridep"
                or (ctx.grid.pp == 1 and ctx.grid.cp == 1)
                or ctx.section.get("moe_hybridep_pad_uneven_dispatch_inputs")
            ),
            "HybridEP takes equally many tokens from each rank, and mrl pads packed microbatches only without pipeline "
            "and context parallelism: add moe_hybridep_pad_uneven_dispatch_inputs: true (megatron-core 0.19)",
        ),
        (
            lambda ctx: ctx.value != "ncclep",
            "NCCL EP is not tested with packed microbatches, which differ in their number of tokens",
        ),
    ),
    "hybridep": (
        FLEX,
        (
            lambda ctx: ctx.section.get("moe_flex_dispatcher_backend") == "hybridep",
            _none("moe_flex_dispatcher_backend: hybridep"),
        ),
    ),
    "mlp_chunks": (
        (lambda ctx: ctx.value > 0, "expected a number of chunks of at least 1"),
        (
            lambda ctx: ctx.arch.moe is None,
            "the router of an MoE model replays and balances all tokens of a microbatch at once",
        ),
    ),
    "fp8": (
        (
            lambda ctx: ctx.section.get("fp8_recipe") in ROW_ALIGNMENT,
            "add fp8_recipe: blockwise, tensorwise or mxfp8. Megatron's default, delayed, scales by a history of "
            "magnitudes, which is state that a resume would lose and that scoring would change; custom needs code",
        ),
        (
            _fp8_runs,
            "it needs TransformerEngine's layers (model.dtype=bfloat16, without actor.transformer_impl=local), or "
            "run.device=cpu, where it is emulated",
        ),
        (
            lambda ctx: ctx.config.run.device != "cpu" or ctx.arch.moe is None,
            "the emulation of FP8 on a CPU covers dense models only: use one, or a GPU",
        ),
        (
            _fp8_widths_fit,
            "each rank's input and output sizes of linear layers (hidden, heads x head_dim, MLP) must be multiples of "
            "16, with fp8_recipe: mxfp8 of 32",
        ),
    ),
    "with_fp8": (WITH_FP8,),
    "plain_layers": (WITH_FP8, FEW_PLAIN),
    "num_plain_layers": (
        WITH_FP8,
        (_set("first_last_layers_bf16"), _none("first_last_layers_bf16: true")),
        FEW_PLAIN,
    ),
    "bucket_count": (OVERLAPPED, (lambda ctx: ctx.section.get("bucket_size") is None, "bucket_size is set as well")),
    "skip": ((lambda ctx: ctx.value > 0, "expected a gradient norm above 0"),),
    "context": (
        (lambda ctx: ctx.grid.cp > 1, _none("parallel.context_parallel_size above 1")),
        (_cp_ways, f"for packed sequences TransformerEngine supports only {' and '.join(CP_WAYS)}"),
    ),
    "interleaved": (INTERLEAVED,),
    "pipeline": (PIPELINED,),
    "param_gather": (DISTRIBUTED, OVERLAPPED),
    "aligned": ((_set("overlap_param_gather"), _none("overlap_param_gather: true")), INTERLEAVED),
    "buckets": (OVERLAPPED,),
    "distributed": (DISTRIBUTED,),
    "low_gradients": (
        (lambda ctx: not ctx.section.get("grad_reduce_in_fp32", True), _none("grad_reduce_in_fp32: false")),
        DISTRIBUTED,
    ),
    "gradients": ((lambda ctx: ctx.config.model.dtype != "float32", _none("model.dtype=bfloat16")),),
    "registered": (
        (
            lambda ctx: not (ctx.config.actor.param_offload or ctx.config.actor.grad_offload),
            "NCCL registers buffers by address: set actor.param_offload and actor.grad_offload to false",
        ),
    ),
    "symmetric": ((_set("nccl_ub"), _none("nccl_ub: true")),),
    "precision": (
        (
            lambda ctx: ctx.config.actor.use_distributed_optimizer,
            "Megatron supports it only with the distributed optimizer: set actor.use_distributed_optimizer=true",
        ),
    ),
    "remainders": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda ctx: _dtype(ctx.section.get("main_params_dtype", "float32")) == "float32",
            _none("main_params_dtype: float32"),
        ),
    ),
    "masters": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda ctx: _dtype(ctx.value) in ("float32", "float16"),
            "TransformerEngine keeps master weights in float32 or float16",
        ),
    ),
    "main_gradients": (
        PRECISE,
        (
            lambda ctx: _dtype(ctx.value) in ("float32", "bfloat16"),
            "the gradient buffer is float32, or bfloat16 with grad_reduce_in_fp32: false in megatron.ddp",
        ),
        (
            lambda ctx: (_dtype(ctx.value) == "float32") == ctx.config.megatron.ddp.get("grad_reduce_in_fp32", True),
            "it must be the type of the gradient buffer in megatron.ddp: float32, or bfloat16 with "
            "grad_reduce_in_fp32: false; set both, or neither",
        ),
    ),
    "moments": (
        PRECISE,
        NOT_HYBRID,
        (
            lambda ctx: _dtype(ctx.value) != "uint8",
            "8-bit moments are TransformerEngine tensors, which mrl cannot offload: use float32, bfloat16 or float16",
        ),
    ),
    "hybrid": (
        (
            _set("use_precision_aware_optimizer"),
            "it needs use_precision_aware_optimizer: true; without it the device stores a second set of master weights",
        ),
        (
            lambda ctx: ctx.section.get("decoupled_weight_decay", True),
            "the CPU optimizer is AdamW, so it needs decoupled_weight_decay: true",
        ),
    ),
    "fraction": (
        (_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),
        (lambda ctx: 0 < ctx.value <= 1, "expected a fraction above 0 and at most 1"),
    ),
    "of_hybrid": ((_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),),
    "hybrid_overlap": (
        (_set("optimizer_cpu_offload"), _none("optimizer_cpu_offload: true")),
        (
            lambda ctx: (
                ctx.config.megatron.ddp.get("grad_reduce_in_fp32", True)
                or ctx.section.get(
                    "optimizer_offload_fraction", default_value("optimizer", "optimizer_offload_fraction")
                )
                == 1
            ),
            "Megatron converts bfloat16 gradients to float32 in another CUDA stream than the device's optimizer step, "
            "which does not wait for it: remove grad_reduce_in_fp32: false in megatron.ddp, or offload everything",
        ),
    ),
    "qk_norm": ((lambda ctx: ctx.arch.qk_norm, "it would have no effect because the model has no QK norm"),),
}
"""Conditions of each rule in the table of fields, with the reason if one is not met."""
