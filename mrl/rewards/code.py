"""Code reward: runs the Python program of a response on the row's tests, each in a sandbox.

`_code_blocks.py` finds the program in the response. Expected outputs never enter the program's process, so it cannot
read them. Tests that are Python statements run after the program in its process. A malicious program can deceive them:
it can return objects that compare equal to everything, or read the statements from their file descriptor. Only tests
with inputs and outputs are safe against that. A test may also call a function (`fn_name`): its arguments enter the
program's process after the program has run, and the returned value is compared outside, as JSON.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.reasoning import without_reasoning
from mrl.distributed.worker_processes.folders import temporary_folder
from mrl.distributed.worker_processes.sandbox import SandboxLimits, SandboxResult, run_python
from mrl.rewards._arguments import check_positive
from mrl.rewards._code_blocks import extract_program

IN_PROCESS = False
LIMIT_S = 8.0
"""Default of `limit_s`, which must be below `reward.time_limit_s`."""
_LEAST_MEMORY_MB = 64

IMPORTS = """from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
import collections, itertools, functools, heapq, bisect, math, string, re, random, sys
"""
"""Names that code to complete uses without importing them, as in the harnesses of APPS and LiveCodeBench."""

CALL = """
_call = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
_returned = __import__("json").dumps(_call(*__import__("json").loads({arguments!r})))
__import__("os").write(1, ("\\n" + {mark!r} + _returned + "\\n").encode())
"""
"""Python that calls a function and prints a random mark and its return value as JSON."""


@dataclass(frozen=True)
class Test:
    """A test: one run of the program.

    Attributes:
        given: Text of the standard input.
        expected: Expected output, or JSON text of the expected return value; None if `statements` must pass instead.
        statements: Python that runs after the program, such as assertions.
        function: Function, or method of a class `Solution`, that is called after the program; "" for none.
        arguments: JSON text of the list of its arguments.
    """

    given: str = ""
    expected: str | None = None
    statements: str = ""
    function: str = ""
    arguments: str = "[]"


def code(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    extra: dict[str, Any],
    tests_key: str | None = None,
    partial: bool = False,
    require_block: bool = True,
    max_tests: int = 20,
    test_time_s: float = 2.0,
    limit_s: float = LIMIT_S,
    memory_mb: int = 512,
    allow_unconfined: bool = False,
) -> dict[str, float | str]:
    """Runs the program in the response's fenced blocks, see `extract_program`.

    Args:
        prompt: Text of the prompt; it may end with the opening tag of the reasoning.
        response: Text without the end token; blocks in its reasoning are ignored.
        answer: Tests in the format of `parse_tests`, if `tests_key` is null.
        extra: Columns of the row.
        tests_key: Column with the tests; null for the answer.
        partial: True to score the fraction of passed tests; False to score 1 only if all pass.
        require_block: True if a response without a possible Python block is wrong; False to run the entire response.
        max_tests: Number of tests that are run, from the first.
        test_time_s: Time limit of one test, s.
        limit_s: Time limit of all tests together, s; must be below `reward.time_limit_s`, at which the sample fails.
        memory_mb: Memory limit of the program, MiB.
        allow_unconfined: True to run even if this machine cannot confine the program.

    Returns:
        "score"; "passed", the fraction of passed tests; "problem", why the first failed test failed.

    Raises:
        ValueError: The row has no tests.
        RuntimeError: This machine cannot confine the program.
    """
    tests = parse_tests(answer if tests_key is None else extra.get(tests_key))[:max_tests]
    text = without_reasoning(response, prompt)
    program = extract_program(text)
    if program is None and not require_block:
        program = text or None
    end, num_passed, first = time.monotonic() + limit_s, 0, ""
    for place, test in enumerate(tests, 1):
        left = end - time.monotonic()
        problem = "there is no program in the response" if program is None else f"all took longer than {limit_s:g} s"
        if program is not None and left > 0:
            bounds = SandboxLimits(time_s=min(test_time_s, left), memory_mb=memory_mb)
            problem = _problem(program, test, bounds, allow_unconfined=allow_unconfined)
        num_passed += not problem
        first = first or (f"test {place} of {len(tests)}: {problem}" if problem else "")
        if problem and not partial:
            break
    part = num_passed / len(tests)
    return {"score": part if partial else float(part == 1.0), "passed": part, "problem": first}


def parse_tests(given: Any) -> list[Test]:
    """Parses the tests of a row.

    Args:
        given: Value, or its JSON text: {"inputs": [...], "outputs": [...]} as in APPS and verl's code data (standard
            input and output, or with "fn_name" the arguments and the return value of a function); a list of statements
            as in MBPP; or a text of statements.

    Raises:
        ValueError: The value has none of these formats, or no tests.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = [given]
    match given:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs) > 0:
            pairs = list(zip(inputs, outputs, strict=True))
            if not (name := given.get("fn_name")):
                return [Test(_text(one), _text(other)) for one, other in pairs]
            if not isinstance(name, str) or not name.isidentifier() or not all(isinstance(one, list) for one in inputs):
                raise ValueError(
                    f"the row's tests call {name!r:.100}, expected a function's name and lists of arguments"
                )
            return [Test(expected=json.dumps(other), function=name, arguments=json.dumps(one)) for one, other in pairs]
        case [*statements] if statements and all(isinstance(one, str) and one.strip() for one in statements):
            return [Test(statements=one) for one in statements]
    shown = f"{list(given)}" if isinstance(given, Mapping) else repr(given)
    raise ValueError(f"the row's tests are {shown:.100}, expected inputs and outputs, or statements of Python")


