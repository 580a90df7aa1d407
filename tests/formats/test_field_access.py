"""Field maps: grammar, access and checks before the first sample."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.core.errors import DatasetFormatError, FieldAccessError
from energon_lite.core.samples import CaptioningSample, ImageClassificationSample, TextSample
from energon_lite.formats.field_access import FieldMap, check_fields

WHERE = "dataset.yaml, field_map"
NAME = st.text("abcxyz._-0 ", min_size=1, max_size=6).map(str.strip).filter(bool)


def parse(**mapping: str) -> FieldMap:
    return FieldMap(mapping, WHERE)


@given(part=NAME, path=st.lists(st.one_of(NAME, st.integers(0, 3)), max_size=4), value=st.none())
def test_every_nested_value_is_found_by_its_path(part: str, path: list[str | int], value: None):
    content: Any = value
    for key in reversed(path):
        content = [*["other"] * key, content] if isinstance(key, int) else {key: content}
    access = part + "".join(f"[{key}]" for key in path)
    field_map = parse(field=access)
    assert field_map.parts == {part}
    assert field_map.access({part: content}) == {"field": value}
    assert field_map.mapping == {"field": access}


@given(parts=st.lists(NAME, min_size=1, max_size=4, unique=True), data=st.data())
def test_first_alternative_that_is_there_wins(parts: list[str], data: st.DataObject) -> None:
    present = data.draw(st.lists(st.sampled_from(parts), min_size=1, unique=True))
    first = next(part for part in parts if part in present)
    field_map = parse(field=" , ".join(parts))
    assert field_map.access({part: part for part in present}) == {"field": first}


def test_alternatives_and_nesting_combine() -> None:
    field_map = parse(image="jpg,png", caption="json[a][0][b], txt")
    assert tuple(field_map.mapping) == ("image", "caption")
    assert field_map.parts == {"jpg", "png", "json", "txt"}
    nested = {"json": {"a": [{"b": "nested"}]}, "txt": "plain", "png": 1}
    assert field_map.access(nested) == {"image": 1, "caption": "nested"}
    plain = {"json": {"a": []}, "txt": "plain", "jpg": 2, "png": 1}
    assert field_map.access(plain) == {"image": 2, "caption": "plain"}


def test_dict_keys_stay_text_and_list_keys_become_positions() -> None:
    assert parse(x="json[0]").access({"json": {"0": "key"}}) == {"x": "key"}
    assert parse(x="json[0]").access({"json": ["position"]}) == {"x": "position"}
    assert parse(x="json[a],txt").access({"json": {"a": None}, "txt": 1}) == {"x": None}
    assert parse(x="seg.j[a,b][c.d]").access({"seg.j": {"a,b": {"c.d": 1}}}) == {"x": 1}


@pytest.mark.parametrize(
    ("access", "message"),
    [
        ("jpg", r"field 'x': jpg: no part 'jpg'\. The sample has the parts 'json', 'raw'"),
        ("jpg,png", "jpg: no part 'jpg'; png: no part 'png'"),
        ("json[a]", r"json\[a\]: no \[a\], json has the keys 'b'"),
        ("json[b][2]", r"json\[b\]\[2\]: no \[2\], json\[b\] is a list of 1"),
        ("json[b][k]", r"no \[k\], json\[b\] is a list of 1"),
        ("json[b][0][k]", r"json\[b\]\[0\] is of type str"),
        ("raw[a]", r"raw is bytes \(not decoded\)"),
    ],
)
def test_missing_value_is_reported_with_path_and_what_there_is(access: str, message: str) -> None:
    sample = {"__key__": "k", "json": {"b": ["text"]}, "raw": b""}
    with pytest.raises(FieldAccessError, match=message):
        parse(ok="json", x=access).access(sample)


ACCESS = ["", "a,", ",a", "a[", "a[]", "a]b", "[a]", "a[b]c", "a[b[c]]", [], ["jpg", 1], [["jpg"]],
          ["jpg]"], {"a": "b"}]  # fmt: skip
MAPPINGS: list[Any] = [None, {}, "jpg", ["jpg"], {"x": 3}, {"x": None}, {1: "a"}]


@pytest.mark.parametrize("mapping", [*MAPPINGS, *({"x": access} for access in ACCESS)])
def test_malformed_maps_are_refused_with_their_place(mapping: Any) -> None:
    place = r"\.x" if isinstance(mapping, dict) and mapping.get("x", 3) not in (3, None) else ""
    with pytest.raises(DatasetFormatError, match=rf"dataset\.yaml, field_map{place}"):
        FieldMap(mapping, WHERE)


def test_fields_are_checked_before_any_sample_is_read() -> None:
    check_fields(parse(text="txt"), TextSample, WHERE)
    check_fields(parse(text="txt", __key__="json[id]"), TextSample, WHERE)
    check_fields(parse(image="jpg"), ImageClassificationSample, WHERE)
    with pytest.raises(DatasetFormatError, match=r"no field 'captoin'. Did you mean 'caption'\?"):
        check_fields(parse(image="jpg", captoin="txt"), CaptioningSample, WHERE)
    with pytest.raises(DatasetFormatError, match=r"^dataset\.yaml.*ngSample needs.*'caption'"):
        check_fields(parse(image="jpg"), CaptioningSample, WHERE)
    with pytest.raises(DatasetFormatError, match="'__sources__' is set for every sample"):
        check_fields(parse(text="txt", __sources__="json"), TextSample, WHERE)
    with pytest.raises(DatasetFormatError, match="named like service fields, __url__, are not"):
        check_fields(parse(text="txt,__url__"), TextSample, WHERE)


# ------------------------------------------------------------------------------------------ lists


def test_a_list_takes_several_parts() -> None:
    mapping: dict[str, Any] = {"images": ["jpg.0", "jpg.1,png.1", "json[more][0]"], "text": "txt"}
    field_map = FieldMap(mapping, WHERE)
    assert tuple(field_map.mapping) == ("images", "text")
    assert field_map.parts == {"jpg.0", "jpg.1", "png.1", "json", "txt"}
    assert field_map.direct is None
    assert field_map.mapping == mapping
    sample = {"jpg.0": "a", "png.1": "b", "json": {"more": ["c"]}, "txt": "d"}
    for again in (field_map, pickle.loads(pickle.dumps(field_map))):
        assert again.paths == field_map.paths
        assert again.access(sample) == {"images": ["a", "b", "c"], "text": "d"}


@given(parts=st.lists(NAME, min_size=1, max_size=4), data=st.data())
def test_a_list_keeps_its_order_and_names_the_part_that_is_missing(parts, data):
    field_map = FieldMap({"images": parts}, WHERE)
    sample = {part: f"of {part}" for part in parts}
    assert field_map.access(sample) == {"images": [f"of {part}" for part in parts]}
    missing = data.draw(st.sampled_from(parts))
    del sample[missing]
    place = parts.index(missing)
    with pytest.raises(FieldAccessError, match=rf"field 'images\[{place}\]': .*no part"):
        field_map.access(sample)
