"""Geometry3K (Lu et al., 2021): geometry problems with figures; refused, since mrl trains on text only."""

from __future__ import annotations

from mrl.data.public_sets.base import HubFiles, PublicSet, Row, UnusableRowError

REFUSAL = "its questions need their images, and mrl trains on text only. Use a data set without images, such as math"


def recognizes(row: Row) -> bool:
    """Returns whether a row has images and a problem."""
    return "images" in row and "problem" in row


def convert(row: Row) -> Row:
    """Raises UnusableRowError for every row."""
    raise UnusableRowError(REFUSAL)


DATA_SET = PublicSet(
    description="geometry problems with figures: refused, mrl trains on text only",
    train=(HubFiles("hf://datasets/hiyouga/geometry3k/data/train-*.parquet"),),
    val=(HubFiles("hf://datasets/hiyouga/geometry3k/data/test-*.parquet"),),
    recognizes=recognizes,
    convert=convert,
    reward={"name": "math"},
    prompt_length=1024,
    response_length=2048,
    refusal=REFUSAL,
)
