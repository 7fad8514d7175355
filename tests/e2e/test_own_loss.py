"""The loss of a user's own algorithm: what it must return, and what it may leave out."""

import contextlib
import io

import pytest

from tests.e2e import runs
from tests.ranks import run_ranks

ALGORITHM = """
import torch
from mrl.algorithms.grpo import Grpo

class Mine(Grpo):
    def loss(self, logprobs_R, entropy_R, microbatch):
        value, metrics = super().loss(logprobs_R, entropy_R, microbatch)
        return {returned}
"""
ADAPTIVE = "algorithm.entropy_ctrl={type: adaptive, target_entropy: 5.0, delta: 0.01}"


def run(folder, returned, *overrides):
    """Exit status of a step with this loss, and what it printed on standard error."""
    (folder / "mine.py").write_text(ALGORITHM.format(returned=returned))
    words = runs.arguments(
        folder,
        [f"algorithm.name={folder}/mine.py:Mine", "train={num_steps: 1, warm_start: {num_steps: 0}}", *overrides],
    )
    (found,) = run_ranks(1, status, words, [runs.free_port(), runs.free_port()])
    return found


def status(words, ports):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return runs.in_rank(words, ports), said.getvalue()


@pytest.mark.parametrize("metrics", ["{}", "{'actor/mine': value.detach()}"])
def test_a_loss_need_not_report_what_mrls_own_do(metrics, tmp_path):
    assert run(tmp_path, f"value, {metrics}")[0] == 0
    assert runs.metrics(tmp_path)


def test_an_adaptive_coefficient_needs_the_entropy(tmp_path):
    found, said = run(tmp_path, "value, {}", ADAPTIVE)
    assert found == 2 and "actor/entropy" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "returned",
    ["None", "value", "(value, metrics, 1)", "(value, None)", "(value, [1.0])", "(1.0, metrics)",
     "(logprobs_R, metrics)", "(value, {'a': 1.0})", "(value, {'a': logprobs_R})", "(value, {'a': None})"],
)  # fmt: skip
def test_anything_but_a_scalar_and_a_dict_of_scalars_is_refused(returned, tmp_path):
    found, said = run(tmp_path, returned)
    assert found == 2 and "the algorithm's loss must return" in said and "Traceback" not in said
