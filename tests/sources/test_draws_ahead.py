"""The next draws of a blend that are read together equal what cursors of its sources return."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.core.dataset import StreamRun
from energon_lite.core.state import Snapshot
from energon_lite.core.topology import Stream
from energon_lite.sources import draws_ahead
from energon_lite.sources.dataset_config import load_factory
from energon_lite.sources.draws_ahead import DrawsAhead
from energon_lite.stages.batching import BatchLists
from energon_lite.stages.blend import BlendDataset
from energon_lite.storage import many_readers

from ..conftest import write_tar
from ..helpers import caption_set, prepared, text_set, through_json

TEXTS = st.sampled_from([b"", b"abc", b"abc", "zwölf".encode(), b"\xff\xfe", b"x" * 3000])
# Of one source: the folder in the names of its samples, another part beside the text, and texts.
SOURCES = st.tuples(
    st.sampled_from(["", "", "", "a/"]),
    st.sampled_from([(), (), (), ("jpg",)]),
    st.lists(TEXTS, min_size=1, max_size=30),
)


def source_of(path: Path, *, repeat: bool = True) -> Any:
    factory = load_factory(path, split_part="train", training=True)
    return factory.build(shuffle_buffer_size=10, repeat=repeat)


def lists_of(run: StreamRun[Any], num: int) -> list[Any]:
    """Returns samples, keys, states and draws of the next lists of a stream."""
    found: list[Any] = []
    for samples in islice(run, num):
        draws = [(row[0], row[1]) for row in run.context.take_costs() if row[1]]
        found.append((samples, run.key, run.snapshot().to_json(), draws))
    return found


def run_of(blend: Any, size: int) -> StreamRun[Any]:
    return StreamRun(BatchLists(blend, size), Stream(1, 3), max_skip_rate=1)


def alone(blend: Any, num: int, size: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrawsAhead, "_is_for_all", lambda self, source: False)
        run = run_of(blend, size)
        return [*lists_of(run, num), run.context.take_records()]


@given(
    sources=st.lists(SOURCES, min_size=2, max_size=5),
    size=st.integers(1, 50),
    repeat=st.booleans(),
    first=st.integers(0, 12),
)
@settings(max_examples=10, deadline=None)
def test_equal_to_sources_that_are_read_alone_and_after_a_resume(
    sources: list[Any], size: int, repeat: bool, first: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws_ahead, "_ALONE", 5)
        parts = []
        for number, (lead, others, texts) in enumerate(sources):
            root = Path(folder) / f"set{number}"
            root.mkdir()
            members = [
                (f"{lead}{number}{i:03d}.{part}", text)
                for i, text in enumerate([b"whole", *texts])
                for part in (*others, "txt")
            ]
            write_tar(root / "a.tar", members)
            source = source_of(prepared(root, "TextSample", {"text": "txt"}), repeat=repeat)
            parts.append((source, 1.0 + number))
        blend = BlendDataset(*parts)
        expected = alone(blend, 25, size)
        run = run_of(blend, size)
        start = lists_of(run, first)
        resumed = run_of(blend, size)
        resumed.restore(Snapshot.from_json(through_json(run.snapshot().to_json())))
        assert [*start, *lists_of(run, 25 - first), run.context.take_records()] == expected
        # Draws of sources that have ended are passed over earlier or later: states may differ.
        rest = expected[min(first, len(expected) - 1) : -1]
        assert [row[:2] for row in lists_of(resumed, 25 - first)] == [row[:2] for row in rest]


def test_pictures_and_texts_in_one_blend(tmp_path) -> None:
    texts = [source_of(text_set(tmp_path / name, 50)) for name in "ab"]
    pictures = source_of(caption_set(tmp_path / "pictures", 20))
    blend = BlendDataset((texts[0], 3.0), (pictures, 1.0), (texts[1], 2.0))
    expected = alone(blend, 40, 8)
    found = lists_of(run_of(blend, 8), 40)
    assert [row[1:] for row in found] == [row[1:] for row in expected[:-1]]


@pytest.mark.parametrize("is_cached", [True, False])
def test_draws_are_read_together_unless_storage_is_slow(tmp_path, monkeypatch, is_cached) -> None:
    is_filled = many_readers._is_filled
    if not is_cached:
        monkeypatch.setattr(
            many_readers, "_is_filled", lambda *given: given[-1] == 0 and is_filled(*given)
        )
    blend = BlendDataset(*((source_of(text_set(tmp_path / n, 40)), 1.0) for n in "abcdefgh"))
    expected = alone(blend, 30, 16)
    run = run_of(blend, 16)
    assert lists_of(run, 30) == expected[:-1]
    cursor: Any = run._cursor
    is_alone = len(cursor.inner._opened) > 0
    assert is_alone != is_cached
