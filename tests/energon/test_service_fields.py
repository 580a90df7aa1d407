"""Energon's functions on the service fields; the results are those of Energon 7.4.1."""

from __future__ import annotations

import pytest

from energon_lite import TextSample
from energon_lite.flavors.base_dataset import add_sample_restore_key, set_sample_restore_key
from energon_lite.source_info import add_source_info, get_source_info
from energon_lite.wrappers.base import get_sample_restore_key


class Maker:
    pass


def test_sources_are_appended_in_place():
    sample = TextSample(__key__="k", __restore_key__=("a", 1), text="t")
    assert add_source_info(sample, "s") is sample
    add_source_info(sample, "t", "u")
    assert get_source_info(sample) == ["s", "t", "u"]
    assert add_source_info({}, "s") == {"__sources__": ("s",)}
    assert get_source_info(3) is None


def test_restore_keys_are_put_in_front_or_replaced():
    sample = TextSample(__key__="k", __restore_key__=("a", 1), text="t")
    assert add_sample_restore_key(sample, 5, src=Maker()) is sample
    assert sample.__restore_key__ == ("Maker", 5, "a", 1)
    set_sample_restore_key(sample, 7, src=Maker())
    assert get_sample_restore_key(sample) == ("Maker", 7)
    assert add_sample_restore_key({"__restore_key__": (1,)}, 5, src=Maker()) == {
        "__restore_key__": ("Maker", 5, 1)
    }
    assert add_sample_restore_key(3, 5, src=Maker()) == 3
    assert get_sample_restore_key({}) is None
    with pytest.raises(TypeError, match="Maker made a int without __restore_key__"):
        add_sample_restore_key(3, 5, src=Maker(), fail_otherwise=True)