def _text(lines: Any) -> str:
    """Returns a text from a text or a list of lines, both of which APPS uses."""
    if isinstance(lines, Sequence) and not isinstance(lines, str):
        return "\n".join(map(str, lines))
    return str(lines)


def _problem(program: str, test: Test, bounds: SandboxLimits, *, allow_unconfined: bool) -> str:
    """Runs a test; returns why it failed, "" if it passed."""
    mark = "" if test.expected is not None and not test.function else secrets.token_hex(16)
    if test.function and "__future__" not in program:
        program = IMPORTS + program
    with temporary_folder("code") as folder:
        ran = run_python(program, folder, bounds, stdin=test.given, then=_after(test, mark))
    if ran.missing and not allow_unconfined:
        raise RuntimeError(
            f"this machine cannot confine programs that a model wrote ({'; '.join(ran.missing)}). Run where the kernel "
            "has Landlock and seccomp, or take the risk with kwargs.allow_unconfined=true"
        )
    if ran.problem:
        return ran.problem
    if ran.status != 0:
        return f"it ended with status {ran.status}: {_last_line(ran)}"
    if test.function:
        return _call_problem(ran.output.partition(mark)[2].partition("\n")[0], test)
    if test.expected is None:
        return "" if mark in ran.output else "it ended before its tests did"
    return (
        "" if _same(ran.output, test.expected) else f"it printed {ran.output[:80]!r}, expected {test.expected[:80]!r}"
    )


def _call_problem(printed: str, test: Test) -> str:
    """Returns why a returned value is not the expected one, "" if it is.

    A value also equals an expected list that has it as its only element, as in APPS.

    Args:
        printed: JSON text that the call printed; "" if it did not return.
        test: Test with a function.
    """
    try:
        value = json.loads(printed)
    except (ValueError, RecursionError):
        return f"it ended before {test.function} returned"
    expected = json.loads(test.expected or "null")
    if value == expected or (isinstance(expected, list) and len(expected) == 1 and value == expected[0]):
        return ""
    return f"{test.function} returned {value!r:.80}, expected {expected!r:.80}"


def _after(test: Test, mark: str) -> str:
    """Returns Python that runs after the program: statements and a random mark, or a call; "" for an output test."""
    if test.function:
        return CALL.format(name=test.function, arguments=test.arguments, mark=mark)
    if test.expected is not None:
        return ""
    return f"{test.statements}\n__import__('os').write(1, b'\\n{mark}\\n')\n"


def _same(printed: str, expected: str) -> bool:
    """Compares two outputs line by line, ignoring white space at the ends of lines and of the text."""
    one, other = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    return one == other


def _last_line(ran: SandboxResult) -> str:
    lines = ran.output.strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"


def check(
    *,
    max_tests: int = 20,
    test_time_s: float = 2.0,
    limit_s: float = LIMIT_S,
    memory_mb: int = 512,
    tests_key: str | None = None,
    **others: Any,
) -> None:
    """Raises ValueError for a value out of range."""
    check_positive(max_tests=max_tests, test_time_s=test_time_s, limit_s=limit_s)
    if memory_mb < _LEAST_MEMORY_MB:
        raise ValueError(f"memory_mb={memory_mb}, expected at least {_LEAST_MEMORY_MB}: Python itself needs it")
    if tests_key == "":
        raise ValueError("tests_key is empty, expected a column, or null for the answer")


CHECK = check
REWARD = code
