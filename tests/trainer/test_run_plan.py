"""Mistakes that a run is warned of before it starts."""

import json

import pytest

from mrl.config.config import load
from mrl.errors import UserError
from mrl.trainer.run_plan import check_run
from tests.data.folders import byte_bpe_folder

QUESTION = [{"role": "user", "content": "two plus two?"}]
ROWS = {
    "chat": {"prompt": QUESTION, "answer": "four"},
    "text": {"prompt": "two plus two?", "answer": "four"},
    "conversation": {"messages": [*QUESTION, {"role": "assistant", "content": "four"}]},
}


def checked(folder, row, *overrides):
    """What `check_run` finds with a template that ends turns with <|im_end|> and the end token <|endoftext|>."""
    tokenizer = byte_bpe_folder(folder / "base")
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    data = folder / "rows.jsonl"
    data.write_text(json.dumps(ROWS[row]) + "\n")
    config = folder / "config.yaml"
    config.write_text(
        f"run: {{output_dir: {folder / 'run'}}}\n"
        f"model: {{preset: qwen2_tiny, overrides: {{vocab_size: 320}}, tokenizer: {tokenizer}, dtype: float32}}\n"
        f"data: {{train_files: [{data}]}}\n"
        "train: {num_steps: 1, batch_size: 1}\nrollout: {prompt_length: 64, response_length: 64}\n"
        "reward: {functions: [{name: exact_match}]}\n"
    )
    return check_run(load(config, list(overrides)), 1)


@pytest.mark.parametrize(("row", "num_warnings"), [("chat", 1), ("text", 0)])
def test_rollouts_that_can_only_end_by_their_length_are_warned_of(tmp_path, row, num_warnings):
    found = checked(tmp_path, row)
    assert len(found.warnings) == num_warnings
    assert all("'<|im_end|>\\n'" in warning and "'<|endoftext|>' (0)" in warning for warning in found.warnings)


def test_supervised_turns_without_an_end_token_are_refused_before_the_start(tmp_path):
    with pytest.raises(UserError, match="rows.jsonl:1: the chat template .* contains none of the model's end tokens"):
        checked(tmp_path, "conversation", "algorithm.name=sft")
