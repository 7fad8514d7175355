"""Shared prefixes against the definition: a token is its sequence up to and with it."""

import pytest
import torch

from mrl.data.shared_prefix import each_token, shared_prefixes


def histories(sequences):
    return [tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))]


CASES = {
    "samples of a prompt": [[5, 6, 7, 1, 2], [5, 6, 7, 1, 3], [5, 6, 7, 4]],
    "equal, and one the start of another": [[1, 2, 3], [1, 2], [1, 2, 3], [1]],
    "same token after other tokens": [[1, 2, 3], [2, 2, 3], [3, 2, 3]],
    "large ids, not in order of bytes": [[256, 1], [1, 256], [256, 1, 255], [65536, 1]],
    "one": [[4, 4, 4]],
    "none": [],
    "random": [
        torch.randint(0, 2, (1 + i % 9,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(60)
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_one_exactly_where_all_before_them_is_equal(name):
    sequences = CASES[name]
    tokens_P = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    distinct_P, origin_D = shared_prefixes(tokens_P, [len(sequence) for sequence in sequences])
    of = histories(sequences)
    assert origin_D.numel() == len(set(of))
    assert [of[origin_D[i]] for i in distinct_P.tolist()] == of
    assert distinct_P[origin_D].tolist() == list(range(origin_D.numel()))


def test_without_sharing_every_token_is_its_own():
    assert each_token(3).distinct_P.tolist() == each_token(3).origin_D.tolist() == [0, 1, 2]
