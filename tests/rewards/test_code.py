"""Programs that a model wrote: right ones, wrong ones, and ones that attack."""

import json

import psutil
import pytest

from mrl.distributed.worker_processes.sandbox import SandboxLimits, run_python
from mrl.rewards.code import code, parse_tests
from tests.distributed.worker_processes.attacks import CALM
from tests.distributed.worker_processes.run_attacks import Target, together
from tests.rewards.rollouts import rollout, scorer

SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n", "10 -3\n"], "outputs": ["3\n", "7", "7 \n"]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])


@pytest.fixture(scope="module", autouse=True)
def confined(tmp_path_factory):
    missing = run_python("", str(tmp_path_factory.mktemp("empty")), SandboxLimits()).missing
    if missing:
        pytest.skip(f"this kernel has no such lock: {missing}")


def judged(program, answer=SUMS, **kwargs):
    return code(prompt="", response=f"Here:\n```python\n{program}\n```\nDone.", answer=answer, extra={}, **kwargs)


CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[3], [4]]], "outputs": [3, [[3, 4]]]})


@pytest.mark.parametrize(
    "program",
    [
        "def add(one, other): return one + other",
        "class Solution:\n    def add(self, one: List[int], other: List[int]):\n        return one + other",
        "from __future__ import annotations\ndef add(one, other):\n    print('noise')\n    return one + other",
        "def add(one, other): return (*one, *other) if isinstance(one, list) else one + other",
    ],
)
def test_a_function_or_a_method_of_solution_is_called(program):
    assert judged(program, CALLS, test_time_s=20.0, limit_s=60.0) == {"score": 1.0, "passed": 1.0, "problem": ""}


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("def add(one, other): return 3", "test 2 of 2: add returned 3, expected [[3, 4]]"),
        ("def add(one, other): return {one}", "TypeError"),
        ("def sub(one, other): return 3", "NameError"),
        ("import os\ndef add(one, other): os._exit(0)", "it ended before add returned"),
        (
            "class Any:\n    def __eq__(self, other): return True\ndef add(one, other): return Any()",
            "TypeError",
        ),
    ],
)
def test_a_wrong_function_is_0_and_cannot_claim_equality(program, problem):
    found = judged(program, CALLS, test_time_s=20.0, limit_s=60.0)
    assert found["score"] == 0.0 and problem in found["problem"], found


@pytest.mark.parametrize("name", ["import os", 3])
def test_a_function_name_that_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="expected a function's name"):
        parse_tests({"fn_name": name, "inputs": [[1]], "outputs": [1]})


RIGHT = ["print(sum(map(int, input().split())))", "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))"]


@pytest.mark.parametrize("program", RIGHT)
def test_a_right_program_passes(program):
    assert judged(program) == {"score": 1.0, "passed": 1.0, "problem": ""}


WRONG = {
    "print(3)": "test 2 of 3: it printed '3\\n', expected '7'",
    "print(": "SyntaxError",
    "1 / 0": "ZeroDivisionError: division by zero",
    "while True: pass": "it took longer than 0.5 s",
    "while True: print('x' * 1000)": "it printed more than",
    "import os; os._exit(0)": "it printed ''",
    "x = bytearray(4 << 30); print(3)": "MemoryError",
    "import subprocess; subprocess.run(['true'])": "PermissionError",
    "import os; os.fork(); print(3)": "PermissionError",
    "open('/tmp/left-behind', 'w').write('x')": "PermissionError",
    "import socket; socket.socket(); print(3)": "PermissionError",
}


@pytest.mark.parametrize("program", WRONG)
def test_a_program_that_is_wrong_or_attacks_is_0_and_says_why(program):
    found = judged(program, test_time_s=0.5 if "while" in program else 5.0, limit_s=20.0)
    assert found["score"] == 0.0 and WRONG[program] in found["problem"], found


def test_no_attack_has_an_effect(tmp_path):
    names = list(CALM)[1::4]
    targets = {name: Target(tmp_path / str(number)) for number, name in enumerate(names)}
    answer = json.dumps({"inputs": [""], "outputs": ["end"]})
    assert judged(together(targets), answer, test_time_s=60.0, limit_s=60.0)["problem"] == ""
    assert {name: changed for name, one in targets.items() if (changed := one.changed())} == {}


@pytest.mark.slow
def test_folders_nested_deep_cost_their_program_its_score_alone():
    program = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nprint(3)"
    assert "folders that cannot be read" in judged(program, test_time_s=20.0, limit_s=20.0)["problem"]


