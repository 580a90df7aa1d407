"""Every sample has one place in the order of the files, and that of the run is the run's."""

from __future__ import annotations

from itertools import islice

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.preview.browse import Place, Query, SplitBrowser, split_names_of

from ..conftest import write_tar
from ..helpers import caption_set, prepared, text_set
from .sets import blend


def keys_of(browser, entries):
    samples = (browser.sample(place) for _, place in entries)
    return [s["__key__"] if isinstance(s, dict) else s.__key__ for s in samples]


def all_of(browser, query, count=7):
    """All samples of a query, page by page."""
    entries, at = [], 0
    while at is not None:
        found = browser.search(query, at, count)
        assert len(found.entries) <= count
        entries += found.entries
        at = found.next
    return entries


def test_the_order_of_the_files_has_each_sample_once(tmp_path):
    browser = SplitBrowser(text_set(tmp_path, 50), "train")
    entries = all_of(browser, Query())
    assert keys_of(browser, entries) == [f"{i:05d}" for i in range(50)]
    assert [browser.position(place) for _, place in entries] == list(range(50))


def test_a_source_of_a_blend_has_its_own_samples(tmp_path):
    browser = SplitBrowser(blend(tmp_path), "train")
    assert [(s.facts.name, s.facts.num_samples, s.facts.loss_weight) for s in browser.sources] == [
        ("texts", 60, 0.5), ("pictures", 20, 1.0),
    ]  # fmt: skip
    assert [s.share for s in browser.sources] == pytest.approx([0.75, 0.25])
    assert browser.sources[0].subflavors == {"kind": "text"}
    assert len(all_of(browser, Query())) == 80
    pictures = all_of(browser, Query(source=1))
    assert [place.source for _, place in pictures] == [1] * 20
    assert browser.bounds(Query(source=1)) == (60, 80)
    assert browser.place(Query(source=1), 59) is None
    back = browser.search(Query(source=1), 65, 100, step=-1).entries
    assert [position for position, _ in back] == [65, 64, 63, 62, 61, 60]


