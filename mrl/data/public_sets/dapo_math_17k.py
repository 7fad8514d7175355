"""DAPO-Math-17k (Yu et al., 2025): competition problems with integer answers; held out is AIME 2024.

The rows come from https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k and
https://huggingface.co/datasets/BytedTsinghua-SIA/AIME-2024, in verl's format. The files repeat each problem about
100 and 32 times; `mrl data` keeps one row of each. `rollout.val_kwargs.n` repeats the held-out ones.
"""

from __future__ import annotations

from typing import Any

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, rest_of, user


def recognizes(row: Row) -> bool:
    """Returns False: these rows have a prompt and are read without conversion."""
    return False


def convert(row: Row) -> Row:
    """Returns the prompt (a string becomes a user message), the ground truth and the row's `data_source`."""
    prompt: Any = row.get("prompt")
    if isinstance(prompt, str) and prompt.strip():
        prompt = user(prompt)
    model = row.get("reward_model")
    answer = model.get("ground_truth") if isinstance(model, dict) else row.get("answer", row.get("solution"))
    if not isinstance(prompt, list) or not prompt or answer is None or not str(answer).strip():
        raise UnusableRowError("no prompt, or no ground_truth in column reward_model")
    return {"prompt": prompt, "answer": str(answer).strip(), **rest_of(row, "data_source")}


DATA_SET = PublicSet(
    description="competition problems with integer answers: about 17,000 for training; held out: AIME 2024",
    train=(HubFiles("hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"),),
    val=(HubFiles("hf://datasets/BytedTsinghua-SIA/AIME-2024/data/aime-2024.parquet", "aime_2024"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "math"},
    prompt_length=2048,
    response_length=8192,
    settings={"rollout.val_kwargs": {"n": 32, "do_sample": True, "top_p": 0.7}},
    consumed=("reward_model", "solution"),
)
