"""A value of YAML against the annotation of a field, as text."""

import pytest

from mrl.config.type_annotations import choices, expected, fits


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("bool", [True], [1, "true", None]),
        ("int", [3], [True, 1.5, "3"]),
        ("Optional[float]", [1, 0.5, None], [True, "1"]),
        ("int | None", [3, None], ["3"]),
        ("Optional[List[str]]", [["a"], [], None], [["a", 1], "a"]),
        ("Optional[Tuple[int, int]]", [[1, 2]], [[1], [1, 2, 3]]),
        ("Literal['a', 'b']", ["a"], ["c", None]),
        ("Union[str, List[str]]", ["a", ["a"]], [1]),
        ("Optional[Callable]", [None], ["len"]),
        ("dict[str, int]", [], [{"a": 1}]),
    ],
)
def test_a_value_fits_what_the_annotation_says(kind, good, bad):
    assert [value for value in good if not fits(kind, value)] == []
    assert [value for value in bad if fits(kind, value)] == []


def test_a_type_of_the_callers_is_taken_by_its_names():
    assert fits("Optional[Colour]", "red", {"Colour": ["red"]}.get)
    assert not fits("Colour", "blue", {"Colour": ["red"]}.get)
    assert choices("Union[Colour, int]") == ["Colour", "int"]


def test_what_is_expected_is_said_in_words():
    assert expected("Optional[Union[int, List[str]]]") == "a whole number or a list of a string or null"
    assert expected("Literal['a', 'b'] | bool") == "one of a, b or true or false"
    assert expected("Colour", {"Colour": ["red", "green"]}.get) == "one of red, green"
    assert expected("Optional[Callable]") == ""
