import math
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import UserError
from tests.rewards.rollouts import END, rollout, scorer

HERE = "tests.rewards.functions"
TIME_LIMIT_S = 1.0  # of wall time, for microseconds of work: room for a busy machine
EXIT_LIMIT_S = 20.0  # for a process to notice that its parent is gone, on a busy machine
SUM_ROUNDING = 1e-12  # fp64


def alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(process_id):
    end = time.monotonic() + EXIT_LIMIT_S
    while alive(process_id) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(process_id)


def worker_ids(judge):
    return [worker.channel.process.pid for worker in judge._pool._workers]


def test_cheap_functions_need_no_worker():
    rollouts = [rollout(f"3{END}"), rollout(f"4{END}"), rollout("3", finish_reason="length")]
    with scorer("exact_match") as judge:
        judge.score(rollouts)
        assert judge._pool is None
    assert [item.reward for item in rollouts] == [1.0, 0.0, 1.0]
    assert [item.reward_parts for item in rollouts] == [
        {"exact_match": 1.0},
        {"exact_match": 0.0},
        {"exact_match": 1.0},
    ]
    assert [item.response_text for item in rollouts] == [f"3{END}", f"4{END}", "3"]
    assert all(item.reward_error is None for item in rollouts)


def test_the_reward_is_the_weighted_sum_over_both_kinds_of_function():
    functions = [
        ("exact_match", 1.0, {}),
        (f"{HERE}:num_chars", 0.1, {"factor": 3}),
        (f"{HERE}.num_chars", 0.01, {}),
        ("length", 0.5, {"target": 1, "limit": 3}),
    ]
    sample = rollout(f"3{END}")
    with scorer(*functions) as judge:
        judge.score([sample])
    assert sample.reward_parts == {"exact_match": 1.0, "num_chars": 3.0, "num_chars#2": 1.0, "length": -0.5}
    assert sample.reward == pytest.approx(1.0 + 0.3 + 0.01 - 0.25, abs=SUM_ROUNDING)


def test_functions_see_the_documented_arguments():
    samples = [rollout(f"3{END}", extra={"level": 4}), rollout(f"3{END}", extra={"level": 4})]
    with scorer(f"{HERE}:shows_arguments", f"{HERE}:shows_arguments") as judge:
        judge.score(samples)
    assert [item.reward_error for item in samples] == [None, None]
    assert samples[0].prompt.extra == {"level": 4}


@pytest.mark.slow
def test_each_failure_names_its_sample_and_fails_nothing_else():
    ways = {
        "raise": "KeyError: 'missing'",
        "exit": "SystemExit: 3",
        "end": r"died over it (exit status 3)",
        "kill": r"died over it (signal 9)",
        "loop": "longer than reward.time_limit_s=1",
        "sleep": "longer than reward.time_limit_s=1",
        "backtrack": "longer than reward.time_limit_s=1",
        "nan": "it returned nan",
        "inf": "it returned inf",
        "text": "it returned str '1', expected a number",
        "nothing": "it returned NoneType None, expected a number",
        "two": "RuntimeError: a Tensor with 2 elements",
    }
    texts = [text for way in ways for text in ("well", way)] + ["true"]
    samples = [rollout(text, uid=index, sample_index=index % 3) for index, text in enumerate(texts)]
    with scorer(
        f"{HERE}:does_what_it_reads", time_limit_s=TIME_LIMIT_S, error_value=-7.0, max_failed_frac=0.9
    ) as judge:
        judge.score(samples)
    for index, (text, sample) in enumerate(zip(texts, samples, strict=True)):
        if text not in ways:
            assert (sample.reward, sample.reward_error) == (1.0, None)
            continue
        assert sample.reward == -7.0
        assert sample.reward_parts == {"does_what_it_reads": -7.0}
        assert sample.reward_error.startswith(
            f"reward '{HERE}:does_what_it_reads' failed on train.jsonl:{index + 1} (uid {index}, sample {index % 3}): "
        )
        assert ways[text] in sample.reward_error
        assert sample.reward_error.endswith(f"Response: '{text}'")


def test_a_failing_cheap_function_names_its_sample_too():
    samples = [rollout(f"3{END}"), rollout(f"3{END}", uid=4, answer=None)]
    with scorer("exact_match", "numeric") as judge:
        judge.score(samples)
    assert samples[0].reward == 2.0
    assert math.isnan(samples[1].reward) and samples[1].reward_parts == {}
    assert "reward 'exact_match' or 'numeric' failed on train.jsonl:5" in samples[1].reward_error


def test_too_many_failures_stop_the_job_with_the_first_one():
    samples = [rollout(text, uid=index) for index, text in enumerate(["well", "raise", "well", "nan"])]
    with scorer(f"{HERE}:does_what_it_reads") as judge:
        judge.score(samples)  # half is allowed
        with pytest.raises(
            UserError, match=r"3 of 5 samples could not be scored.* train.jsonl:2 .*KeyError: 'missing'"
        ):
            judge.score([*samples, rollout("inf")])


