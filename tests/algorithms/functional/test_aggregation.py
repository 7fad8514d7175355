"""Token weights: goldens by hand, and independence of how the minibatch is split."""

import pytest
import torch

from mrl.algorithms.functional.aggregation import token_weights

MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
LENS = [3, 1, 4, 2]
MASK_R = torch.tensor([True, True, False] + [True] + [True] * 4 + [False, False])
SEQUENCE_R = torch.arange(4).repeat_interleave(torch.tensor(LENS))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        # 7 trained tokens; 3 sequences have any (2, 1 and 4 of them); the norm length is 8
        ("token_mean", [1 / 7, 1 / 7, 1 / 7]),
        ("seq_mean_token_mean", [1 / 2 / 3, 1 / 3, 1 / 4 / 3]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_sum_norm", [1 / 24, 1 / 24, 1 / 24]),
    ],
)
def test_weights_by_hand(mode: str, want: list[float]) -> None:
    weights_R, metric_R = token_weights(MASK_R, SEQUENCE_R, 4, mode, _alone, norm_length=8)  # type: ignore[arg-type]
    a, b, c = want
    torch.testing.assert_close(weights_R, torch.tensor([a, a, 0, b, c, c, c, c, 0, 0]))
    torch.testing.assert_close(metric_R, MASK_R.float() / 7)


@pytest.mark.parametrize("mode", MODES)
def test_weights_do_not_depend_on_the_data_parallel_split(mode: str) -> None:
    whole_R, whole_metric_R = token_weights(MASK_R, SEQUENCE_R, 4, mode, _alone, norm_length=8)  # type: ignore[arg-type]
    parts = [(MASK_R[:4], SEQUENCE_R[:4], 2), (MASK_R[4:], SEQUENCE_R[4:] - 2, 2), (MASK_R[:0], SEQUENCE_R[:0], 0)]
    contributions: list[torch.Tensor] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        contributions.append(tensor)
        return tensor

    for part in parts:
        token_weights(*part, mode, record, norm_length=8)  # type: ignore[arg-type]
    total = torch.stack(contributions).sum(0)
    split = [token_weights(*part, mode, lambda _: total, norm_length=8) for part in parts]  # type: ignore[arg-type]
    assert torch.equal(torch.cat([weights for weights, _ in split]), whole_R)
    assert torch.equal(torch.cat([metric for _, metric in split]), whole_metric_R)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_trained_gives_zero_weights_and_no_nan(mode: str) -> None:
    weights_R, metric_R = token_weights(torch.zeros(10, dtype=torch.bool), SEQUENCE_R, 4, mode, _alone, norm_length=8)  # type: ignore[arg-type]
    assert weights_R.tolist() == [0.0] * 10
    assert metric_R.tolist() == [0.0] * 10


def test_wrong_mode_and_missing_norm_length_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        token_weights(MASK_R, SEQUENCE_R, 4, "mean", _alone)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm_length"):
        token_weights(MASK_R, SEQUENCE_R, 4, "seq_mean_token_sum_norm", _alone)
