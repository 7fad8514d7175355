"""Gated delta nets on the actor: log-probabilities and gradients are transformers', also with shared prefixes."""

from functools import cache

import pytest
import torch
import transformers

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.data.shared_prefix import each_token, shared_prefixes
from mrl.megatron import linear_attention_plan
from mrl.megatron.linear_attention_plan import plan_linear_attention
from mrl.models.hf_config import arch_from_folder
from mrl.models.kernels.delta_rule import Scan, delta_rule, delta_step
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf_names import locate_tensors
from tests.megatron.actors import (
    CONSTANT,
    VOCAB,
    full_gradients,
    make_batch,
    make_critic,
    make_policy,
    own_part,
    scores,
)
from tests.megatron.autoregressive import scores_and_gradients
from tests.megatron.lora_ranks import KeepsFloat64
from tests.ranks import run_ranks

PARITY = {"float32": 1e-5, "float64": 1e-7}  # angles are float32
GRADIENT = 1e-6  # of the largest gradient of a tensor
LONGEST = 100  # beyond a chunk of 64 tokens
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "pad_token_id": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "experts_implementation": "eager",
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
FAMILIES = {
    "qwen3_next": {**EXPERTS, "mlp_only_layers": [2], "linear_conv_kernel_dim": 3},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**EXPERTS, "num_key_value_heads": 1},
}
LAYOUTS = {
    "single": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp=2),
    "pp2": ParallelLayout(2, pp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
    "tp2_ep2": ParallelLayout(2, tp=2, ep=2, etp=1),
}


def batch_of():
    """Sequences of two prompts each; groups share their prompt."""
    batch = make_batch(6, seed=2, longest=LONGEST)
    assert batch.seq_lens_B.max() > 64
    return batch


@cache
def model_of(family, root):
    """Folder, and log-probabilities and gradients by transformers in float64."""
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith(("bias", "A_log")):
                value.add_(torch.randn(value.shape) * 0.3)
    folder = root / family
    model.save_pretrained(folder)
    with KeepsFloat64():
        logprobs_R, _, gradients = scores_and_gradients(model.double(), batch_of())
    return str(folder), logprobs_R, gradients


def by_megatron(folder, layout, dtype, *, shared, recompute="none"):
    arch = arch_from_folder(folder)
    actor = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 400}
    actor |= {"use_prefix_grouper": shared, "recompute": recompute}
    megatron = {}
    if dtype == "float64":
        actor |= {"moe_router_dtype": "fp64"} if arch.moe else {}
        megatron = {"ddp": {"grad_reduce_in_fp32": False}, "optimizer": {"clip_grad": 0.0}}
    policy = make_policy(arch, LAYOUTS[layout], seed=None, actor=actor, megatron=megatron, dtype=dtype)
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    policy.start_optimizer(CONSTANT)
    with KeepsFloat64():
        logprobs = scores(policy, batch_of())[0]
        policy.update(own_part(batch_of(), policy), build(AlgorithmConfig(name="sft"), RolloutConfig()))
    return logprobs, full_gradients(policy)


CASES = [(family, "single", shared) for family in FAMILIES for shared in (False, True)]
CASES += [("qwen3_5_text", "tp2_pp2", True), ("qwen3_5_text", "tp2", False), ("qwen3_next", "tp2_ep2", True)]
CASES += [("qwen3_next", "pp2", True), ("qwen3_5_moe_text", "tp2_ep2", True)]


