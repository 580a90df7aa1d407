"""Unknown settings are refused with the closest one."""

from __future__ import annotations

import pytest

from energon_lite import Buckets, ModalitySplit, Packing


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (Packing, {"capacity": 8, "algoritm": "best"}, "Did you mean 'algorithm'?"),
        (Buckets, {"overlng": "drop"}, "Did you mean 'overlong'?"),
        (ModalitySplit, {"windw": 8}, "Did you mean 'window'?"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_closest(kind, settings, words) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no setting") as caught:
        kind(**settings)
    assert str(caught.value).endswith(words)
