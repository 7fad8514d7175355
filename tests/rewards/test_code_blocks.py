"""Which fenced block of a response is the program."""

import time

import pytest

from mrl.rewards._code_blocks import extract_program

PROGRAM = "x = int(input())\nif x:\n    print(x)\n"
LIMIT_S = 5.0


def fenced(label="", text=PROGRAM, fence="```", indent=""):
    return "".join(f"{indent}{line}\n" for line in [fence + label, *text.splitlines(), fence])


FOUND = {
    "after text": fenced("text", "1 2\n") + "So:\n" + fenced("python"),
    "after bash": fenced("bash", "ls\n") + fenced("python"),
    "after cpp": fenced("cpp", "int x;\n") + fenced("python"),
    "after json": fenced("json", "{}\n") + fenced("python"),
    "after a block with no label": fenced("", "1 2\n") + fenced("python"),
    "after another program": fenced("python", "bad = 1\n") + fenced("python"),
    "before text": fenced("python") + fenced("text", "6\n"),
    "before pycon": fenced("python") + fenced("pycon", ">>> 1\n"),
    "before output without a label": fenced("python") + "Output:\n" + fenced("", "6\n"),
    "before a stray fence": fenced("python") + "```\nI hope this helps",
    "before a block that was cut": fenced("python") + "```python\nx = in",
    "in a list": "1. Do:\n\n" + fenced("python", indent="   "),
    "in a tight list": "1. Do:\n" + fenced("python", indent="   "),
    "in a list of bullets": "- Do:\n" + fenced("python", indent="  "),
    "in a list of a list": "1. a\n   - b\n" + fenced("python", indent="     "),
    "on the line of a bullet": "- ```python\n  x = int(input())\n  if x:\n      print(x)\n  ```\n",
    "in a list, its lines not indented": f"1. Do:\n   ```python\n{PROGRAM}   ```\n2. Then",
    "indented": "text\n\n" + fenced("python", indent="    "),
    "indented below a paragraph": "text\n" + fenced("python", indent="    "),
    "in a quote": "> Here\n>\n" + fenced("python", indent="> "),
    "in answer tags": "<answer>\n" + fenced("python") + "</answer>",
    "in details": "<details>\n" + fenced("python") + "</details>",
    "after Markdown in a longer fence": "````markdown\n```python\nbad = 1\n```\n````\n" + fenced("python"),
    "tildes": fenced("python", fence="~~~"),
    "a longer fence": fenced("python", fence="`````"),
    "line ends of Windows": fenced("python").replace("\n", "\r\n"),
    "not closed": "```python\n" + PROGRAM,
    "not closed, no line end": "```python\n" + PROGRAM.rstrip(),
    "no label": fenced(),
    "no label, before output": fenced() + "Output:\n" + fenced("", "6\n"),
    "no label, before words": fenced() + fenced("", "Hello World\n"),
    "no label, after cpp": fenced("cpp", "int x;\n") + fenced(),
    **{
        f"label {label}": fenced(label)
        for label in (
            "py", "python3", "Python", "PYTHON", "Py", "py3", "python3.11", " python", "{.python}", "{python}",
            "python:a.py", 'python title="a.py"', "python,ignore", "Python 3",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_the_program_is_found(case):
    assert (extract_program(FOUND[case]) or "").rstrip() == PROGRAM.rstrip()


@pytest.mark.parametrize("label", ["cpp", "text", "bash", "pycon", "python-repl", "ipython-output", "json", "pythonic"])
def test_a_block_of_another_language_is_no_program(label):
    assert extract_program(fenced(label)) is None


def test_a_response_without_a_block_has_no_program():
    assert extract_program("print(1)") is None and extract_program("") is None and extract_program("`print(1)`") is None


@pytest.mark.parametrize(
    "text", [">", "- ", "```\n", "~~~python\n", "1. a\n", "> - ", " ", "(", "-", "a.b", "[0]", "not "]
)
def test_a_hopeless_response_is_read_in_bounded_time(text):
    start = time.process_time()
    extract_program(text * (32_000 // len(text)))
    extract_program(f"```\n{text * (32_000 // len(text))}\n```")
    assert time.process_time() - start < LIMIT_S
