"""Search-R1 (Jin et al., 2025): questions of Natural Questions and HotpotQA with accepted short answers.

The rows come from https://huggingface.co/datasets/PeterJinGo/nq_hotpotqa_train, whose prompts describe a search in tags
of its own. The prompts made here leave the way to search to the tools of the run's environment.
"""

from __future__ import annotations

import json
from typing import Any

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError, json_of, rest_of, text_of, user

INSTRUCTION = (
    "Answer the given question. Give the short answer, without explanations, inside <answer> and </answer>, for "
    "example <answer> Beijing </answer>."
)


def recognizes(row: Row) -> bool:
    """Returns whether a row has a question and its accepted answers, as FlashRAG's files do."""
    return isinstance(row.get("question"), str) and "golden_answers" in row


def convert(row: Row) -> Row:
    """Returns the prompt, and the accepted answers as a JSON list that the reward `qa` reads."""
    return {
        "prompt": user(f"{INSTRUCTION} Question: {text_of(row, 'question')}"),
        "answer": json.dumps(_accepted(row), ensure_ascii=False),
        "data_source": row.get("data_source") if isinstance(row.get("data_source"), str) else "search_r1",
        **rest_of(row, "id"),
    }


def _accepted(row: Row) -> list[str]:
    answers: Any = row.get("golden_answers")
    model = row.get("reward_model")
    if answers is None and isinstance(model, dict) and isinstance(model.get("ground_truth"), dict):
        answers = model["ground_truth"].get("target")
    elif answers is not None:
        answers = json_of(row, "golden_answers")
    found = [str(one).strip() for one in answers or () if isinstance(one, (str, int)) and str(one).strip()]
    if not found:
        raise UnusableRowError("no accepted answers in column golden_answers or reward_model")
    return found


DATA_SET = PublicSet(
    description="questions of NQ and HotpotQA with short answers: about 170,000 for training, 51,000 held out",
    train=(HubFiles("hf://datasets/PeterJinGo/nq_hotpotqa_train/train.parquet"),),
    val=(HubFiles("hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "qa"},
    prompt_length=512,
    response_length=1024,
    consumed=("question", "golden_answers", "reward_model"),
)
