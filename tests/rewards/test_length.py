import pytest

from mrl.rewards.length import length

ROUNDING = 1e-12  # a cosine in fp64


def score(tokens, **kwargs):
    extra = {"response_length": tokens}
    return length(prompt="", response="", answer=None, extra=extra, **({"target": 100, "limit": 200} | kwargs))


@pytest.mark.parametrize(
    ("tokens", "linear", "cosine"),
    [(1, 0, 0), (100, 0, 0), (125, -0.25, -0.1464466094067262), (150, -0.5, -0.5), (200, -1, -1), (900, -1, -1)],
)
def test_the_penalty_grows_from_target_to_limit(tokens, linear, cosine):
    assert score(tokens) == pytest.approx(linear, abs=ROUNDING)
    assert score(tokens, shape="cosine", penalty=2.0) == pytest.approx(2 * cosine, abs=ROUNDING)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"limit=100 must be above target=100"):
        score(1, limit=100)
    with pytest.raises(ValueError, match=r"shape='step'"):
        score(150, shape="step")
