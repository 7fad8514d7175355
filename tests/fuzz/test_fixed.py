"""The small part of the campaign that the suite runs: what it has found, and the first cases of each kind.

More of it, for as long as one likes: `python -m tests.fuzz.campaign --count 3000`.
"""

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from mrl.distributed.local_ranks import fork_server_context
from tests.fuzz import cases, configs, data_files, values
from tests.fuzz.campaign import warm_up
from tests.fuzz.cases import ROWS, Case
from tests.ranks import PRELOAD
from tests.source import ROOT

NUM_DRAWN = 7
"""Of each kind."""


def with_config(name: str, text: bytes, command: str = "dry run") -> Case:
    return Case(name, {"config.yaml": text}, command)


def with_override(name: str, *words: str, command: str = "dry run") -> Case:
    return Case(name, command=command, overrides=words)


def with_data(name: str, content: bytes, ending: str = "jsonl", command: str = "dry run") -> Case:
    return Case(name, {f"broken.{ending}": content}, command, (f"data.train_files=[broken.{ending}]",))


FOUND = [
    with_config("brackets that overrun libyaml's stack", b"[" * 100_000),
    with_config("mappings in each other", b"{a: " * 3000),
    with_config("a list that holds itself", b"data: {task_kwargs: &k {a: &l [1, *l]}}\n"),
    with_config("a lone surrogate", b'run: {output_dir: "\\ud800"}\n'),
    with_config("a zero byte", b'model: {tokenizer: "char:a\\0b"}\n'),
    with_config("a number of 20,000 bits", b"run: {seed: 0x" + b"f" * 5000 + b"}\n"),
    with_config("bytes for a number", b"run: {seed: !!binary aGVsbG8=}\n"),
    with_override("a value as long as a book", f"algorithm.singleton_group={'x' * 100_000}"),
    with_override("a key as long as a book", f"{'x' * 50_000}=1", command="plan"),
    with_override("a key of digits alone", "9" * 5000 + "=1"),
    with_override("a module without a name", "rollout.name=.:x"),
    with_override("a long path", f"data.train_files=[{'a' * 300}.jsonl]", command="launch"),
    with_override("a long model folder", f"model.path={'a/' * 3000}", "model.preset=null", command="plan"),
    with_override("a word for a number", "data.train_files=[]", "data.task=addition", "data.task_kwargs.max_terms=x"),
    with_override("a held-out part of nothing", "data.train_files=[]", "data.task=addition",
                  "data.task_kwargs={held_out_frac: 1e-15}"),
    with_override("a hundred thousand workers", "reward.num_workers=100000", command="train"),
    with_override("layers without end", "model.overrides.num_hidden_layers=1000000000"),
    with_override("a model that no memory holds", "model.overrides.hidden_size=10000000", command="train"),
    with_data("brackets in a row", b"[" * 200_000),
    with_data("a row with bytes that are no text", ROWS.encode() + b'{"prompt": "\xff"}\n'),
    with_data("half a parquet file", data_files._parquets()[0][:-20], "parquet"),
    with_data("a time of another planet", data_files._parquets()[-1], "parquet", command="plan"),
    *(Case(f"a {kind} for data", {}, "dry run", ("data.train_files=[odd.jsonl]",), {"odd.jsonl": kind})
      for kind in data_files.SPECIAL),
]  # fmt: skip

DRAWN = [kind.case(number) for kind in (configs, values, data_files) for number in range(NUM_DRAWN)]


@pytest.fixture(scope="module")
def outcome_of():
    """`cases.run` in a process of its own: what forks must not hold the threads of earlier tests."""
    with ProcessPoolExecutor(1, fork_server_context(PRELOAD), warm_up) as process:
        yield lambda case, folder: process.submit(cases.run, case, folder).result()


@pytest.mark.parametrize("case", [*FOUND, *DRAWN], ids=lambda case: case.name)
def test_it_ends_with_a_status_of_readme_and_one_message(case, outcome_of, tmp_path):
    outcome = outcome_of(case, tmp_path / "case")
    assert outcome.wrong == "", f"{outcome.case}: {outcome.said[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "environment", "status"),
    [
        (
            with_override("a text that the terminal lacks", "model.tokenizer=char:0123456789<>+é"),
            {"PYTHONIOENCODING": "ascii"},
            0,
        ),
        (with_config("brackets that overrun libyaml's stack", b"[" * 100_000), {}, 2),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_process_of_its_own_ends_so_too(case, environment, status, tmp_path):
    cases.write(case, tmp_path)
    words = [sys.executable, "-m", "mrl", *cases.words(case, tmp_path)]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True,
        check=False, timeout=cases.LIMIT_S, text=True, errors="replace",
    )  # fmt: skip
    assert (done.returncode, cases._wrong(done.returncode, done.stderr, False, case.command)) == (status, "")


def test_the_oracle_sees_what_is_wrong():
    """A check that cannot fail would find nothing."""
    assert cases._wrong(None, "", False, "train") == "hangs"
    assert cases._wrong(1, "Traceback (most recent call last)", False, "train") == "traceback"
    assert cases._wrong(1, "", False, "train") == "status 1"
    assert cases._wrong(2, "", False, "train") == "no message, or several"
    assert cases._wrong(0, "", True, "train") == "leaves processes"
    assert cases._wrong(2, "mrl: error: a", False, "train") == cases._wrong(0, "", False, "train") == ""
