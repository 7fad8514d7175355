"""Raw rows in the exact shape of public data sets: their columns, types and texts' forms, with contents made here."""

import base64
import json
import pickle
import zlib
from typing import Any

Row = dict[str, Any]

DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {0} plus 40?\n\nRemember to put "
    'your answer on its own line after "Answer:".'
)


def gsm8k(number: int) -> Row:
    solution = f"She has {number}+1000=<<{number}+1000={number + 1000}>>{number + 1000} eggs.\n#### {number + 1000:,}"
    return {"question": f"A hen lays {number} eggs. Then 1000 more. How many are there?", "answer": solution}


def math(number: int) -> Row:
    return {
        "problem": f"Find $\\frac{{{number}}}{{7}}$ of $1$.",
        "level": "Level 2",
        "type": "Prealgebra",
        "solution": f"We see $\\boxed{{1}}$ of it first. So it is $\\boxed{{\\frac{{{number}}}{{7}}}}$.",
    }


def math500(number: int) -> Row:
    row = math(number)
    return {
        "problem": row["problem"], "solution": row["solution"], "answer": f"\\frac{{{number}}}{{7}}",
        "subject": "Prealgebra", "level": 2, "unique_id": f"test/prealgebra/{number}.json",
    }  # fmt: skip


def aime(number: int) -> Row:
    return {
        "id": number, "problem": f"Find the remainder of ${number}$ by $1000$.", "solution": "Long.",
        "answer": f"{number:03}", "url": "https://artofproblemsolving.com", "year": "2024",
    }  # fmt: skip


def dapo_math_17k(number: int) -> Row:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_PROMPT.format(number), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(number + 40), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{number}"},
    }


def countdown(number: int) -> Row:
    return {"target": number + 54, "nums": [number, 19, 35]}


def apps(number: int) -> Row:
    tests = {"inputs": [f"{number}\n", "2\n"], "outputs": [f"{number + 1}\n", "3\n"]}
    return {
        "problem_id": number, "question": f"Add one. Example: {number} gives {number + 1}.\n",
        "solutions": json.dumps(["print(int(input()) + 1)"]), "input_output": json.dumps(tests),
        "difficulty": "introductory", "url": "https://codeforces.com/problemset", "starter_code": "",
    }  # fmt: skip


def apps_function(number: int) -> Row:
    tests = {"fn_name": "add_one", "inputs": [[number], [2]], "outputs": [[number + 1], [3]]}
    return apps(number) | {"input_output": json.dumps(tests), "starter_code": "\ndef add_one(x):\n\t"}


def taco(number: int) -> Row:
    row = apps(number)
    return {name: row[name] for name in ("question", "solutions", "starter_code", "input_output", "difficulty")} | {
        "raw_tags": "['math']", "name": None, "source": "codeforces", "tags": "['Mathematics']", "skill_types": "[]",
        "url": "https://codeforces.com/problemset", "Expected Auxiliary Space": None, "time_limit": "2.0 seconds",
        "date": None, "picture_num": None, "memory_limit": "256.0 megabytes", "Expected Time Complexity": None,
    }  # fmt: skip


def compressed(tests: list[Row]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def livecodebench(number: int) -> Row:
    public = [{"input": f"{number}\n", "output": f"{number + 1}\n", "testtype": "stdin"}]
    private = [{"input": "2\n", "output": "3", "testtype": "stdin"}]
    return {
        "question_title": "Add", "question_content": f"Add one to {number}.", "platform": "atcoder",
        "question_id": f"abc{number}", "contest_id": "abc", "contest_date": "2024-08-01T00:00:00", "starter_code": "",
        "difficulty": "easy", "public_test_cases": json.dumps(public), "private_test_cases": compressed(private),
        "metadata": "{}",
    }  # fmt: skip


def livecodebench_function(number: int) -> Row:
    public = [{"input": f"[{number}, 5]\n1", "output": f"[{number + 1}, 6]", "testtype": "functional"}]
    private = [{"input": "[]\n3", "output": "[]", "testtype": "functional"}]
    starter = "class Solution:\n    def addAll(self, nums: List[int], x: int) -> List[int]:\n        "
    return livecodebench(number) | {
        "platform": "leetcode", "starter_code": starter, "metadata": json.dumps({"func_name": "addAll"}),
        "public_test_cases": json.dumps(public), "private_test_cases": compressed(private),
    }  # fmt: skip


def search_r1(number: int) -> Row:
    return {
        "id": f"train_{number}", "question": f"who painted picture {number}?", "golden_answers": [f"Painter {number}"],
        "data_source": "nq", "ability": "fact-reasoning",
        "prompt": [{"content": f"Answer by calling <search> query </search>. Question: {number}?", "role": "user"}],
        "reward_model": {"ground_truth": {"target": [f"Painter {number}"]}, "style": "rule"},
        "extra_info": {"index": number, "split": "train"}, "metadata": None,
    }  # fmt: skip


def geometry3k(number: int) -> Row:
    return {"images": [{"bytes": None, "path": "a.png"}], "problem": f"<image>Find {number}.", "answer": str(number)}


ADD = "```python\nprint(int(input()) + 1)\n```"
CALL = "```python\ndef add_one(x): return x + 1\n```"
METHOD = "```python\nclass Solution:\n    def addAll(self, nums: List[int], x): return [n + x for n in nums]\n```"

CASES = [
    ("gsm8k", gsm8k, "#### 1007", "#### 1008"),
    ("math", math, r"\boxed{7/7}", r"\boxed{2}"),
    ("math", math500, r"\boxed{1}", r"\boxed{2}"),
    ("aime", aime, r"\boxed{7}", r"\boxed{70}"),
    ("aime", lambda number: {"ID": "2024-I-1", "Problem": "Find 7.", "Answer": number}, r"\boxed{7}", "8"),
    ("aime", lambda number: {"question": "Find 7.", "answer": str(number)}, r"\boxed{7}", "8"),
    ("dapo-math-17k", dapo_math_17k, "Answer: 47", "Answer: 7"),
    ("countdown", countdown, "<answer>7 + 19 + 35</answer>", "<answer>61</answer>"),
    ("apps", apps, ADD, ADD.replace("1", "2")),
    ("apps", apps_function, CALL, CALL.replace("1", "2")),
    ("taco", taco, ADD, ADD.replace("1", "2")),
    ("livecodebench", livecodebench, ADD, ADD.replace("1", "2")),
    ("livecodebench", livecodebench_function, METHOD, METHOD.replace("n + x", "n")),
    ("search-r1", search_r1, "<answer>painter 7.</answer>", "<answer>painter</answer>"),
]
"""Data set, function of a number that returns a raw row, and a right and a wrong response to the row of 7."""
