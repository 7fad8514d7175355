"""TACO (Li et al., 2023): programming problems with tests, https://huggingface.co/datasets/BAAI/TACO."""

from __future__ import annotations

from dataclasses import replace

from mrl.data.public_sets import apps
from mrl.data.public_sets.base import HubFiles, Row


def recognizes(row: Row) -> bool:
    """Returns False: `apps` recognizes the same columns."""
    return False


DATA_SET = replace(
    apps.DATA_SET,
    description="programming problems with tests: 25,443 for training, 1,000 held out",
    train=(HubFiles("hf://datasets/BAAI/TACO/ALL/train-*.parquet", "taco"),),
    val=(HubFiles("hf://datasets/BAAI/TACO/ALL/test-*.parquet", "taco"),),
    recognizes=recognizes,
)
