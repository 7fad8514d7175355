"""GRPO's first optimizer step against TRL's GRPOTrainer, on the batch that TRL itself sampled, scored and normalised.

TRL generates completions, calls the reward, makes the advantages and the loss; mrl gets the same tokens and rewards,
scores them without padding through its own reading of the logits, and must arrive at the same advantages, loss,
gradients and weights.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms._entropy_control import EntropyControl
from mrl.algorithms.base import build
from mrl.config.config import AlgorithmConfig, EntropyCtrlConfig, RolloutConfig, RolloutCorrectionConfig
from mrl.types import RolloutBatch
from tests.algorithms.ragged import alone, outcomes_of

ADVANTAGE = 1e-5  # TRL standardises rewards in fp32: 1e-7 of an advantage of order 1 is found
LOSS = 5e-6  # absolute, of losses of order 1: both models are float64, TRL's masks and advantages make it fp32 (2e-7)
GRADIENT = 1e-5  # of the gradient's norm, for the same reason (4e-7)
WEIGHT = 1e-2  # of the learning rate: how far Adam may move a weight differently
PROMPTS = ["1+2", "1+2", "1+2", "12+7+3", "12+7+3", "12+7+3"]
GROUP_SIZE, MAX_COMPLETION, LEARNING_RATE, ADAM_EPS = 3, 6, 1e-3, 1e-6
CHARACTERS = "_#0123456789+ab"


@dataclass(frozen=True)
class Pair:
    """The same algorithm in both languages."""

    trl: dict[str, Any]
    mrl: dict[str, Any] = field(default_factory=dict)


def corrected(mode: str, low: float | None, high: float, **section: Any) -> Pair:
    """A correction of what vLLM sampled."""
    bounds = {f"vllm_importance_sampling_clip_{end}": bound for end, bound in (("min", low), ("max", high))}
    correction = RolloutCorrectionConfig(bypass_mode=False, **section)
    return Pair(
        {"loss_type": "dapo", "epsilon_high": 0.28, "vllm_importance_sampling_mode": mode, **bounds},
        {"name": "dapo", "rollout_correction": correction},
    )


PAIRS = {
    "grpo": Pair({"loss_type": "grpo"}, {"name": "grpo"}),
    "grpo with kl": Pair(
        {"loss_type": "grpo", "beta": 0.2}, {"name": "grpo", "kl_in": "loss", "kl_coef": 0.2, "kl_estimator": "k3"}
    ),
    "dapo": Pair(
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.01}, {"name": "dapo", "entropy_coef": 0.01}
    ),
    "dapo with kl": Pair(
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.2}, {"name": "dapo", "kl_in": "loss", "kl_coef": 0.2}
    ),
    "dr_grpo": Pair({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"name": "dr_grpo"}),
    "dr_grpo with kl": Pair(
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.2},
        {"name": "dr_grpo", "kl_in": "loss", "kl_coef": 0.2},
    ),
    "grpo dual clip": Pair({"loss_type": "grpo", "delta": 1.5}, {"name": "grpo", "dual_clip": 1.5}),
    "deviation of the batch": Pair(
        {"loss_type": "grpo", "scale_rewards": "batch"}, {"name": "grpo", "advantage_std_over": "batch"}
    ),
    "gdpo": Pair(
        {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3]},
        {"name": "gdpo"},
    ),
    "dapo with unbiased kl": Pair(
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.2, "use_bias_correction_kl": True},
        {"name": "dapo", "kl_in": "loss", "kl_coef": 0.2, "kl_unbiased": True},
    ),
    "bnpo": Pair({"loss_type": "bnpo"}, {"name": "grpo", "loss_aggregation": "token_mean"}),
    "gspo": Pair(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        {"name": "gspo", "clip_low": 3e-2, "clip_high": 4e-2},
    ),
    "luspo": Pair(
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        {"name": "luspo", "clip_low": 3e-2, "clip_high": 4e-2},
    ),
    "cispo": Pair({"loss_type": "cispo", "epsilon_high": 1.3}, {"name": "cispo", "clip_high": 0.3}),
    "sapo": Pair({"loss_type": "sapo"}, {"name": "sapo"}),
    "vespo": Pair({"loss_type": "vespo"}, {"name": "vespo"}),
    "tokens of high entropy": Pair(
        {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.4},
        {"name": "dapo", "top_entropy_quantile": 0.4},
    ),
    "off-policy mask": Pair(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        {"name": "grpo", "rollout_correction": RolloutCorrectionConfig(off_policy_mask_threshold=0.1)},
    ),
    "token_truncate": corrected("token_truncate", None, 1.1, rollout_is="token", rollout_is_threshold="1.1"),
    "token_mask": corrected("token_mask", 0.9, 1.2, rollout_is="token", rollout_is_threshold="0.9_1.2"),
    "sequence_truncate": corrected("sequence_truncate", None, 1.1, rollout_is="sequence", rollout_is_threshold="1.1"),
    "sequence_mask": corrected("sequence_mask", 0.8, 1.3, rollout_is="sequence", rollout_is_threshold="0.8_1.3"),
}

SOFT = ("sapo", "vespo")
"""Nothing is clipped."""
WITHOUT = {"rollout_correction": RolloutCorrectionConfig(), "top_entropy_quantile": 1.0}
"""Of what would be ignored if the loss were the same."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen2 with random weights; TRL loads its reference from the same folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(CHARACTERS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trl") / "model"
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The model in float64, so that a difference is one of the losses; TRL patches the forward of its own."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", eos_token="#")


