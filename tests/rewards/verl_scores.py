"""Writes `verl_scores.json`: scores of verl's own `default_compute_score` for some responses.

    python tests/rewards/verl_scores.py PATH_OF_VERL > tests/rewards/verl_scores.json

It needs verl's source (v0.7 and later have these data sources), of which it imports `verl/utils/reward_score` only.
"""

import json
import sys
import types
from pathlib import Path

MATH = ["lighteval/MATH", "HuggingFaceH4/MATH-500"]
DAPO = ["math_dapo", "math", "aime2024", "aime25"]
CASES = [
    ("openai/gsm8k", "72", text)
    for text in (
        "She has 72.\n#### 72", "#### 72", "####72", "The answer is 72", "#### 1\n#### 72", "#### 72\n#### 1",
        "#### 72.",
        "#### $72", "#### 72.0", "#### -72", "#### 72 apples", "", "\\boxed{72}", "#### 72" + " x" * 200,
    )
] + [
    ("openai/gsm8k", "1234", text) for text in ("#### 1,234", "#### 1234", "#### 1 234")
] + [
    (source, gold, text)
    for source in MATH
    for gold, text in (
        ("\\frac{1}{2}", "so \\boxed{\\frac{1}{2}}"), ("\\frac{1}{2}", "\\boxed{\\frac12}"),
        ("\\frac{1}{2}", "\\boxed{1/2}"),
        ("58", "\\boxed{57} no, \\boxed{58}"), ("58", "58"), ("58", "Answer: 58"), ("58", "\\boxed{58"), ("58", ""),
        ("58", "<think>\\boxed{58}</think> hm"), ("2\\sqrt{3}", "\\boxed{2\\sqrt3}"), ("5", "\\boxed{x=5}"),
        ("3", "\\boxed{3\\text{ cm}}"), ("90^\\circ", "\\boxed{90}"), ("(1,2)", "\\boxed{(1, 2)}"),
    )
] + [
    (source, gold, text)
    for source in DAPO
    for gold, text in (
        ("58", "Answer: 58"), ("58", "answer:58"), ("58", "Answer: $58$"), ("58", "Answer: \\boxed{58}"),
        ("58", "\\boxed{58}"),
        ("58", "Answer: 57\nAnswer: 58"), ("58", "Answer: 58\nAnswer: 57"), ("58", "The answer is 58"), ("58", ""),
        ("58", "Answer: 58" + " x" * 200), ("58", "Answer:\n\n58"), ("58", "Answer: x = 58"), ("1234", "Answer: 1,234"),
        ("-3", "Answer: -3"), ("58", "Answer: none"),
    )
] + [
    (source, {"target": ["Paris", "City of Paris"]}, text)
    for source in ("searchR1_nq", "searchR1_bamboogle")
    for text in (
        "<answer>Paris</answer>", "<answer> the city of paris. </answer>", "<answer>London</answer>", "Paris", "",
        "<answer>London</answer> <answer>Paris</answer>", "<answer>in Paris</answer>",
    )
]  # fmt: skip


def main() -> None:
    """Scores all cases and prints them as JSON."""
    root = Path(sys.argv[1]) / "verl"
    for name, path in (("verl", root), ("verl.utils", root / "utils")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    tools = types.ModuleType("verl.utils.import_utils")
    tools.deprecated = lambda _: lambda function: function
    sys.modules[tools.__name__] = tools
    from verl.utils.reward_score import default_compute_score

    found = []
    stdout, sys.stdout = sys.stdout, sys.stderr  # verl prints some of the samples
    for source, gold, text in CASES:
        score = default_compute_score(source, text, gold)
        found.append([source, gold, text, score["score"] if isinstance(score, dict) else score])
    sys.stdout = stdout
    sys.stdout.write("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")


if __name__ == "__main__":
    main()
