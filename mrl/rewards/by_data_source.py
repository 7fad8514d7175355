r"""verl's default reward: the row's `data_source` selects how its answer is found and scored.

The data sources and their scores are those of verl's `default_compute_score`. Where verl compares normalized texts of
formulas, this compares their values, as `math` does. Like verl it reads the entire response, with its reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from mrl.config.boxed import last_boxed
from mrl.rewards._expressions import equal
from mrl.rewards.code import code
from mrl.rewards.math import math, parse_gold
from mrl.rewards.qa import qa

IN_PROCESS = False

CLIP_CHARS = 300
"""Characters at the end of a response that verl reads for GSM8K and for DAPO's data."""
MAX_TESTS = 10
"""Tests of a program that verl runs one by one."""

_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_THOUGHT_AND_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)

Scored = dict[str, float | str]


def by_data_source(*, data_source: str, solution_str: str, ground_truth: Any) -> Scored:
    """Scores a response by the rules of its data source.

    Args:
        data_source: Name of the row's data set.
        solution_str: Response without special tokens.
        ground_truth: Answer: a text, or for code and searches a JSON text or its value.

    Returns:
        "score"; "acc", 1 for a correct answer; "pred", the compared text ("" for none).

    Raises:
        ValueError: verl has no reward for this data source, or the row has no answer.
    """
    score = _rule(data_source)
    if score is None:
        raise ValueError(
            f"verl's default reward has no data source {data_source!r}; it has {', '.join(SOURCES)} and names that "
            "begin with aime. Name the reward of these rows in reward.functions"
        )
    gold = ground_truth if isinstance(ground_truth, str) or ground_truth is None else json.dumps(ground_truth)
    return score(solution_str, gold)


def _rule(data_source: str) -> Callable[[str, str | None], Scored] | None:
    return _dapo if data_source.startswith("aime") else SOURCES.get(data_source)


def _gsm8k(response: str, gold: str | None) -> Scored:
    """Returns 1 if the number after the last #### is written like the answer, without commas."""
    parse_gold(gold)
    found = _HASHES.findall(response[-CLIP_CHARS:])
    pred = found[-1].replace(",", "") if found else ""
    return _scored(pred, right=bool(found) and pred == gold)


def _boxed(response: str, gold: str | None) -> Scored:
    pred = last_boxed(response) or ""
    return _scored(pred, right=_is_equal(pred, gold))


def _dapo(response: str, gold: str | None) -> Scored:
    """Returns 1 if the rest of the last line with "Answer:" equals the answer, else -1."""
    found = _ANSWER.findall(response[-CLIP_CHARS:])
    pred = found[-1].strip() if found else ""
    return _scored(pred, right=_is_equal(pred, gold), wrong=-1.0)


def _geometry(response: str, gold: str | None) -> Scored:
    """Returns 0.9 for an equal answer in a box, and 0.1 for a thought before a box."""
    boxed = _boxed(response, gold)
    has_format = _THOUGHT_AND_BOX.fullmatch(response) is not None
    return {**boxed, "score": 0.9 * float(boxed["acc"]) + 0.1 * has_format}


def _numina(response: str, gold: str | None) -> Scored:
    found = math(prompt="", response=response, answer=gold, extra={})
    return {**found, "acc": found["score"]}


def _code(response: str, gold: str | None) -> Scored:
    found = code(prompt="", response=response, answer=gold, extra={}, partial=True, max_tests=MAX_TESTS)
    return {"score": found["score"], "acc": found["score"]}


def _search(response: str, gold: str | None) -> Scored:
    found = qa(prompt="", response=response, answer=gold, extra={})
    return {"score": found["score"], "acc": found["em"], "pred": found["pred"]}


def _is_equal(pred: str, gold: str | None) -> bool:
    wanted = parse_gold(gold)
    try:
        return equal(wanted, parse_gold(pred))
    except ValueError:  # nothing to compare
        return False


def _scored(pred: str, *, right: bool, wrong: float = 0.0) -> Scored:
    return {"score": 1.0 if right else wrong, "acc": float(right), "pred": pred}


SOURCES: dict[str, Callable[[str, str | None], Scored]] = {
    "openai/gsm8k": _gsm8k,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), _boxed),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), _dapo),
    **{
        f"numina_{name}": _numina
        for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
    },
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _code),
    "hiyouga/geometry3k": _geometry,
    **{
        f"searchR1_{name}": _search
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    },
}
"""Data source -> its rule; names that begin with aime have DAPO's."""

REWARD = by_data_source
