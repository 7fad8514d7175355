"""transformers as the judge of a config.json: what its own classes read, and what they compute from it.

    python -m tests.models.judge 300        # so many drawn configs of every family, beyond the suite's fixed ones

Owns the tiny base config of each family and the comparison of the actor with transformers; `values.py` has other values
for every key, `test_config_keys.py` says what must hold.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.errors import UserError
from mrl.models._positions import for_run
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_config, arch_from_folder, families
from mrl.parallel_layout import ParallelLayout
from tests.layouts import groups_of
from tests.megatron.actors import make_batch, make_policy, scores
from tests.models.values import THETA, VALUES
from tests.ranks import run_ranks

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

PARITY = 1e-4
"""Bound on log-probabilities in fp32; measured below 1e-5."""
SAME = 1e-5
"""One model of transformers, computed by another of its attention kernels."""
SPREAD = dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), 0.15)
"""Size of the random weights of families that amplify roundings, with norms of 1 + weight; of the others 0.3."""
LARGEST = 100
"""Log-probability from which on the bound grows with it, as fp32's steps do."""
LONGEST = 24

NEW_SPELLING = "rope_parameters" in transformers.LlamaConfig().to_dict()
"""Whether the installed transformers reads `rope_parameters`; older ones read `rope_theta` and `rope_scaling` alone."""
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}} if NEW_SPELLING else {"rope_theta": THETA}
_ROPE_OF_EACH_KIND = (
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        }
    }
    if NEW_SPELLING
    else {"rope_theta": THETA, "rope_local_base_freq": 20.0}
)
_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "pad_token_id": None,
    **_ROPE,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "attention_bias": False,
}
_WINDOW = {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
_LINEAR = {
    "head_dim": 16,
    "attention_bias": False,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "attention_bias": False, "mlp_bias": False},
    "qwen2": {**_SIZES, **_WINDOW},
    "qwen3": {**_SIZES, **_WINDOW, "head_dim": 16, "attention_bias": False},
    "phi3": {**_SIZES, "sliding_window": None, "original_max_position_embeddings": 16},
    "glm4_moe": {
        **_SIZES,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": False,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "gemma3_text": {
        **{key: value for key, value in _SIZES.items() if key not in ("hidden_act", *_ROPE)},
        **_ROPE_OF_EACH_KIND,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        **_SIZES,
        "head_dim": 16,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {
        **_SIZES,
        **_LATENT,
        "q_lora_rank": None,
        "mlp_bias": False,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **_SIZES,
        **_LATENT,
        "rope_interleave": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "qwen3_next": {**_SIZES, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**_SIZES, **_LINEAR},
    "qwen3_5_moe_text": {
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
        **_LINEAR,
        **{key: value for key, value in _EXPERTS.items() if key != "norm_topk_prob"},
        "shared_expert_intermediate_size": 24,
    },
    "mistral": {**_SIZES, "sliding_window": None},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**_SIZES, **_WINDOW, **_EXPERTS, "shared_expert_intermediate_size": 24, "qkv_bias": True},
    "qwen3_moe": {**_SIZES, **_WINDOW, **_EXPERTS, "head_dim": 16, "attention_bias": False},
}
"""Valid for transformers and mrl; with every key that the family is known for."""

LEGACY = (
    "rope_theta",
    "rope_scaling",
    "torch_dtype",
    "num_labels",
    "output_attentions",
    "attn_implementation",
    "experts_implementation",
    "name_or_path",
    "per_layer_config",
    "configuration_files",
)
"""Keys that transformers takes out of config.json before its classes see them, so that no trace shows them."""


def config_class(family: str) -> type[PretrainedConfig]:
    return type(transformers.AutoConfig.for_model(family))


def declared(family: str) -> set[str]:
    """The keys that transformers' config class has, its bases' too."""
    names = {key for key in config_class(family)().to_dict() if not key.startswith("_")}
    return names | set(config_class(family).attribute_map)


def looked_up(family: str) -> set[str]:
    """The attributes that transformers asks a config for while it loads and runs a model, fields or not."""
    asked: set[str] = set()
    plain = PretrainedConfig.__getattribute__

    def ask(self: PretrainedConfig, name: str) -> Any:
        asked.add(name)
        return plain(self, name)

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), base(family), model_of(base(family)))
        PretrainedConfig.__getattribute__ = ask  # type: ignore[method-assign]
        try:
            transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.arange(8)[None])
        finally:
            PretrainedConfig.__getattribute__ = plain  # type: ignore[method-assign]
    fields = declared(family)
    own = {
        name for name in asked if name.startswith("_") or (hasattr(config_class(family), name) and name not in fields)
    }
    return asked - own


def keys_of(family: str) -> set[str]:
    """Every key that transformers may read from a config.json of the family."""
    return (declared(family) | looked_up(family) | set(LEGACY)) - {"model_type"}


def base(family: str) -> dict[str, Any]:
    return {"model_type": family, **copy.deepcopy(BASES[family])}


def changes(family: str, scalings: slice = slice(None)) -> list[dict[str, Any]]:
    """Every key alone: each of its other values, and left out of the file; rotary settings in both spellings and mixed.

    Args:
        family: Of the configs.
        scalings: Which values of `rope_parameters` and `rope_scaling` to try.
    """
    start = base(family)
    found = []
    for key in sorted(keys_of(family)):
        values = VALUES[key][scalings] if key in ("rope_parameters", "rope_scaling") else VALUES[key]
        found += [{**start, key: copy.deepcopy(value)} for value in values]
        if key in start:
            found.append({name: value for name, value in start.items() if name != key})
    old = {**start, "rope_theta": THETA}
    old.pop("rope_parameters", None)
    found.append(old)
    for value in VALUES["rope_scaling"][scalings]:
        found.append({**old, "rope_scaling": copy.deepcopy(value)})
    found.append({**start, "rope_scaling": {"rope_type": "default", "rope_theta": THETA}, "rope_theta": THETA})
    return found