def _sampled(pair: Pair, folder: Path, off_policy: float) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """A real trainer, the inputs it made for one step, and the rewards that each function gave."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    rewards: dict[str, Tensor] = {}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        given = [sum(ids) % 7 / 4 for ids in completion_ids]
        rewards["sum"] = torch.tensor(given, dtype=torch.float64)
        return given

    def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
        given = [5.0 - 2 * len(ids) for ids in completion_ids]
        rewards["short"] = torch.tensor(given, dtype=torch.float64)
        return given

    args = GRPOConfig(
        output_dir=str(folder.parent / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(PROMPTS),
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_COMPLETION,
        report_to=[],
        save_strategy="no",
        **{"use_bias_correction_kl": False} | pair.trl,  # TRL otherwise multiplies its KL by the ratio
    )
    trainer = GRPOTrainer(
        model=load(folder),
        reward_funcs=[reward, short][: len(pair.trl.get("reward_weights", [1.0]))],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=_tokenizer(),
    )
    if "vllm_importance_sampling_mode" in pair.trl:
        _as_from_vllm(trainer, load(folder))
    set_seed(11)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS])
    if off_policy > 0:
        drawn = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            tokens, mask = (torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], 1) for k in ("ids", "mask"))
            logprobs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, MAX_COMPLETION)
        if "sampling_per_token_logps" in inputs:  # moved alike, so that the weights stay
            inputs["sampling_per_token_logps"] += logprobs + off_policy * drawn - inputs["old_per_token_logps"]
        inputs["old_per_token_logps"] = logprobs + off_policy * drawn
        if "ref_per_token_logps" in inputs:
            inputs["ref_per_token_logps"] = logprobs - off_policy * drawn.flip(0)
    return trainer, inputs, rewards


def _as_from_vllm(trainer: Any, model: torch.nn.Module) -> None:
    """TRL's own generation, with log-probabilities beside it as vLLM gives them: near the model's."""
    generate = trainer._generate

    def generated(prompts: list[str]) -> tuple[Any, ...]:
        trainer.use_vllm = False
        prompt_ids, completion_ids, *more = generate(prompts)
        trainer.use_vllm = True
        told = []
        for row, (prompt, ids) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            with torch.no_grad():
                logprobs_T, _ = _score(model, torch.tensor(prompt), torch.tensor(ids))
            told.append((logprobs_T - 0.3 * torch.sin(0.5 + row + 2.0 * torch.arange(len(ids)))).tolist())
        return prompt_ids, completion_ids, *more[:2], told, *more[3:]

    trainer._generate = generated


def _score(model: torch.nn.Module, prompt_ids: Tensor, response_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token and the entropies, one unpadded sequence, plain log-softmax."""
    logits_TV = model(torch.cat([prompt_ids, response_ids])[None]).logits[0, prompt_ids.numel() - 1 : -1]
    logprobs_TV = logits_TV.log_softmax(-1)
    return logprobs_TV.gather(1, response_ids[:, None])[:, 0], -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _pack(inputs: dict[str, Any], rewards: Tensor) -> tuple[list[tuple[Tensor, Tensor]], RolloutBatch]:
    """TRL's padded rectangle as unpadded sequences and a ragged batch; on-policy log-probabilities are set later."""
    keep = inputs["completion_mask"].bool()
    prompts = [ids[mask.bool()] for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
    responses = [ids[mask] for ids, mask in zip(inputs["completion_ids"], keep, strict=True)]
    lens_B = torch.tensor([ids.numel() for ids in responses])
    old = inputs.get("old_per_token_logps")
    sampled = inputs.get("sampling_per_token_logps", old)
    ref = inputs.get("ref_per_token_logps")
    batch = RolloutBatch(
        tokens_P=torch.cat([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        prompt_lens_B=torch.tensor([ids.numel() for ids in prompts]),
        response_lens_B=lens_B,
        response_mask_R=torch.ones(int(lens_B.sum()), dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(int(lens_B.sum())) if sampled is None else sampled[keep],
        proximal_logprobs_R=None if old is None else old[keep],
        group_id_B=torch.arange(len(PROMPTS)) // GROUP_SIZE,
        rewards_B=rewards,
        ref_logprobs_R=None if ref is None else ref[keep],
        truncated_B=torch.zeros(len(PROMPTS), dtype=torch.bool),
    )
    return list(zip(prompts, responses, strict=True)), batch


def _adam_step(model: torch.nn.Module) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS, weight_decay=0.0)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about TRL's own arguments
@pytest.mark.parametrize("off_policy", [0.0, 0.4], ids=["first step", "ratios that clip"])
@pytest.mark.parametrize("name", PAIRS)
def test_step_is_the_one_of_trl(name: str, off_policy: float, model_folder: Path) -> None:
    pytest.importorskip("trl")
    pair = PAIRS[name]
    trainer, inputs, rewards = _sampled(pair, model_folder, off_policy)
    model = load(model_folder)
    want = trainer.compute_loss(trainer.model, inputs)
    want.backward()
    want_grads = [parameter.grad for parameter in trainer.model.parameters()]

    eps = {} if name.startswith("dr_grpo") else {"advantage_eps": 1e-4}  # TRL's epsilon
    config = AlgorithmConfig(**{**pair.mrl, **eps})
    algorithm = build(config, RolloutConfig(n=GROUP_SIZE, response_length=MAX_COMPLETION))
    weights = dict(zip(rewards, pair.trl.get("reward_weights", [1.0]), strict=True))
    sequences, batch = _pack(inputs, sum(weights[name] * rewards[name] for name in weights))  # type: ignore[arg-type]
    scored = [_score(model, *sequence) for sequence in sequences]
    logprobs_R, entropy_R = (torch.cat([pair[part] for pair in scored]) for part in (0, 1))
    if off_policy == 0 and not algorithm.needs_proximal:
        batch.rollout_logprobs_R = logprobs_R.detach()
    batch.current_entropy_R = entropy_R.detach()
    outcomes = replace(outcomes_of(batch), parts=rewards, part_weights=weights)
    outcome_B = algorithm.outcome_advantages(outcomes)
    torch.testing.assert_close(outcome_B.float(), inputs["advantages"], rtol=ADVANTAGE, atol=ADVANTAGE)
    algorithm.advantages(batch, outcome_B, alone)
    algorithm.weigh(batch, alone)
    got, metrics = algorithm.loss(logprobs_R, entropy_R, batch)
    if WITHOUT.keys() & pair.mrl.keys() and not (off_policy == 0 and name == "off-policy mask"):
        plain = build(replace(config, **WITHOUT), algorithm.rollout)
        apart, _ = plain.loss(logprobs_R, entropy_R, replace(batch, entropic_R=None))
        assert abs(apart.item() - want.item()) > 100 * LOSS
    got.backward()
    got_grads = [parameter.grad for parameter in model.parameters()]

    assert batch.response_lens_B.unique().numel() > 1  # lengths differ, or the aggregations could not be told apart
    assert inputs["advantages"].abs().max() > 0
    assert (metrics["actor/pg_clipfrac"] > 0) == (off_policy > 0 and name not in SOFT)
    assert got.item() == pytest.approx(want.item(), abs=LOSS)
    norm = torch.stack([grad.norm() for grad in want_grads]).norm()  # type: ignore[union-attr]
    error = torch.stack([(a - b).norm() for a, b in zip(got_grads, want_grads, strict=True)]).norm()  # type: ignore[operator]
    assert norm > 0
    assert error <= GRADIENT * norm
    for got_weight, want_weight in zip(_adam_step(model), _adam_step(trainer.model), strict=True):
        torch.testing.assert_close(got_weight, want_weight, rtol=0, atol=WEIGHT * LEARNING_RATE)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_adaptive_entropy_coefficient_is_the_one_of_trl(model_folder: Path) -> None:
    pytest.importorskip("trl")
    bounds = {"entropy_coef_delta": 0.01, "entropy_coef_min": 0.0, "entropy_coef_max": 0.035}
    given = {"loss_type": "bnpo", "use_adaptive_entropy": True, "entropy_coef": 0.02, **bounds}
    trainer, inputs, _ = _sampled(Pair(given), model_folder, 0.0)
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    keep, head = inputs["completion_mask"].bool(), trainer.model.lm_head.weight
    control = None
    for factor in (1.0, 0.7, 3.0, 1.2, 0.4, 1.0, 1.0):  # the entropy goes up and down
        with torch.no_grad():
            head.mul_(factor)
            tokens, mask = (torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], 1) for k in ("ids", "mask"))
            _, entropies, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, tokens, mask, MAX_COMPLETION, compute_entropy=True
            )
        mean = entropies[keep].mean().item()
        if control is None:
            trainer.args.entropy_target = mean
            made = EntropyCtrlConfig("adaptive", mean, 0.01, 0.0, 0.035)
            control = EntropyControl(AlgorithmConfig(entropy_coef=0.02, entropy_ctrl=made))
        with_bonus = trainer.compute_loss(trainer.model, inputs).item()
        gap = trainer._metrics["train"]["policy_loss"][-1] - with_bonus
        assert control.effective_coef * mean == pytest.approx(gap, abs=1e-6)
        control.update({"actor/entropy": mean})
        assert control.coef == pytest.approx(trainer.entropy_coef)
    assert control is not None and control.coef != 0.02
