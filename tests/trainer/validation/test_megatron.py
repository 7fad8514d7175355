"""What `megatron` may pass on, and what it may not: each refusal with its reason, before anything starts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mrl.commands.cli import main
from mrl.config.megatron_fields.defaults import ddp_defaults, transformer_defaults
from mrl.config.megatron_fields.installed import CLASSES, fields_of
from mrl.config.megatron_fields.table import RULE_CHECKED
from mrl.errors import UserError
from mrl.megatron.config_passthrough import enums
from mrl.megatron.model import GPTModel
from mrl.models.base import RopeScaling
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.megatron import BACKENDS, RULES, SWITCHES, changes, check_switches, forced
from mrl.trainer.validation.parallel import build_parallel_layout
from mrl.trainer.validation.validate import check
from tests.source import ROOT
from tests.trainer.validation.runs import ARCH, PP, TP, make, refusal

MOE = arch_from_preset("qwen3_moe_tiny", {}, None)
SHARED = arch_from_preset("qwen2_moe_tiny", {}, None)
NORMED = arch_from_preset("qwen3_tiny", {}, None)
T, D, O = "megatron.transformer", "megatron.ddp", "megatron.optimizer"  # noqa: E741
VPP = "parallel.virtual_pipeline_model_parallel_size"
FULL = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


YARN = replace(ARCH, rope_scaling=RopeScaling("yarn", 4.0, 64))


def arch_of(overrides, said=""):
    if "(yarn, longrope)" in said:
        return YARN
    if "no experts" in said or not any("moe" in item for item in overrides):
        return ARCH
    return SHARED if "alltoall" in said else MOE


REFUSED = [
    # overrides, ranks, what the message says
    ([f"{T}={{moe_permute_fuson: true}}"], 1, "Did you mean 'moe_permute_fusion'?"),
    ([f"{T}={{overlap_param_gather: true}}"], 1, "It is a field of megatron.ddp."),
    ([f"{D}={{overlap_param_gather: 1}}"], 1, "overlap_param_gather is 1, expected true or false"),
    ([f"{T}={{attention_backend: flash3}}"], 1, "expected one of flash, fused, unfused, local, auto"),
    ([f"{T}={{quant_recipe: x}}"], 1, "a Python object, which a config cannot contain"),
    ([f"{T}={{tensor_model_parallel_size: 2}}"], 1, "is refused: set parallel.tensor_model_parallel_size."),
    ([f"{T}={{hidden_size: 8}}"], 1, "is refused: it comes from model.path"),
    ([f"{O}={{lr: 0.1}}"], 1, "is refused: set actor.lr."),
    ([f"{T}={{activation_func: gelu}}"], 1, "is refused: it comes from model.path"),
    ([f"{T}={{window_size: [4, 0]}}"], 1, "the engine would sample from another model: it changes the attention"),
    ([f"{T}={{hidden_dropout: 0.1}}"], 1, "it changes dropout"),
    ([f"{T}={{hidden_dropout: 0.2}}"], 1, "To use it without any check, set megatron.unchecked=true"),
    ([f"{T}={{fp8: hybrid}}"], 1, "Megatron's default, delayed, scales by a history of magnitudes"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: delayed}}"], 1, "add fp8_recipe: blockwise, tensorwise or mxfp8"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: custom}}"], 1, "custom needs code"),
    ([f"{T}={{fp8: e5m2, fp8_recipe: blockwise}}"], 1, "fp8 is e5m2, expected"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise}}", "model.dtype=float32"], 1,
     "TransformerEngine's layers (model.dtype"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise}}", "actor.transformer_impl=local"], 1,
     "or run.device=cpu, where it is"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise}}", "run.device=cpu", "actor.moe_router_dtype=fp64"], 1,
     "the emulation of FP8 on a CPU covers dense models only"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: mxfp8}}", f"{TP}=4", "run.device=cpu"], 4,
     "(hidden, heads x head_dim, MLP) must be multiples of 16, with fp8_recipe: mxfp8 of 32"),
    ([f"{T}={{fp8_recipe: blockwise}}"], 1, "fp8_recipe is refused: it has no effect without fp8: e4m3 or hybrid"),
    ([f"{T}={{first_last_layers_bf16: true}}"], 1, "no effect without fp8: e4m3 or hybrid"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise, num_layers_at_end_in_bf16: 2}}"], 1,
     "no effect without first_last_layers_bf16: true"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise, first_last_layers_bf16: true, num_layers_at_end_in_bf16: 5}}"], 1,
     "between 0 and the layers of a pipeline stage"),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise, fp8_param: true}}"], 1, "read unquantized bfloat16 or float32 weights"),
    ([f"{T}={{fp8_wgrad: false}}"], 1, "it belongs to fp8_recipe: delayed"),
    ([f"{T}={{fp4: e2m1}}"], 1, "no engine has its number format"),
    ([f"{T}={{fp8_dot_product_attention: true}}"], 1, "is computed in bfloat16"),
    ([f"{T}={{moe_router_padding_for_quantization: true}}"], 1, "grouped experts pad their rows themselves"),
    ([f"{T}={{tp_comm_overlap: true}}"], 1, "it needs microbatches of one length"),
    ([f"{D}={{use_megatron_fsdp: true}}"], 1, "Megatron-FSDP shards every parameter"),
    ([f"{O}={{use_precision_aware_optimizer: true}}", "actor.use_distributed_optimizer=false"], 1,
     "set actor.use_distributed_optimizer=true"),
    ([f"{O}={{use_precision_aware_optimizer: true}}", "model.dtype=float32"], 1, "it needs TransformerEngine"),
    ([f"{O}={{exp_avg_dtype: bfloat16}}"], 1, "no effect without use_precision_aware_optimizer: true"),
    ([f"{O}={{use_precision_aware_optimizer: true, exp_avg_sq_dtype: fp8}}"], 1, "8-bit moments"),
    ([f"{O}={{use_precision_aware_optimizer: true, main_params_dtype: bf16}}"], 1, "in float32 or float16"),
    ([f"{O}={{use_precision_aware_optimizer: true, main_grads_dtype: fp16}}"], 1, "the gradient buffer is float32"),
    ([f"{O}={{use_precision_aware_optimizer: true, main_grads_dtype: bf16}}"], 1, "set both, or neither"),
    ([f"{O}={{use_precision_aware_optimizer: true, store_param_remainders: false, main_params_dtype: fp16}}"], 1,
     "no effect without main_params_dtype: float32"),
    ([f"{O}={{use_precision_aware_optimizer: true, optimizer_cpu_offload: true, exp_avg_dtype: bf16}}"], 1,
     "no effect with optimizer_cpu_offload: true"),
    ([f"{O}={{optimizer_cpu_offload: true}}"], 1, "it needs use_precision_aware_optimizer: true"),
    ([f"{O}={{use_precision_aware_optimizer: true, optimizer_cpu_offload: true, decoupled_weight_decay: false}}"], 1,
     "it needs decoupled_weight_decay: true"),
    ([f"{O}={{use_precision_aware_optimizer: true, optimizer_cpu_offload: true, optimizer_offload_fraction: 0.0}}"], 1,
     "above 0 and at most 1"),
    ([f"{O}={{use_precision_aware_optimizer: true, optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5, "
      "overlap_cpu_optimizer_d2h_h2d: true}", f"{D}={{grad_reduce_in_fp32: false}}"], 1, "in another CUDA stream"),
    ([f"{O}={{overlap_cpu_optimizer_d2h_h2d: true}}"], 1, "no effect without optimizer_cpu_offload: true"),
    ([f"{O}={{pin_cpu_grads: false}}"], 1, "no effect without optimizer_cpu_offload: true"),
    ([f"{T}={{apply_rope_fusion: true}}", "run.device=cpu"], 1, "it needs TransformerEngine"),
    ([f"{T}={{apply_rope_fusion: true}}"], 1, "the model's rope_scaling (yarn, longrope) has one"),
    ([f"{T}={{moe_permute_fusion: true}}"], 1, "because the model has no experts"),
    ([f"{T}={{attention_backend: local}}"], 1, "mrl uses its own attention or TransformerEngine's"),
    ([f"{T}={{moe_router_fusion: true}}", "actor.router_replay=rollout",
      "rollout.enable_rollout_routing_replay=true"], 1, "actor.router_replay must be none"),
    ([f"{T}={{cpu_offloading_num_layers: 1}}"], 1, "no effect without cpu_offloading: true"),
    ([f"{T}={{cpu_offloading: true}}", f"{PP}=2"], 2, "does not offload activations in a pipeline"),
    ([f"{T}={{cpu_offloading: true}}", "actor.recompute=full"], 1, "set actor.recompute to none"),
    ([f"{T}={{offload_modules: [core_attn]}}"], 1, "no effect without fine_grained_activation_offloading"),
    ([f"{T}={{fine_grained_activation_offloading: true}}"], 1, "it needs offload_modules"),
    ([f"{T}={FULL}", "actor.recompute=selective"], 1, "actor.recompute sets the recomputation already"),
    ([f"{T}={{recompute_modules: [mlp]}}"], 1, "no effect without recompute_granularity"),
    ([f"{T}={{recompute_granularity: full}}"], 1, "full needs recompute_method (uniform or block) and"),
    ([f"{T}={{recompute_granularity: full, recompute_method: block}}"], 1, "and recompute_num_layers"),
    ([f"{T}={{recompute_granularity: selective, recompute_num_layers: 1}}"], 1, "and no recompute_num_layers"),
    ([f"{T}={{recompute_granularity: selective, recompute_modules: [mpl]}}"], 1, "takes some of core_attn, layernorm"),
    ([f"{T}={{moe_shared_expert_overlap: true}}"], 1, "the model has no shared expert"),
    ([f"{T}={{moe_shared_expert_overlap: true}}", "actor.moe_token_dispatcher_type=allgather"], 1,
     "needs actor.moe_token_dispatcher_type=alltoall"),
    ([f"{T}={{moe_shared_expert_overlap: true}}"], 1, "alltoall, and overlap_param_gather: false in megatron.ddp"),
    ([f"{T}={{moe_flex_dispatcher_backend: hybridep}}"], 1, "no effect without actor.moe_token_dispatcher_type=flex"),
    ([f"{T}={{moe_flex_dispatcher_backend: hybridep}}", "actor.moe_token_dispatcher_type=flex", f"{PP}=2",
      "parallel.expert_model_parallel_size=2"], 4, "add moe_hybridep_pad_uneven_dispatch_inputs: true"),
    ([f"{T}={{cp_comm_type: a2a}}"], 1, "no effect without parallel.context_parallel_size above 1"),
    ([f"{T}={{cp_comm_type: all_gather}}", "parallel.context_parallel_size=2"], 2, "supports only p2p and a2a"),
    ([f"{T}={{microbatch_group_size_per_vp_stage: 4}}", f"{PP}=2"], 2, f"no effect without {VPP}"),
    ([f"{T}={{deallocate_pipeline_outputs: false}}"], 1, "no effect without a pipeline"),
    ([f"{D}={{overlap_param_gather: true}}", "actor.overlap_grad_reduce=false"], 1,
     "no effect without actor.overlap_grad_reduce=true"),
    ([f"{D}={{align_param_gather: true}}"], 1, "no effect without overlap_param_gather: true"),
    ([f"{D}={{bucket_size: 1000}}", "run.device=cpu"], 1, "there is one bucket"),
    ([f"{D}={{pad_buckets_for_high_nccl_busbw: true}}", "actor.use_distributed_optimizer=false"], 1,
     "no effect without actor.use_distributed_optimizer=true"),
    ([f"{D}={{reduce_scatter_with_fp32_accumulation: true}}"], 1, "no effect without grad_reduce_in_fp32: false"),
    ([f"{D}={{grad_reduce_in_fp32: false}}", "model.dtype=float32"], 1, "no effect without model.dtype=bfloat16"),
    ([f"{D}={{nccl_ub: true}}", "actor.param_offload=true"], 1, "NCCL registers buffers by address"),
    ([f"{D}={{disable_symmetric_registration: true}}"], 1, "no effect without nccl_ub: true"),
    ([f"{O}={{apply_wd_to_qk_layernorm: true}}"], 1, "has no QK norm"),
    (["actor.moe_token_dispatcher_type=flex", "parallel.expert_model_parallel_size=2", "run.device=cpu"], 2,
     "flex needs GPUs"),
    (["actor.moe_token_dispatcher_type=flex"], 1, "flex needs parallel.expert_model_parallel_size above 1"),
]  # fmt: skip


IS_NEWER = "moe_hybridep_pad_uneven_dispatch_inputs" in fields_of("transformer")  # megatron-core 0.19
NCCL_EP = "NCCL EP is not tested with packed microbatches, which differ in their number of tokens"
EP = ("actor.moe_token_dispatcher_type=flex", "parallel.expert_model_parallel_size=2")
REFUSED_IF_NEWER = IS_NEWER * [
    ([f"{T}={{moe_flex_dispatcher_backend: ncclep}}", *EP], 2, NCCL_EP),
    ([f"{T}={{moe_hybridep_pad_uneven_dispatch_inputs: true}}", *EP], 2, "moe_flex_dispatcher_backend: hybridep"),
    ([f"{T}={{mlp_chunks_for_training: 0}}"], 1, "at least 1"),
    ([f"{T}={{mlp_chunks_for_training: 2}}", "actor.moe_router_dtype=fp64"], 1, "the router of an MoE model"),
    ([f"{D}={{num_buckets: 4}}", "actor.overlap_grad_reduce=false"], 1, "actor.overlap_grad_reduce=true"),
    ([f"{D}={{num_buckets: 4, bucket_size: 1000}}", "actor.overlap_grad_reduce=true"], 1, "bucket_size is set as well"),
    ([f"{O}={{grad_norm_skip_threshold: 0.0}}"], 1, "expected a gradient norm above 0"),
]  # fmt: skip
ALLOWED_IF_NEWER = IS_NEWER * [
    ([f"{T}={{moe_flex_dispatcher_backend: hybridep, moe_hybridep_pad_uneven_dispatch_inputs: true}}", f"{PP}=2",
      *EP], 4),
    ([f"{T}={{mlp_chunks_for_training: 2}}"], 1),
    ([f"{D}={{num_buckets: 4}}", "actor.overlap_grad_reduce=true"], 1),
    ([f"{O}={{grad_norm_skip_threshold: 10.0}}"], 1),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), REFUSED_IF_NEWER)
def test_a_refusal_of_a_newer_megatrons_field_says_why(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size, arch_of(overrides, said))


@pytest.mark.parametrize(("overrides", "world_size"), ALLOWED_IF_NEWER)
def test_what_a_newer_megatron_may_be_given_is(overrides, world_size):
    check(make(*overrides), arch_of(overrides), world_size=world_size, tokenizer_vocab_size=12)


@pytest.mark.parametrize(("overrides", "world_size", "said"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_a_refusal_says_why(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size, arch_of(overrides, said))


ALLOWED = [
    ([f"{T}={{attention_backend: flash, bias_activation_fusion: true}}"], 1),
    ([f"{T}={{add_bias_linear: false, hidden_dropout: 0.0, normalization: RMSNorm, fp8: null}}"], 1),
    ([f"{T}={{moe_permute_fusion: true, moe_router_fusion: true, gradient_accumulation_fusion: true}}"], 1),
    ([f"{T}={FULL}"], 1),
    ([f"{T}={{fp8: hybrid, fp8_recipe: tensorwise, first_last_layers_bf16: true, num_layers_at_start_in_bf16: 0}}"], 1),
    ([f"{T}={{fp8: e4m3, fp8_recipe: blockwise}}", "actor.moe_router_dtype=fp64"], 1),
    ([f"{T}={{fp8: e4m3, fp8_recipe: mxfp8}}", "run.device=cpu", "model.dtype=float32"], 1),
    ([f"{T}={{recompute_granularity: selective, recompute_modules: [layernorm, mlp]}}"], 1),
    ([f"{T}={{cpu_offloading: true, cpu_offloading_num_layers: 1}}"], 1),
    ([f"{T}={{fine_grained_activation_offloading: true, offload_modules: [core_attn]}}"], 1),
    ([f"{T}={{cp_comm_type: a2a}}", "parallel.context_parallel_size=2"], 2),
    ([f"{T}={{microbatch_group_size_per_vp_stage: 4}}", f"{PP}=2", f"{VPP}=2"], 2),
    ([f"{D}={{overlap_param_gather: true, bucket_size: 1000, pad_buckets_for_high_nccl_busbw: true}}",
      "actor.overlap_grad_reduce=true"], 2),
    ([f"{D}={{overlap_param_gather: true, align_param_gather: true}}", "actor.overlap_grad_reduce=true",
      f"{PP}=2", f"{VPP}=2"], 4),
    ([f"{D}={{grad_reduce_in_fp32: false, reduce_scatter_with_fp32_accumulation: true}}"], 2),
    ([f"{D}={{nccl_ub: true, disable_symmetric_registration: true}}"], 1),
    ([f"{O}={{decoupled_weight_decay: false}}"], 1),
    ([f"{O}={{use_precision_aware_optimizer: true, exp_avg_dtype: bf16, exp_avg_sq_dtype: fp16, "
      "main_grads_dtype: bf16}", f"{D}={{grad_reduce_in_fp32: false}}"], 2),
    ([f"{O}={{use_precision_aware_optimizer: true, optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5, "
      "overlap_cpu_optimizer_d2h_h2d: true, pin_cpu_grads: false, exp_avg_dtype: fp32}",
      "actor.optimizer_offload=true"], 2),
    (["actor.moe_token_dispatcher_type=flex", "parallel.expert_model_parallel_size=2",
      f"{T}={{moe_flex_dispatcher_backend: hybridep, moe_hybridep_num_sms: 24}}"], 2),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size"), ALLOWED, ids=[row[0][0][:60] for row in ALLOWED])
def test_what_may_be_passed_on_is(overrides, world_size):
    check(make(*overrides), arch_of(overrides), world_size=world_size, tokenizer_vocab_size=12)


def test_a_norm_on_queries_and_keys_may_be_decayed():
    check(make(f"{O}={{apply_wd_to_qk_layernorm: true}}"), NORMED, world_size=1, tokenizer_vocab_size=12)


def test_every_reason_of_a_rule_is_given_somewhere_above():
    told = " ".join(refusal(make(*row[0]), row[1], arch_of(row[0], row[2])) for row in (*REFUSED, *REFUSED_IF_NEWER))
    fields = {rule: name for rows in RULE_CHECKED.values() for names, rule in rows.items() for name in names.split()}
    known = {name for section in CLASSES for name in fields_of(section)}
    rules = {rule: needs for rule, needs in RULES.items() if fields[rule] in known}
    assert {why for needs in rules.values() for _, why in needs if why not in told} <= (
        set() if IS_NEWER else {NCCL_EP}
    )


def test_unchecked_lets_through_with_a_warning_what_does_not_follow_from_other_keys():
    config = make(f"{T}={{softmax_scale: 0.5, fp8: hybrid}}", "megatron.unchecked=true")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12)
    told = forced(config, ARCH, build_parallel_layout(config, 1))
    assert [one.split()[0] for one in told] == [f"{T}.softmax_scale", f"{T}.fp8"]
    assert forced(make(), ARCH, build_parallel_layout(config, 1)) == []
    still = refusal(make(f"{T}={{softmax_scale: 0.5, num_layers: 2}}", "megatron.unchecked=true"))
    assert "num_layers is refused" in still and "softmax_scale" not in still
    assert "softmax_scale is refused" in refusal(make(f"{T}={{softmax_scale: 0.5}}"))


def test_changes_are_those_from_mrls_own_values():
    config = make(f"{T}={{add_bias_linear: false, bias_dropout_fusion: true}}", f"{D}={{grad_reduce_in_fp32: false}}")
    assert list(changes(config.megatron)) == [
        ("transformer", "bias_dropout_fusion", False, True),
        ("ddp", "grad_reduce_in_fp32", True, False),
    ]


@pytest.mark.parametrize(
    ("backend", "variables", "said"),
    [
        ("auto", {"NVTE_FUSED_ATTN": "0"}, "has NVTE_FUSED_ATTN=0.*they mean flash or unfused"),
        ("auto", {"NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}, "they mean fused"),
        ("flash", {"NVTE_FUSED_ATTN": "1"}, "attention_backend=flash. Unset NVTE_FUSED_ATTN,"),
        ("auto", {"NVTE_FLASH_ATTN": "yes"}, "auto, flash, fused or unfused[.]"),
    ],
)
def test_switches_of_attention_that_contradict_the_config_are_refused(backend, variables, said):
    with pytest.raises(UserError, match=said):
        check_switches(make(f"{T}={{attention_backend: {backend}}}"), variables)


def test_switches_of_attention_that_say_what_the_config_says_pass():
    check_switches(make(f"{T}={{attention_backend: flash}}"), {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1"})
    check_switches(make(), {"NVTE_FLASH_ATTN": "1"})
    check_switches(make(), {})


def test_a_run_with_such_switches_is_refused_before_it_begins(tmp_path, monkeypatch, capsys):
    """Also on a CPU: Megatron asserts there too."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert main(["train", str(ROOT / "configs" / "quickstart.yaml"), f"run.output_dir={tmp_path / 'run'}"]) == 2
    assert "Unset NVTE_FUSED_ATTN" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_megatron_sets_the_switches_that_the_table_says():
    """Megatron's own function, which asserts over any other value."""
    found = {}
    for name in BACKENDS:
        with pytest.MonkeyPatch.context() as patched:
            for switch in SWITCHES:
                patched.delenv(switch, raising=False)
            GPTModel._set_attention_backend(
                SimpleNamespace(
                    config=SimpleNamespace(attention_backend=enums.AttnBackend[name], flash_attention_version=None)
                )
            )
            found[name] = "".join(os.environ[switch] for switch in SWITCHES)
            for switch in SWITCHES:
                patched.delenv(switch)
    assert found == BACKENDS


