"""Numbers as people read them."""

from mrl.observability.text_format import format_count


def test_one_is_told_from_many():
    assert [format_count(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
