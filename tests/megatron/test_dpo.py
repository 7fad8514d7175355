"""DPO on real ranks: one rank's numbers at every layout and microbatch, and those of transformers in float64."""

import pytest
import torch

from mrl.algorithms.base import build
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.algorithms.functional.logprobs import Distribution
from mrl.config.config import AlgorithmConfig, DpoConfig, RolloutConfig
from mrl.distributed.collectives import all_reduce_sum
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, full_weights, make_batch, make_policy
from tests.models.rope import both_spellings
from tests.ranks import run_ranks

ARCH = ARCHS["qwen2"]
EMBEDDING = "model.embed_tokens.weight"
STILL = LearningRate(0.0, 0.0, "constant", 0, 100)
RELATIVE = 1e-4  # end to end; fp32 sums in another order give 1e-5
ABSOLUTE = 1e-5
LAYOUTS = {
    "dp2": ParallelLayout(2),
    "dp4": ParallelLayout(4),
    "tp2": ParallelLayout(2, tp=2),
    "pp2": ParallelLayout(2, pp=2),
    "pp2_vpp2": ParallelLayout(2, pp=2, vpp=2),
    "cp2": ParallelLayout(2, cp=2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
}
CONFIGS = [
    DpoConfig(beta=0.3),
    DpoConfig("ipo", beta=0.3),
    DpoConfig("sigmoid_norm", beta=2.0, sft_loss_weight=0.2),
]
TEMPERATURE = {"temperature": 0.7}  # of sampling: responses of the data are not seen through it


def pairs():
    """Seven pairs, of which one has two prompts, as a truncation leaves them."""
    batch = make_batch()
    batch.sample_index_B = torch.arange(batch.num_sequences) % 2
    batch.tokens_P[0] = (batch.tokens_P[0] + 1) % 7
    batch.weights_R = batch.metric_weights_R = None
    return batch


def dpo(config):
    return build(AlgorithmConfig(name="dpo", dpo=config), RolloutConfig())


def numbers(grid, budget):
    """Metrics of an update of each config, and the weights: the reference is the actor, moved a little."""
    policy = make_policy(ARCH, grid, actor={"max_tokens_per_microbatch": budget, "clip_grad": 0.0}, rollout=TEMPERATURE)
    policy.start_optimizer(STILL)
    for name, tensor in policy.reference_tensors().items():
        tensor.copy_(policy.named_tensors()[name] * 0.9)
    size, index = policy._groups.grid.dp, policy._groups.coords.dp
    cuts = {1: [7], 2: [2, 5], 4: [3, 0, 1, 3]}[size]
    start = sum(cuts[:index])
    batch = pairs().select(list(range(2 * start, 2 * (start + cuts[index]))))
    with policy.using_reference():
        batch.ref_logprobs_R, _ = policy.score(batch, supervised=True)
    found = {}
    for config in CONFIGS:
        algorithm = dpo(config)
        algorithm.weigh(batch, lambda tensor: all_reduce_sum(tensor.double(), policy._groups.dp))
        found[str(config)] = policy.update(batch, algorithm)
    return found, full_weights(policy)


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, numbers, ParallelLayout(1), 10_000)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_numbers_of_one_rank(layout, single):
    """With a budget below most pairs: each has a microbatch of its own."""
    grid = LAYOUTS[layout]
    for found, _ in run_ranks(grid.world_size, numbers, grid, 12):
        for name, expected in single[0].items():
            assert found[name] == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), name


@pytest.mark.parametrize("budget", [1, 30])
def test_microbatches_change_nothing(budget, single):
    found, _ = run_ranks(1, numbers, ParallelLayout(1), budget)[0]
    for name, expected in single[0].items():
        assert found[name] == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), name


def microbatches(grid, budget):
    policy = make_policy(ARCH, grid, actor={"max_tokens_per_microbatch": budget})
    made = policy._forward_backward.microbatches(pairs(), Distribution(1.0, 16), keep_groups_together=True)
    return [(micro.rows, micro.tokens.numel()) for micro in made]


def test_a_pair_shares_a_microbatch_and_what_it_begins_with():
    made = run_ranks(1, microbatches, ParallelLayout(1), 30)[0]
    assert sorted(row for rows, _ in made for row in rows) == list(range(14))
    assert all({row ^ 1 for row in rows} == set(rows) for rows, _ in made)
    batch = pairs()
    alone = sum(length - 1 for length in batch.seq_lens_B.tolist())
    assert sum(tokens for _, tokens in made) <= alone - sum(batch.prompt_lens_B.tolist()[3::2])


def by_transformers(weights):
    import transformers

    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=ARCH.vocab_size,
            hidden_size=ARCH.hidden_size,
            intermediate_size=ARCH.intermediate_size,
            num_hidden_layers=ARCH.num_layers,
            num_attention_heads=ARCH.num_heads,
            num_key_value_heads=ARCH.num_kv_heads,
            rms_norm_eps=ARCH.rms_norm_eps,
            **both_spellings({"rope_type": "default", "rope_theta": ARCH.rope_theta}),
            tie_word_embeddings=True,
        )
    ).double()
    model.load_state_dict({**weights, "lm_head.weight": weights[EMBEDDING]})
    return model


def sums(model, batch):
    """Log-probability of each response, its masked tokens left out."""
    masks = batch.response_mask_R.split(batch.response_lens_B.tolist())
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    found = []
    for tokens, prompt_len, mask in zip(sequences, batch.prompt_lens_B.tolist(), masks, strict=True):
        logprobs = model(tokens[None]).logits[0, prompt_len - 1 : -1].log_softmax(-1)
        found.append((logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1) * mask).sum())
    return torch.stack(found)


def test_loss_and_gradient_are_those_of_transformers(single):
    """Equation 7 of the paper, written again over a model that is not ours."""
    found, weights = single
    model, reference = by_transformers(weights), by_transformers({name: 0.9 * w for name, w in weights.items()})
    batch = pairs()
    with torch.no_grad():
        reference_B = sums(reference, batch)
    ratio_B = sums(model, batch) - reference_B
    loss = torch.nn.functional.softplus(-CONFIGS[0].beta * (ratio_B[0::2] - ratio_B[1::2])).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    metrics = found[str(CONFIGS[0])]
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=RELATIVE)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=RELATIVE)