@pytest.mark.slow
def test_a_function_that_always_hangs_is_given_up_early():
    samples = [rollout("sleep", uid=index) for index in range(100)]
    with scorer(f"{HERE}:does_what_it_reads", time_limit_s=TIME_LIMIT_S, max_failed_frac=0.02) as judge:
        start = time.monotonic()
        with pytest.raises(
            UserError, match=r"3 of \d+ samples could not be scored \(\d+ others were not tried\).*time_limit_s"
        ):
            judge.score(samples)
        assert time.monotonic() - start < 50 * TIME_LIMIT_S
        well = rollout("well")
        judge.score([well])
        assert well.reward == 1.0


def test_a_worker_killed_between_batches_costs_no_sample():
    samples = [rollout("well", uid=index) for index in range(9)]
    with scorer(f"{HERE}:does_what_it_reads", num_workers=2) as judge:
        before = worker_ids(judge)
        os.kill(before[0], signal.SIGKILL)
        judge._pool._workers[0].channel.process.wait()
        judge.score(samples)
        assert all(item.reward == 1.0 for item in samples)
        assert worker_ids(judge)[0] != before[0]
        assert worker_ids(judge)[1] == before[1]


def test_large_batches_keep_their_order_over_several_workers():
    samples = [rollout("x" * (index % 50), uid=index) for index in range(1000)]
    with scorer(f"{HERE}:num_chars", num_workers=2) as judge:
        judge.score(samples)
        judge.score([])
    assert [item.reward for item in samples] == [index % 50 for index in range(1000)]


def test_workers_start_without_torch_and_keep_their_output_to_themselves(capfd):
    samples = [rollout("x")]
    with scorer(f"{HERE}:imports_torch", f"{HERE}:prints") as judge:
        judge.score(samples)
    assert samples[0].reward_error is None
    assert samples[0].reward_parts == {"imports_torch": 0.0, "prints": 0.0}
    output = capfd.readouterr()
    assert "own output" not in output.out
    assert "own output" in output.err


def test_math_runs_in_a_worker():
    samples = [rollout(text, answer="1/2") for text in (r"\boxed{2/4}", r"\boxed{0.5}", r"\boxed{2}")]
    with scorer("math", time_limit_s=60.0) as judge:
        judge.score(samples)
    assert [item.reward for item in samples] == [1.0, 1.0, 0.0]


HANGS_MATH = (
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}",
    r"The last three digits of \(2003^{2002^{2001}}\) are",
)
"""Known to hang math-verify whatever its own time limit: its issue 65, and torchtitan's pull request 4442."""


@pytest.mark.slow
def test_what_hangs_math_verify_is_wrong_at_once():
    samples = [rollout(text, uid=place, answer="7") for place, text in enumerate((r"\boxed{7}", *HANGS_MATH, "is 7"))]
    with scorer("math", time_limit_s=60.0) as judge:
        before = worker_ids(judge)
        judge.score(samples)
        assert worker_ids(judge) == before
    assert [item.reward for item in samples] == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_closing_ends_the_workers():
    judge = scorer(f"{HERE}:num_chars", num_workers=2)
    processes = worker_ids(judge)
    assert all(alive(process) for process in processes)
    judge.close()
    assert all(gone(process) for process in processes)


@pytest.mark.parametrize("response", ["well", "backtrack", "sleep"])
def test_workers_do_not_outlive_a_killed_parent(response):
    # The parent reports its worker, starts scoring and is killed; "backtrack" holds the interpreter's lock for hours.
    program = (
        "import sys, threading; sys.path.insert(0, '.')\n"
        "from mrl.rewards._signatures import Sample\n"
        "from mrl.rewards._call_batches import ScoringTask\n"
        "from mrl.rewards._pool import RewardPool\n"
        f"calls = [('{HERE}:does_what_it_reads', {{}})]\n"
        "pool = RewardPool(calls, num_workers=1, time_limit_s=600, memory_limit_mb=0)\n"
        "print(pool._workers[0].channel.process.pid, flush=True)\n"
        f"pool.run([Sample('', {response!r}, None, {{}})], [ScoringTask((0,), ((0,),))], 0)\n"
        "threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(0.3)  # it is now scoring, or idle
        assert alive(worker)
        parent.kill()
    assert gone(worker)


def noted(path, count):
    """The ids of that many processes, once they are noted."""
    end = time.monotonic() + EXIT_LIMIT_S
    while time.monotonic() < end:
        if path.exists() and len(found := path.read_text().split()) >= count:
            return [int(item) for item in found]
        time.sleep(0.02)
    raise AssertionError(f"{count} processes did not start")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["go on", "hang", "die"])
def test_what_a_function_started_ends_with_its_worker(tmp_path, then):
    sample = rollout(f"program session daemon then {then}", answer=str(tmp_path / "ids"))
    with scorer(f"{HERE}:starts_processes", time_limit_s=5.0, max_failed_frac=1.0) as judge:
        judge.score([sample])
        processes = noted(tmp_path / "ids", 3)
        assert all(map(alive, processes)) == (then == "go on")  # it may use them for the next sample
    assert (sample.reward_error is None) == (then == "go on")
    assert all(map(gone, processes))