def drawn(family: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Several keys at once."""
    generator = random.Random(f"{family} {seed}")
    keys = sorted((declared(family) | {"rope_theta", "rope_scaling", "head_dim", "sliding_window"}) & set(VALUES))
    found = []
    for _ in range(count):
        config = base(family)
        for key in generator.sample(keys, generator.randint(2, 6)):
            if key in config and generator.random() < 0.2:
                del config[key]
            else:
                config[key] = copy.deepcopy(generator.choice(VALUES[key]))
        found.append(config)
    return found


def model_of(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """A model of transformers as it reads the config; its weights are random, norms and biases too, or the given."""
    settings = config_class(config["model_type"]).from_dict(copy.deepcopy(dict(config)))
    settings.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(settings)
    if tensors is not None:
        model.load_state_dict(tensors)
        return model.eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = SPREAD.get(config["model_type"], 0.3) * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if "norm" in name else noise)
    return model.eval()


def write(folder: Path, config: Mapping[str, Any], model: Any) -> None:
    """A model folder: the weights as transformers saves them, and the config as it stands."""
    plain = config_class(config["model_type"])()
    for key in plain.to_dict().keys() & families()[config["model_type"]].keys.without_effect.keys():
        setattr(model.config, key, getattr(plain, key))  # transformers 4 saves no inconsistent settings of `generate`
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


BATCH = make_batch(2, seed=5, vocab=97, longest=LONGEST)


@torch.no_grad()
def by_transformers(model: Any) -> torch.Tensor:
    """Log-probabilities [R] of `BATCH`."""
    parts = []
    lens = BATCH.seq_lens_B.tolist()
    for tokens, prompt_len in zip(BATCH.tokens_P.split(lens), BATCH.prompt_lens_B.tolist(), strict=True):
        answer = model(tokens[None])
        logits = answer[0] if isinstance(answer, tuple) else answer.logits
        logprobs = logits[0].double().log_softmax(-1)[prompt_len - 1 : -1]
        parts.append(logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1))
    return torch.cat(parts).float()


def by_megatron(folders: list[str]) -> list[torch.Tensor]:
    found, groups = [], groups_of(ParallelLayout(1))
    for folder in folders:
        arch = for_run(arch_from_folder(folder), LONGEST)
        policy = make_policy(
            arch,
            ParallelLayout(1),
            seed=None,
            groups=groups,
            actor={"max_tokens_per_microbatch": 400, "logprob_chunk_tokens": 64},
        )
        load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
        found.append(scores(policy, BATCH)[0])
    return found


@dataclasses.dataclass
class Verdict:
    """What `judge` found.

    Attributes:
        wrong: What mrl computes otherwise than transformers.
        refused: Configs that mrl refuses.
        without_effect: Configs that are the same model as another one, for both.
        models: Different models that both computed.
        impossible: mrl builds a model and transformers none.
    """

    wrong: list[str] = dataclasses.field(default_factory=list)
    refused: int = 0
    without_effect: int = 0
    models: int = 0
    impossible: int = 0


def judge(family: str, configs: list[dict[str, Any]], root: Path) -> Verdict:
    """Compares mrl with transformers on every config.

    Configs that are one model for mrl must be one for transformers; of each such model one goes through Megatron.
    """
    start, verdict = base(family), Verdict()
    known: dict[ArchSpec, tuple[dict[str, torch.Tensor], torch.Tensor]] = {}
    changed: dict[str, dict[str, Any]] = {}
    for index, config in enumerate([start, *configs]):
        change = {key: config.get(key, "left out") for key in (start | config) if _differ(start, config, key)}
        try:
            arch = arch_from_config(copy.deepcopy(config))
        except UserError:
            verdict.refused += 1
            continue
        tensors, expected = known.get(arch, (None, None))
        try:
            model = model_of(config, tensors)
            logprobs = by_transformers(model)
        except Exception:  # noqa: BLE001 -- transformers raises many kinds for what it does not build
            verdict.impossible += 1
            continue
        if expected is None:
            verdict.models += 1
            known[arch] = model.state_dict(), logprobs
            write(root / str(index), config, model)
            changed[str(root / str(index))] = change
        else:
            verdict.without_effect += 1
            gap = float((logprobs - expected).abs().max())
            if not gap <= SAME:
                verdict.wrong.append(f"{family} {change}: without effect on mrl; transformers differs by {gap:.2g}")
    found = run_ranks(1, by_megatron, list(changed))[0]
    for change, ours, (_, theirs) in zip(changed.values(), found, known.values(), strict=True):
        gap = float((ours - theirs).abs().max())
        if not gap <= PARITY * max(1.0, float(theirs.abs().max()) / LARGEST):
            verdict.wrong.append(f"{family} {change}: {gap:.2g} from transformers")
    return verdict


def _differ(first: Mapping[str, Any], second: Mapping[str, Any], key: str) -> bool:
    return (key in first) != (key in second) or first.get(key) != second.get(key)


def main() -> None:
    """Draws as many configs of each family as the first argument says."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 and sys.argv[2].isdigit() else 0
    for family in BASES:
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(family, drawn(family, count, seed), Path(folder))
        print(json.dumps({"family": family, **vars(verdict)}, indent=1), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
