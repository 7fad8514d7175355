"""What a campaign calls good: equal numbers, or a refusal for a reason; nothing else."""

import pytest
from fuzz_layouts.cases import Case, Start
from fuzz_layouts.compare import ABSOLUTE, RELATIVE, TOKENS, judge
from fuzz_layouts.runner import Ended

CASE = Case(1, {}, [Start(2, {"parallel.tensor_model_parallel_size": 2})], [{}], {})
ROW = {"phase": "train", "step": 1, "actor/grad_norm": 2.0, TOKENS: 12.0, "refit/bytes_moved": 7.0}


def done(**changed):
    return Ended("done", 0, "", [{key: value for key, value in {**ROW, **changed}.items() if value is not None}])


def refused(message, start=0):
    return Ended("refused", start, message, [])


FAILED = Ended("failed", 0, "rank 1: KeyError: 'x'", [])


@pytest.mark.parametrize(
    ("alone", "spread", "name"),
    [
        (done(), done(), "same"),
        (done(), done(**{"actor/grad_norm": 2.0 * (1 + 0.9 * RELATIVE)}), "same"),
        (done(), done(**{"actor/grad_norm": 2.0 * (1 + 2 * RELATIVE)}), "differs"),
        (done(**{"actor/grad_norm": 0.0}), done(**{"actor/grad_norm": 0.9 * ABSOLUTE}), "same"),
        (done(), done(**{"actor/grad_norm": float("nan")}), "differs"),
        (done(), done(**{TOKENS: 12.0001}), "differs"),
        (done(), done(**{"refit/bytes_moved": 9.0}), "same"),
        (done(), done(**{"actor/grad_norm": None}), "differs"),
        (done(), done(step=2), "differs"),
        (refused("no"), refused("no"), "refused"),
        (done(), refused("parallel.tensor_model_parallel_size=2 does not divide"), "refused"),
        (done(), refused("train.batch_size=3 is odd"), "refused by one"),
        (refused("no"), done(), "refused by one"),
        (FAILED, FAILED, "failed"),
        (refused("no"), FAILED, "failed"),
    ],
)
def test_verdict(alone, spread, name):
    assert judge(CASE, alone, spread).name == name


@pytest.mark.parametrize(("grad_norm", "name"), [(1e-6, "same"), (0.0, "differs"), (2.0, "differs")])
def test_numbers_after_a_gradient_of_rounding_are_not_compared(grad_norm, name):
    def both(ppo_kl):
        second = {**ROW, "step": 2, "actor/ppo_kl": ppo_kl}
        return Ended("done", 0, "", [{**ROW, "actor/grad_norm": grad_norm}, second])

    assert judge(CASE, both(1e-3), both(2e-3)).name == name
    first = done(**{"actor/grad_norm": grad_norm})
    assert judge(CASE, first, done(**{"actor/grad_norm": grad_norm, "actor/ppo_kl": 1.0})).name == "differs"