@pytest.mark.slow
def test_what_a_function_started_ends_with_a_killed_trainer(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.rewards.rollouts import rollout, scorer\n"
        f"judge = scorer('{HERE}:starts_processes', time_limit_s=600)\n"
        f"judge.score([rollout('program session daemon then hang', answer={str(tmp_path / 'ids')!r})])\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        processes = noted(tmp_path / "ids", 3)
        parent.kill()
    assert all(map(gone, processes))


def test_a_forked_child_that_comes_back_answers_for_nobody():
    texts = ["x" * (index % 7) for index in range(40)] + ["raise", "exit"]
    samples = [rollout(text, uid=index) for index, text in enumerate(texts)]
    with scorer(f"{HERE}:comes_back_twice", num_workers=2) as judge:
        judge.score(samples)
        judge.score(samples)
    assert [(item.reward, item.reward_error) for item in samples] == [(len(text), None) for text in texts]


STRAYS = ("byte", "lines", "zeros", "json", "list", "refusal", "deep", "long")


@pytest.mark.slow
@given(st.lists(st.sampled_from([*STRAYS, "", "xx"]), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_stray_bytes_fail_their_sample_and_shift_nothing(texts):
    samples = [rollout(text, uid=index) for index, text in enumerate(texts)]
    with scorer(f"{HERE}:writes_everywhere", max_failed_frac=1.0, time_limit_s=10.0) as judge:
        judge.score(samples)
        after = rollout("after")
        judge.score([after])
    assert (after.reward, after.reward_error) == (5.0, None)
    for text, sample in zip(texts, samples, strict=True):
        assert sample.reward_error is not None or sample.reward == len(text)
        assert sample.reward_error is None or text in STRAYS


@pytest.mark.parametrize("way", ["here", "touched", "program", "many"])
def test_memory_is_limited(way):
    samples = [rollout("little"), rollout(way, uid=1), rollout("little", uid=2)]
    with scorer(
        f"{HERE}:allocates", memory_limit_mb=400, time_limit_s=60.0, max_failed_frac=1.0, error_value=0.0
    ) as judge:
        judge.score(samples)
    assert [item.reward for item in samples] == [1.0, 0.0, 1.0]
    assert ("CalledProcessError" if way == "program" else "reward.memory_limit_mb=400") in samples[1].reward_error


def test_exceptions_cannot_steer_the_terminal():
    samples = [rollout("x", uid=index) for index in range(3)]
    with scorer(f"{HERE}:steers_the_terminal") as judge, pytest.raises(UserError) as told:
        judge.score(samples)
    assert str(told.value).isprintable()
    assert r"\x1b]0;title\x07" in str(told.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("exact", "there is no 'exact'. Did you mean 'exact_match'"),
        ("scorer", "there is no 'scorer'"),
        ("nowhere.rewards:f", "'nowhere.rewards:f' does not import"),
        (f"{HERE}:nothing", "has no 'nothing'"),
        (f"{HERE}:NOT_A_FUNCTION", "is a int, expected a function"),
        (("exact_match", 1.0, {"stripp": True}), "unexpected keyword argument 'stripp'.* parameters are .*strip"),
        ((f"{HERE}:num_chars", 1.0, {"answer": "3"}), "multiple values for keyword argument 'answer'"),
        (("length", 1.0, {}), "missing a required argument: 'target'"),
        (("regex", 1.0, {}), "missing a required argument: 'pattern'"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_the_start(function, message):
    with pytest.raises(UserError, match=message):
        scorer(function)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("raise RuntimeError('no key')", "does not import: RuntimeError: no key"),
        ("import os; os._exit(4)", r"a worker died while it started \(exit status 4\)"),
    ],
)
def test_modules_that_fail_to_import_are_refused_at_the_start(tmp_path, monkeypatch, content, message):
    (tmp_path / "broken_reward.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=message):
        scorer("broken_reward:f")


def test_no_function_is_refused():
    with pytest.raises(UserError, match=r"reward.functions is empty"):
        scorer()


def test_a_function_may_say_more_than_its_value():
    samples = [rollout("verl"), rollout("verl")]
    with scorer(f"{HERE}:says_more", ("exact_match", 2.0, {})) as judge:
        judge.score(samples)
    assert samples[0].reward == 0.5 and samples[0].reward_parts == {"says_more": 0.5, "exact_match": 0.0}
    assert samples[0].reward_facts == {"score": 0.5, "acc": 1.0, "pred": "7", "tries": 3.0}


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("empty", "a mapping without 'score'"),
        ("text", "it returned str '1', expected a number"),
        ("nan", "it returned nan"),
        ("key", r"the key str 'a\nb', expected a name"),
        ("many", "a mapping with 101 keys, expected at most"),
    ],
)
def test_a_mapping_that_says_no_value_or_no_names_fails_its_sample(response, problem):
    samples = [rollout(response), rollout("verl")]
    with scorer(f"{HERE}:says_more") as judge:
        judge.score(samples)
    assert problem in samples[0].reward_error and samples[0].reward_facts == {}
    assert samples[1].reward_error is None