def test_expected_outputs_and_secrets_are_not_where_a_program_could_read_them(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    look = (
        "import gc, os, sys\nframe, seen = sys._getframe(), [repr(dict(os.environ))]\n"
        "while frame: seen.append(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back\n"
        "print('very-sec' + 'ret' in str(seen), 'expec' + 'ted-42' in str(seen))"
    )
    answer = json.dumps({"inputs": [""], "outputs": ["expected-42"]})
    assert "it printed 'False False\\n'" in judged(look, answer)["problem"]


def test_statements_are_tests_too_and_must_be_reached():
    right = "def add(a, b):\n    return a + b"
    assert judged(right, ASSERTS)["score"] == 1.0
    assert "AssertionError" in judged("def add(a, b):\n    return 3", ASSERTS)["problem"]
    assert judged("def add(a, b):\n    return 3", ASSERTS, partial=True)["score"] == 0.5
    assert "before its tests" in judged("import sys\nsys.exit(0)", ASSERTS)["problem"]
    assert judged(right, "assert add(2, 2) == 4\nassert add(1, 1) == 2")["score"] == 1.0


def test_the_time_of_all_tests_is_bounded():
    answer = json.dumps({"inputs": [""] * 50, "outputs": ["1"] * 50})
    found = judged("while True: pass", answer, partial=True, max_tests=50, test_time_s=0.4, limit_s=1.0)
    assert found["score"] == 0.0 and "it took longer than 0.4 s" in found["problem"]


def test_a_response_without_a_block_is_wrong_unless_all_of_it_is_the_program():
    assert code(prompt="", response="print(3)", answer=SUMS, extra={})["problem"].endswith("no program in the response")
    assert code(prompt="", response=RIGHT[0], answer=SUMS, extra={}, require_block=False)["score"] == 1.0


def test_a_program_in_the_reasoning_does_not_count():
    block = f"```python\n{RIGHT[0]}\n```"
    assert code(prompt="", response=f"<think>{block}", answer=SUMS, extra={})["score"] == 0.0
    assert code(prompt="<think>\n", response=block, answer=SUMS, extra={})["score"] == 0.0
    assert code(prompt="", response=f"<think>\n```python\nbad\n</think>{block}", answer=SUMS, extra={})["score"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, open(0).read().split())))",
        "import io, os\nprint(sum(map(int, io.BytesIO(os.read(0, os.fstat(0).st_size)).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
    ],
)
def test_a_program_reads_its_input_from_descriptor_0(program):
    assert judged(program)["score"] == 1.0


def test_a_mark_is_not_in_the_frames_of_a_program_that_looks_for_it():
    attack = (
        "import gc, os, re, sys\nframe, seen = sys._getframe(), []\nwhile frame:\n"
        "    seen.append(repr((frame.f_locals, frame.f_globals, frame.f_code.co_consts))); frame = frame.f_back\n"
        "for mark in re.findall('[0-9a-f]{32}', str(seen) + repr(gc.get_objects())): print(mark, flush=True)\n"
        "os._exit(0)"
    )
    assert judged(attack, ASSERTS)["score"] == 0.0


def test_statements_pass_after_a_program_that_redirects_its_output():
    program = (
        "import atexit, io, sys\nsys.stdout = io.StringIO()\natexit.register(print, 'bye')\ndef add(a, b): return a + b"
    )
    assert judged(program, ASSERTS)["score"] == 1.0


@pytest.mark.parametrize("given", [None, "", [], [1], {"inputs": ["a"], "outputs": []}, {"fn_name": "f"}])
def test_rows_without_tests_are_refused(given):
    with pytest.raises(ValueError, match="the row's tests are"):
        parse_tests(given)


def test_it_runs_in_a_worker_and_leaves_no_process():
    before = set(psutil.pids())
    texts = [f"```python\n{RIGHT[0]}\n```", "```python\nwhile True: pass\n```", "```python\nprint(0)\n```"]
    samples = [rollout(text, uid=place, answer=SUMS) for place, text in enumerate(texts)]
    with scorer(("code", 1.0, {"test_time_s": 1.0}), time_limit_s=60.0, max_failed_frac=1.0) as judge:
        judge.score(samples)
    assert [one.reward_error for one in samples] == [None] * 3
    assert [one.reward for one in samples] == [1.0, 0.0, 0.0]
    mine = {child.pid for child in psutil.Process().children(recursive=True)}
    assert not mine - before
