"""A JSON file of others is an object with values of exactly the expected types."""

from __future__ import annotations

import pytest

from titanlite.config.json_file import expect


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ([], r"\[\] is not an object"),
        ({}, "step is missing"),
        ({"step": "3"}, "step is '3', not an integer"),
        ({"step": 3.0}, "step is 3.0, not an integer"),
        ({"step": True}, "step is True, not an integer"),  # which Python takes for one
    ],
)
def test_a_value_of_another_type_is_told(tree: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        expect(tree, step=int)


def test_values_of_the_expected_types_pass() -> None:
    expect({"step": 3, "finite": True, "more": None}, step=int, finite=bool)