def test_what_transformer_engine_turns_on_yields_to_what_is_given():
    fused = {"apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"}
    assert set(transformer_defaults({}, te=True, moe=False)) == fused
    assert set(transformer_defaults({}, te=True, moe=True)) == fused | {"moe_permute_fusion"}
    assert set(transformer_defaults({}, te=True, moe=False, without={"apply_rope_fusion"})) == fused - {
        "apply_rope_fusion"
    }
    assert transformer_defaults({}, te=False, moe=True) == {}
    given = {"apply_rope_fusion": False, "use_te_activation_func": True}
    assert set(transformer_defaults(given, te=True, moe=False)) == {"gradient_accumulation_fusion"}
    actor, megatron = make().actor, make().megatron
    assert ddp_defaults(actor, megatron, te=True) == {"overlap_param_gather": True}
    assert ddp_defaults(actor, megatron, te=False) == {}
    assert ddp_defaults(make("actor.overlap_grad_reduce=false").actor, megatron, te=True) == {}
    assert ddp_defaults(make("actor.use_distributed_optimizer=false").actor, megatron, te=True) == {}
    assert ddp_defaults(actor, make(f"{D}={{overlap_param_gather: false}}").megatron, te=True) == {}


def test_neither_torch_nor_megatron_is_imported_for_it():
    code = (
        "import sys, json; from mrl.config.megatron_fields.installed import fields_of; "
        "from mrl.trainer.validation import megatron; "
        "n = [len(fields_of(s)) for s in ('transformer', 'ddp', 'optimizer')]; "
        "print(json.dumps([min(n), 'torch' in sys.modules, 'megatron.core' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    smallest, torch, megatron = json.loads(done.stdout)
    assert smallest > 20 and not torch and not megatron


def test_tensor_parallel_key_is_the_one_of_the_config():
    assert TP in refusal(make(f"{T}={{tensor_model_parallel_size: 2}}"))
