"""Results as JSON and pictures, written over one's own files only."""

import json

from hypothesis import given
from hypothesis import strategies as st

from fishleg.formats import results

JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)


@given(JSON)
def test_json_is_laid_out_and_nothing_else(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "x.json"
    results.write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value


def test_lists_of_numbers_take_one_line(tmp_path):
    results.write_json(tmp_path / "x.json", {"a": [1, 2.5, None], "b": ["x  y", "[\n"]})
    assert (
        tmp_path / "x.json"
    ).read_text() == '{\n "a": [ 1, 2.5, null ],\n "b": [\n  "x  y",\n  "[\\n"\n ]\n}\n'


def test_json_has_no_bare_nan(tmp_path):
    nan, inf = float("nan"), float("inf")
    results.write_json(tmp_path / "x.json", {"a": nan, "b": [1.0, -inf, (nan,)], "c": {"d": inf}})
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "a": None,
        "b": [1, None, [None]],
        "c": {"d": None},
    }


def test_files_of_others_are_found(tmp_path):
    table, picture = tmp_path / "x.json", tmp_path / "x.png"
    assert results.foreign_file(table, "me", picture) is None
    picture.touch()
    assert results.foreign_file(table, "me", picture) == picture
    for text in ("", "[]", '{"made_by": "you"}', "[" * 100_000):
        table.write_text(text)
        assert results.foreign_file(table, "me", picture) == table
    results.write_json(table, {"made_by": "me"})
    assert results.foreign_file(table, "me", picture) is None
