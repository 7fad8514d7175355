"""Hugging Face tokenizer folders, built on the spot."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def byte_bpe_folder(folder: Path, *, chat_template: str | None = CHATML, bos: bool = False, eos: bool = True) -> Path:
    """A byte-level BPE tokenizer as qwen2's (or, with `bos`, one that starts texts as llama's does)."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["what is two plus two? the answer is four."] * 20, trainer)
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>" if eos else None,
        pad_token="<|endoftext|>" if eos else None,
        bos_token="<s>" if bos else None,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(str(folder))
    return folder
