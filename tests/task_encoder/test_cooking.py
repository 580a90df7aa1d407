"""Cookers: which one is chosen, and what it gets."""

from __future__ import annotations

from typing import Any

import pytest

from energon_lite.core.samples import CrudeSample, SourceInfo, TextSample
from energon_lite.task_encoder.cooking import (
    Cooker,
    basic_sample_keys,
    cooker,
    find_cooker,
    get_cooker_need_cache,
    get_cooker_need_primary,
)

SOURCE = SourceInfo("set", 0, "a.tar", ("k.txt",))


def cook(sample: CrudeSample) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


@pytest.mark.parametrize(
    ("wanted", "given", "is_match"),
    [
        (None, None, True),
        (None, {"a": 1}, True),
        ({}, None, True),
        ({"a": 1}, None, False),
        ({"a": 1}, {}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": None}, {}, False),
    ],
)
def test_cooker_matches_if_the_dataset_has_all_its_subflavors(
    wanted: Any, given: Any, is_match: bool
) -> None:
    assert Cooker(cook, has_subflavors=wanted).is_match(given) is is_match


def test_first_matching_cooker_is_chosen() -> None:
    first, second, third = Cooker(cook, {"a": 1}), Cooker(cook, {"a": 2}), Cooker(cook)
    assert find_cooker([first, second, third], {"a": 2}, "set") is second
    assert find_cooker([first, second, third], None, "set") is third


def test_missing_cookers_are_reported_with_the_dataset_and_its_subflavors() -> None:
    with pytest.raises(ValueError, match=r"demo\.yaml, train: .*no cookers registered"):
        find_cooker([], {"a": 1}, "demo.yaml, train")
    with pytest.raises(ValueError, match=r"set: No cooker found for subflavors: \{'a': 1\}.*cook"):
        find_cooker([Cooker(cook, {"a": 2})], {"a": 1}, "set")


@pytest.mark.parametrize("name", ["cache", "primary"])
def test_function_that_needs_a_cache_or_the_store_of_its_dataset_is_marked(name: str) -> None:
    @cooker(**{f"need_{name}": True})
    def marked(sample: CrudeSample, **stores: Any) -> None: ...

    for function, needs in ((marked, True), (cook, False)):
        found = (get_cooker_need_cache(function), get_cooker_need_primary(function))
        assert found == (needs and name == "cache", needs and name == "primary")
        assert found == (Cooker(function).need_cache, Cooker(function).need_primary)


def test_decorator_does_not_change_other_functions() -> None:
    assert cooker(cook) is cooker()(cook) is cooker(need_cache=False)(cook) is cook


def test_basic_sample_keys_are_the_service_fields_that_are_there() -> None:
    crude = CrudeSample(
        __key__="k", __shard__="a.tar", __restore_key__=("Webdataset", 0), __subflavors__=None,
        __sources__=(SOURCE,), __loss_weight__=0.5, txt="t",
    )  # fmt: skip
    sample = cook(crude)
    assert sample.__loss_weight__ == 0.5
    assert sample.__sources__ == (SOURCE,)
    assert basic_sample_keys(CrudeSample(__key__="k", txt="t")) == {"__key__": "k"}


def test_additional_sources_are_appended() -> None:
    more = SOURCE._replace(index="extra")
    assert basic_sample_keys({"__sources__": (SOURCE,)}, [more])["__sources__"] == (SOURCE, more)
    assert basic_sample_keys({"__key__": "k"}, (more,))["__sources__"] == (more,)
