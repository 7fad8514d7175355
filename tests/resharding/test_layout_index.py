"""Regions and widths of what layouts hold, by Hugging Face name."""

from mrl.resharding.layout import Piece, StoredTensor
from mrl.resharding.layout_index import distinct_layouts, item_bytes, regions_by_name

UPPER, LOWER = ((0, 2), (0, 3)), ((2, 4), (0, 3))


def holds(name, *regions, dtype):
    pieces = tuple(Piece(name, region, region) for region in regions)
    return {f"stored {name}": StoredTensor((4, 3), dtype, pieces)}


def test_regions_of_a_tensor_come_together():
    assert regions_by_name(holds("a", UPPER, LOWER, dtype="bfloat16")) == {"a": [UPPER, LOWER]}


def test_an_element_is_as_wide_as_where_it_is_stored_narrowest():
    wide, narrow = holds("a", UPPER, dtype="float32"), holds("a", LOWER, dtype="bfloat16")
    assert item_bytes([wide, narrow]) == item_bytes([narrow, wide]) == {"a": 2}


def test_layouts_that_ranks_share_come_once():
    shared, other = holds("a", UPPER, dtype="float32"), holds("a", UPPER, dtype="float32")
    assert [id(layout) for layout in distinct_layouts({0: shared, 1: other, 2: shared})] == [id(shared), id(other)]
