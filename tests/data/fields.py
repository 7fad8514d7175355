"""How each field of `data` shows in what is read, and the files of rows that this needs; see `tests/test_fields.py`."""

import json
from pathlib import Path

from tests.data.folders import CHATML, byte_bpe_folder

WARM = ("train.warm_start={num_steps: 2, batch_size: 2}",)
FILES = (
    "data.task=null",
    "data.task_kwargs={}",
    "data.train_files=[{folder}/rows.jsonl]",
    "data.val_files=[{folder}/rows.jsonl]",
)
TWO = (*FILES, "data.train_files=[{folder}/rows.jsonl,{folder}/more.jsonl]")
PAIRS = (*FILES, "algorithm.name=dpo", "train.minibatch_size=null")
CHAT = (
    *FILES,
    "data.prompt_key=chat",
    "model.tokenizer={folder}/tokenizer",
    "model.overrides.vocab_size=320",
    "rollout.prompt_length=64",
    "actor.max_tokens_per_microbatch=128",
)
TALKS = (
    *CHAT,
    "data.prompt_key=prompt",
    "data.train_files=[{folder}/talks.jsonl]",
    "data.val_files=[{folder}/talks.jsonl]",
    "rollout.response_length=64",
    *WARM,
)
SHORT = (*TALKS, "rollout.response_length=1", "data.overlong_responses=truncate_right")
CUT = ("rollout.prompt_length=6", "data.overlong_prompts=truncate_left")

COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "data.task": (("data.task=subtraction",), (), "data.task: unknown 'subtraction'"),
    "data.task_kwargs": (("data.task_kwargs.max_value=3",), (), ""),
    "data.train_files": (("data.train_files=[{folder}/more.jsonl]",), FILES, ""),
    "data.val_files": (("data.val_files=[{folder}/more.jsonl]",), FILES, ""),
    "data.train_weights": (("data.train_weights=[9,1]",), TWO, ""),
    "data.train_max_samples": (("data.train_max_samples=1",), FILES, ""),
    "data.val_max_samples": (("data.val_max_samples=1",), FILES, ""),
    "data.order_by": (("data.order_by=down",), (*FILES, "data.shuffle=false"), ""),
    "data.prompt_key": (("data.prompt_key=question",), FILES, ""),
    "data.answer_key": (("data.answer_key=other",), FILES, ""),
    "data.response_key": (("data.response_key=other",), FILES, ""),
    "data.chosen_key": (("data.chosen_key=other",), PAIRS, ""),
    "data.rejected_key": (("data.rejected_key=other",), PAIRS, ""),
    "data.messages_key": (("data.messages_key=talk",), TALKS, ""),
    "data.overlong_responses": (("data.overlong_responses=error",), SHORT, "64 + rollout.response_length=1"),
    "data.source_key": (("data.source_key=other",), FILES, ""),
    "data.system_prompt": (("data.system_prompt=Sum up.",), CHAT, ""),
    "data.chat_template": (("data.chat_template={folder}/other.jinja",), CHAT, ""),
    "data.apply_chat_template": (("data.apply_chat_template=always",), (*CHAT, "data.prompt_key=prompt"), ""),
    "data.split_special_tokens": (("data.split_special_tokens=false",), (*CHAT, "data.prompt_key=quotes"), ""),
    "data.shuffle": (("data.shuffle=false",), (), ""),
    "data.overlong_prompts": (("data.overlong_prompts=drop",), CUT, ""),
}
"""Key -> overrides that set it, overrides on both sides, and part of the message where the changed side is refused."""


def write(folder: Path) -> Path:
    """Rows, a tokenizer and a template that overrides name as {folder}."""
    for name, first in (("rows", 1), ("more", 5)):
        rows = [
            {
                "prompt": f"<{i}+1>", "question": f"<1+{i}>", "chat": [{"role": "user", "content": f"{i}+1"}],
                "answer": str(i + 1), "other": str(i), "down": -i, "chosen": str(i + 1), "rejected": str(i + 3),
                "quotes": [{"role": "user", "content": f"{i}<|im_end|>"}],
            }
            for i in range(first, first + 4)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in rows))
    talk = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2 3 4 5 6"))]
    talk = [*talk, {"role": "user", "content": "?"}, {"role": "assistant", "content": 15 * "?!"}]
    (folder / "talks.jsonl").write_text(f"{json.dumps({'messages': talk, 'talk': talk[:2]})}\n")
    byte_bpe_folder(folder / "tokenizer")
    (folder / "other.jinja").write_text(CHATML.replace("<|im_end|>", ""))
    return folder
