"""Rollouts over a character tokenizer, for scoring."""

from mrl.config.config import DataConfig, ModelConfig, RewardConfig, RewardFunctionConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.rewards.scorer import Scorer
from mrl.types import Prompt, Rollout

END = "\x03"
TOKENIZER = load_tokenizer(ModelConfig(tokenizer=f"char:{''.join(map(chr, range(32, 127)))}\n{END}"), DataConfig())


def rollout(response, *, uid=0, sample_index=0, answer="3", finish_reason="stop", extra=None):
    ids = TOKENIZER.encode(response)
    prompt = Prompt(uid, (1,), "<1+2>", answer, extra or {}, f"train.jsonl:{uid + 1}")
    return Rollout(prompt, sample_index, ids, [0.0] * len(ids), finish_reason, 0)


def scorer(*functions, **options):
    """A scorer of functions given as a name, or as (name, weight, kwargs)."""
    configs = [
        RewardFunctionConfig(item) if isinstance(item, str) else RewardFunctionConfig(*item) for item in functions
    ]
    return Scorer(RewardConfig(functions=configs, **options), TOKENIZER.decode, TOKENIZER.eos_ids)
