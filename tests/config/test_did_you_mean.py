"""The known name that an unknown one may have been meant for."""

from mrl.config.did_you_mean import did_you_mean, nearest


def test_the_most_alike_is_named_and_nothing_where_none_is_alike():
    assert did_you_mean("trian", ["rollout", "train", "trainer"]) == " Did you mean 'train'?"
    assert did_you_mean("trian", {"rollout": 1}) == ""
    assert nearest("cutlas", ["TRITON", "CUTLASS"]) == "CUTLASS"


def test_the_caller_says_how_alike_they_must_be():
    assert nearest("abcd", ["abxy"], 0.5) == "abxy"
    assert nearest("abcd", ["abxy"], 0.51) is None