@pytest.mark.parametrize(("family", "layout", "shared"), CASES)
def test_log_probabilities_and_gradients_are_those_of_transformers(family, layout, shared, tmp_path_factory):
    folder, expected, gradients = model_of(family, tmp_path_factory.getbasetemp())
    names = locate_tensors(arch_from_folder(folder), {key: tuple(each.shape) for key, each in gradients.items()})
    ranks = run_ranks(LAYOUTS[layout].world_size, by_megatron, folder, layout, "float64", shared=shared)
    for logprobs, found in ranks:
        torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=PARITY["float64"])
        for key, gradient in found.items():
            theirs = names[key].view_in(gradients[names[key].stored])
            largest = float(theirs.abs().max())
            torch.testing.assert_close(
                gradient, theirs, rtol=0, atol=GRADIENT * largest, msg=lambda m, key=key: f"{key}: {m}"
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_has_the_log_probabilities_of_transformers_in_float64(family, tmp_path_factory):
    folder, expected, _ = model_of(family, tmp_path_factory.getbasetemp())
    logprobs, _ = run_ranks(1, by_megatron, folder, "single", "float32", shared=True)[0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=PARITY["float32"])


def values_by_megatron(folder, layout):
    critic = make_critic(arch_from_folder(folder), LAYOUTS[layout], seed=None)
    load_from_hf(folder, critic.chunks[0].arch, critic.layout(), critic.named_tensors())
    return critic.values(batch_of())


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_values_of_a_critic_are_those_of_transformers(layout, tmp_path):
    torch.manual_seed(6)
    config = transformers.AutoConfig.for_model("qwen3_5_text", **{**SIZES, **FAMILIES["qwen3_5_text"]})
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    batch, expected = batch_of(), []
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    with torch.no_grad():
        for tokens, prompt_len in zip(sequences, batch.prompt_lens_B.tolist(), strict=True):
            states = model.model(tokens[None]).last_hidden_state[0, prompt_len - 1 : -1]
            expected.append(model.score(states).squeeze(1))
    for values_R in run_ranks(LAYOUTS[layout].world_size, values_by_megatron, str(tmp_path), layout):
        torch.testing.assert_close(values_R, torch.cat(expected), rtol=0, atol=PARITY["float32"])


def test_recomputed_layers_have_the_same_gradients(tmp_path_factory):
    folder, _, _ = model_of("qwen3_5_text", tmp_path_factory.getbasetemp())
    kept, *others = (
        run_ranks(1, by_megatron, folder, "single", "float32", shared=True, recompute=recompute)[0]
        for recompute in ("none", "selective", "full")
    )
    for logprobs, gradients in others:
        assert torch.equal(kept[0], logprobs)
        for key, gradient in kept[1].items():
            assert torch.equal(gradient, gradients[key]), key


def scan_of(size, length, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(size, length, 3, dim, generator=generator).double() for dim in (4, 4, 5))
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = (torch.randn(size, length, 3, generator=generator).double() for _ in range(2))
    return Scan(query, key, value, -decay.exp(), beta.sigmoid())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_chunks_give_the_outputs_and_state_of_single_steps(length):
    scan = scan_of(2, length)
    state = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)).double()
    found, last = delta_rule(scan, state)
    for index in range(length):
        output, state = delta_step(Scan(*(part[:, index] for part in scan)), state)
        torch.testing.assert_close(found[:, index], output, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-12)


def test_tokens_of_zeros_leave_the_state_as_it_is():
    scan = Scan(*(torch.nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, 7)) for part in scan_of(2, 30)))
    whole, state = delta_rule(scan, None)
    expected, last = delta_rule(scan_of(2, 30), None)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole[:, :30], expected, rtol=0, atol=1e-12)


SEQUENCES = {
    "alone": [[1, 2, 3], [4], [5, 6]],
    "one prompt": [[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7, 8]],
    "branches of branches": [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 7], [8], [1, 2, 3, 5, 9]],
    "a prefix and a copy": [[1, 2], [1, 2, 3], [1, 2]],
}


@pytest.mark.parametrize("small", [0, 1024])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_each_row_continues_the_state_and_the_convolution_of_the_token_before_it(sequences, shares, small, monkeypatch):
    """A fold over the plan's nodes gives each row the tokens up to it; the convolution reads the last of them."""
    monkeypatch.setattr(linear_attention_plan, "SMALL_GROUP_TOKENS", small)
    lens, tokens_P = [len(each) for each in sequences], torch.tensor([token for each in sequences for token in each])
    prefixes = shared_prefixes(tokens_P, lens) if shares else each_token(tokens_P.numel())
    plan = plan_linear_attention(lens, prefixes, 3, torch.device("cpu"))
    count = prefixes.origin_D.numel()
    token_D = [*tokens_P[prefixes.origin_D].tolist(), None]
    outputs, last = [], []
    for level in plan.levels:
        before, last = last, []
        for group in level:
            slots = group.rows.row_S.view(group.size, -1).tolist()
            for node, rows in enumerate(slots):
                state = () if group.states is None else before[int(group.states.row_S[node])]
                for row in rows:
                    state += () if row == count else (token_D[row],)
                    outputs.append(state)
                last.append(state)
    found_D = [outputs[slot] for slot in plan.slots.row_S.tolist()]
    taps_D = plan.taps.row_S.view(count, 3).tolist()
    ends = torch.tensor(lens).cumsum(0).tolist()
    for end, sequence in zip(ends, sequences, strict=True):
        for index in range(len(sequence)):
            row = int(prefixes.distinct_P[end - len(sequence) + index])
            assert found_D[row] == tuple(sequence[: index + 1])
            assert [token_D[tap] for tap in taps_D[row]] == ([None, None, *sequence[: index + 1]])[-3:]
