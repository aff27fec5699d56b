"""How errors and the texts that they quote become one line."""

from __future__ import annotations

from skipdecode.errors import CapacityError, shortened


def test_an_error_is_one_line_of_where_what_and_what_to_do() -> None:
    assert str(CapacityError("is\ttoo\nlong", "shorten it", where="file 3")) == "file 3: is too long; shorten it"
    assert str(CapacityError("it is too long")) == "it is too long"


def test_a_quoted_text_is_whole_where_it_fits_and_ends_in_dots_where_not() -> None:
    assert shortened("a name", 6) == "a name"
    assert shortened("longer", 5) == "lo..."