@pytest.mark.parametrize(("num_streams", "batch_size"), [(1, 1), (3, 2)])
def test_the_order_of_the_run_is_that_of_its_batches(tmp_path, num_streams, batch_size):
    path = blend(tmp_path)
    browser = SplitBrowser(
        path, "train", num_streams=num_streams, batch_size=batch_size,
        shuffle_buffer_size=10, seed_offset=5,
    )  # fmt: skip
    entries = browser.search(Query("run"), 0, 120, limit_sec=300).entries
    config = WorkerConfig(
        rank=0, world_size=1, num_workers=0, num_streams=num_streams, seed_offset=5
    )
    dataset = get_train_dataset(
        path, batch_size=batch_size, worker_config=config, shuffle_buffer_size=10,
        task_encoder=Keys(),
    )  # fmt: skip
    expected = []
    for batch in islice(get_savable_loader(dataset), 120 // batch_size):
        expected += batch.__key__
    assert keys_of(browser, entries) == expected
    assert {place.source for _, place in entries} == {0, 1}
    with pytest.raises(ValueError, match="5,000,000"):
        browser.place(Query("run"), 10**12)
    # From anywhere, also back.
    assert browser.place(Query("run"), 3) == entries[3][1]


class Keys(DefaultTaskEncoder):
    """Samples of all sources become texts, which fit in one batch."""

    @stateless
    def encode_sample(self, sample):
        return TextSample.derive_from(sample, text=sample.__key__)


def test_without_an_order_of_the_run_the_files_can_be_seen(tmp_path):
    text_set(tmp_path / "a", 5)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    (tmp_path / "m.yaml").write_text(head + "    blend: [{path: ./a}]\n    unit: tokens\n")
    browser = SplitBrowser(tmp_path / "m.yaml", "train")
    assert "lengths" in browser.run_error
    assert len(all_of(browser, Query())) == 5
    with pytest.raises(ValueError, match="lengths"):
        browser.search(Query("run"), 0, 1)


def test_a_key_is_found_where_its_sample_is(tmp_path):
    path = blend(tmp_path)
    browser = SplitBrowser(path, "only_b")
    for number in (0, 7, 19):
        place = browser.find(f"{number:05d}")
        assert keys_of(browser, [(0, place)]) == [f"{number:05d}"]
        assert browser.place(Query(), browser.position(place)) == place
    for missing in ("", "99999", "\udc80", "a'b"):
        assert browser.find(missing) is None


def test_keys_of_other_splits_of_subsets_and_excluded_samples_are_not_found(tmp_path):
    root = text_set(tmp_path / "a", 30)
    split = root / ".nv-meta" / "split.yaml"
    text = split.read_text()
    split.write_text(text.replace("exclude: []", "exclude: [shard-000.tar/00002]"))
    browser = SplitBrowser(root, "train")
    assert browser.find("00002") is None
    keys = keys_of(browser, all_of(browser, Query()))
    assert keys == [f"{i:05d}" for i in range(30) if i != 2]
    for key in ("00001", "00003", "00029"):
        assert keys_of(browser, [(0, browser.find(key))]) == [key]
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    (tmp_path / "m.yaml").write_text(head + "    path: ./a\n    subset: {range: [10, 20]}\n")
    part = SplitBrowser(tmp_path / "m.yaml", "train")
    assert keys_of(part, all_of(part, Query())) == [f"{i:05d}" for i in range(10, 20)]
    assert part.find("00005") is None
    assert part.position(part.find("00012")) == 2


def test_search_looks_in_keys_and_texts_and_can_go_on(tmp_path):
    browser = SplitBrowser(text_set(tmp_path, 60), "train")
    found = all_of(browser, Query(text="TEXT 4"))
    assert keys_of(browser, found) == ["00004", *(f"{i:05d}" for i in range(40, 50))]
    assert keys_of(browser, all_of(browser, Query(text="00013"))) == ["00013"]
    first = browser.search(Query(text="no such text"), 0, 5, limit_sec=0)
    assert first.entries == []
    assert first.next == 0
    assert browser.search(Query(text="no such text"), 0, 5).next is None


def test_other_kinds_of_datasets_open(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    browser = SplitBrowser(tmp_path / "x.jsonl", "train")
    assert len(all_of(browser, Query())) == 2
    assert len(all_of(browser, Query(text="two"))) == 1
    assert browser.find("0") is None
    write_tar(tmp_path / "v" / "a.tar", [("0.txt", b"a")])
    root = prepared(tmp_path / "v", "CrudeWebdataset")
    assert browser.sample(Place(0, 0))["__key__"]
    assert next(iter(split_names_of(root))) == "train"
    with pytest.raises(ValueError, match="no source 7"):
        browser.sample(Place(7, 0))
    with pytest.raises(ValueError, match="samples 0"):
        browser.sample(Place(0, 99))


def test_pictures_stay_bytes(tmp_path):
    browser = SplitBrowser(caption_set(tmp_path, 4), "train")
    assert isinstance(browser.sample(Place(0, 0)).image, bytes)
    trusted = SplitBrowser(tmp_path, "train", trust=True)
    assert trusted.sample(Place(0, 0)).image.shape == (3, 16, 24)


def test_only_datasets_that_need_trust_are_raw(tmp_path, monkeypatch):
    for name in "ab":
        text_set(tmp_path / name, 9)
    (tmp_path / "own_code.py").write_text("raise AssertionError('code of the dataset ran')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a/.nv-meta/dataset.yaml").write_text("__module__: own_code\n__class__: Own\n")
    own = "{__module__: own_code, __function__: join}"
    members = [
        f"{{weight: 1, join: [{{path: ./b}}, {{path: ./a}}], joiner: {own}, name: joined}}",
        "{weight: 1, path: ./b}",
        "{weight: 1, path: ./a, name: own}",
    ]
    (tmp_path / "blend.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        + "".join(f"    - {member}\n" for member in members)
    )
    browser = SplitBrowser(tmp_path / "blend.yaml", "train")
    assert "joined, own. " in browser.raw
    samples = [browser.at(Query(source=number), 9 * number) for number in range(3)]
    assert [type(sample).__name__ for sample in samples] == [
        "CrudeSample", "TextSample", "CrudeSample",
    ]  # fmt: skip
    assert samples[2]["txt"] == "text 0 "
    assert not SplitBrowser(tmp_path / "b", "train").raw
