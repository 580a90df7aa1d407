from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError
from energon_lite.storage import yaml
from energon_lite.storage.yaml import YamlMap, check_keys, dump_yaml, load_yaml, parse_yaml

SCALARS = [
    ("yes", True), ("TRUE", True), ("nO", False), ("False", False),
    ("on", "on"), ("Off", "Off"), ("y", "y"),
    ("null", None), ("NULL", None), ("~", None), ("", None),
    ("010", 10), ("+5", 5), ("-0", 0), ("1_000", 1000), ("1__0", "1__0"),
    ("0x10", "0x10"), ("0o17", "0o17"), ("1:30", "1:30"), ("2020-01-01", "2020-01-01"),
    (".inf", ".inf"), ("inf", "inf"), ("-infinity", "-infinity"), (".nan", ".nan"), ("nan", "nan"),
    ("1e3", 1000.0), ("1E-3", 0.001), (".5", 0.5), ("1.", 1.0), ("1_0.5", 10.5),
    ("'5'", "5"), ('"yes"', "yes"), ("''", ""), ("!!str 5", 5), ("5 # five", 5),
    ("9" * 2000, "9" * 2000),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_read_as_energon_reads_them(text, value):
    found = parse_yaml(f"key: {text}\n", "x.yaml")["key"]
    assert found == value
    assert type(found) is type(value)


def test_numbers_words_and_nulls_as_keys_become_strings():
    value = parse_yaml("5: a\nyes: b\n~: c\n5.0: d\n", "x.yaml")
    assert value == {"5": "a", "yes": "b", "~": "c", "5.0": "d"}


def test_anchors_aliases_and_merge_keys_are_resolved():
    text = """
    base: &base {weight: 1, path: a}
    same: *base
    other:
      <<: *base
      path: b
    several:
      <<: [*base, {weight: 2, extra: 3}]
    """
    value = parse_yaml(text, "x.yaml")
    assert value["same"] == {"weight": 1, "path": "a"}
    assert value["other"] == {"weight": 1, "path": "b"}
    assert value["several"] == {"weight": 1, "path": "a", "extra": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: the file is empty"),
        ("# only a comment\n", "x.yaml: the file is empty"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: a second document"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r"x.yaml:4: key 'c' is there twice \(first in line 3\)"),
        ("a: [1, 2\n", "x.yaml:2: no valid YAML"),
        ("a: 1\nb: !foo 1\n", "x.yaml:2: tag '!foo' is not supported"),
        ("a: !!python/object/apply:os.getcwd []\n", "x.yaml:1: tag"),
        ("a: &x [*x]\n", "x.yaml:1: an alias lies inside"),
        ("? [1]\n: 2\n", "x.yaml:1: a key must be a word"),
        ("a: *nothing\n", "x.yaml:1: no valid YAML"),
        ("a: \ud800\n", "x.yaml: no valid YAML"),
        ("<<: 5\n", "x.yaml:1: '<<' merges mappings only"),
    ],
)
def test_a_bad_document_is_refused_with_file_and_line(text, message):
    with pytest.raises(DatasetFormatError, match=message):
        parse_yaml(text, "x.yaml")


def test_mappings_know_the_line_of_each_key():
    value = parse_yaml("---\na: 1\nb:\n  c: 2\n", "x.yaml")
    assert isinstance(value["b"], YamlMap)
    assert value.lines == {"a": 2, "b": 3}
    assert value["b"].place("c", "b.c") == "x.yaml:4, b.c"


def test_json_is_read_by_suffix_and_its_errors_name_file_and_line(tmp_path):
    file = tmp_path / "split.json"
    file.write_text('{"a": "yes", "b": [010]}')
    with pytest.raises(DatasetFormatError, match=r"split\.json:1: no valid JSON"):
        load_yaml(file)
    file.write_text('{"a": "yes", "b": {"c": null}}')
    assert load_yaml(file) == {"a": "yes", "b": {"c": None}}
    assert load_yaml(file)["b"].place("c", "b.c") == f"{file}, b.c"
    file.write_text('{"a": 1, "a": 2}')
    with pytest.raises(DatasetFormatError, match="key 'a' is there twice"):
        load_yaml(file)
    file.write_bytes(b"a: \xff\n")
    with pytest.raises(DatasetFormatError, match="no UTF-8"):
        load_yaml(file)


def test_an_unknown_key_is_named_with_file_line_path_and_the_closest_known_one():
    value = parse_yaml("splits:\n  train:\n    wieght: 1\n", "demo.yaml")
    with pytest.raises(DatasetFormatError) as caught:
        check_keys(value["splits"]["train"], ("weight", "path"), "splits.train")
    assert str(caught.value) == (
        "demo.yaml:3, splits.train: unknown key 'wieght'. Did you mean 'weight'?"
    )
    check_keys(value, ("splits",), "")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.sampled_from([text for text, _ in SCALARS]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), inner),
    max_leaves=8,
)  # fmt: skip


@given(plain)
def test_what_is_written_is_read_back_unchanged(value):
    assert parse_yaml(dump_yaml(value), "x.yaml") == value


def test_documents_of_equal_text_are_parsed_once_and_are_separate(monkeypatch):
    parsed, parser = [], yaml._Parser
    monkeypatch.setattr(yaml, "_Parser", lambda text: parsed.append(text) or parser(text))
    text = "equal: {a: 1}\nlist:\n- {b: x}\n- 2\n"
    first = parse_yaml(text, "first.yaml")
    first["equal"]["a"] = first["list"][0]["c"] = 3
    first["list"].append(4)
    second = parse_yaml(text, "second.yaml")
    assert second == {"equal": {"a": 1}, "list": [{"b": "x"}, 2]}
    places = second.place("list"), second["equal"].place("a"), second["list"][0].place("b")
    assert places == ("second.yaml:2, list", "second.yaml:1, a", "second.yaml:3, b")
    assert len(parsed) == 1
    for name in ("first.yaml", "second.yaml"):  # an error names its own file, also the second time
        with pytest.raises(DatasetFormatError, match=rf"^{name}:2: key 'a' is there twice"):
            parse_yaml("a: 1\na: 2\n", name)
