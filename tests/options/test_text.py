"""Text that is safe on a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishleg.options.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\x07\x7f\x9b\x00", r"a\x07\x7f\x9b\x00"),
        ("\u202egnp.exe\u2069", r"\u202egnp.exe\u2069"),
        ("\udc80", r"\udc80"),
        ("a\tb\nc", "a\tb\nc"),
        ("a\r\nb", "a\\r\nb"),
        ("γ × 漢字 é", "γ × 漢字 é"),
    ],
)
def test_what_could_control_the_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_name_stays_on_its_line() -> None:
    assert printable("a\nb\tc", one_line=True) == r"a\nb\tc"


@given(st.text(st.characters()))
def test_any_text_can_be_printed(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert printable(shown) == shown
    kinds = {unicodedata.category(character) for character in printable(text, one_line=True)}
    assert not kinds & {"Cc", "Cs"}  # control characters, surrogates
