"""Ranks that read other training rows are refused before the first step."""

from types import SimpleNamespace

import torch.distributed as dist

from mrl.errors import UserError
from mrl.trainer.startup import _check_same_data
from tests.ranks import run_ranks


def agree(fingerprints):
    try:
        _check_same_data(SimpleNamespace(source=SimpleNamespace(fingerprint=fingerprints[dist.get_rank()])))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_other_rows_are_refused_on_every_rank():
    assert run_ranks(2, agree, ["a+b", "a+b"]) == ["", ""]
    first, second = run_ranks(2, agree, ["a+b", "a+c"])
    assert first == second and first.startswith("rank 1 reads other training data")
