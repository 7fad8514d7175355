"""Folders of reward models, written by transformers: small sequence classifiers with one label."""

import torch
import transformers

from mrl.data.tokenizer import CharTokenizer
from mrl.models.hf_config import family_of
from mrl.models.presets import arch_from_preset

CHARACTERS = "0123456789<>+#"


def write_reward_model(folder, preset="qwen2_tiny", *, characters=CHARACTERS, seed=7, labels=1, **overrides):
    """The model, as transformers has it."""
    arch = arch_from_preset(preset, overrides, len(characters))
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    config.num_labels, config.pad_token_id = labels, None
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is not applied
                weight.copy_(torch.linspace(0.7, 1.3, weight.numel()))
            elif weight.dim() >= 2:
                weight.mul_(3)
    model.save_pretrained(folder)
    if characters:
        CharTokenizer(characters).save(folder)
    return model


def scores_of(model, sequences):
    """What transformers' own pooling gives, one sequence at a time."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in sequences])
