"""JSONL files as datasets: alone, in metadatasets, with cookers, lengths, and damaged."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

from energon_lite import (
    Cooker,
    CrudeJsonlDatasetFactory,
    DefaultCrudeJsonlDatasetFactory,
    DefaultTaskEncoder,
    Packing,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.samples import SourceInfo
from energon_lite.core.topology import Stream
from energon_lite.extras.inspect.info import dataset_info
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.jsonl.jsonl import LineReader, line_index_path
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.formats.shards import ShardReader
from energon_lite.sources.dataset_config import load_factory

from ..helpers import Ranks, metadataset, text_of, text_set

NUM_SAMPLES = 23
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, seed_offset=5)


def lines(path: Path, num_samples: int = NUM_SAMPLES, *, broken: tuple[int, ...] = ()) -> Path:
    """Writes texts, the same as `text_set`; `broken` are no JSON."""
    rows = [json.dumps({"text": text_of(i), "n": i}) for i in range(num_samples)]
    for number in broken:
        rows[number] = rows[number][:-5]
    path.write_text("\n".join(rows) + "\n")
    return path


@stateless
def cook(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


@stateless
def cook_loud(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"].upper())


class Cooking(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(cook)]

    @stateless
    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


class Planning(Cooking):
    packing = Packing(capacity=40, lengths="default", overlong="alone")

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))


class BySubflavor(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(cook_loud, has_subflavors={"loud": True}), Cooker(cook)]


def making(path: Any, encoder: type[DefaultTaskEncoder] = Cooking, **options: Any) -> Any:
    def make(config: WorkerConfig) -> Any:
        settings = {"batch_size": 2, "task_encoder": encoder(), **options}
        return get_train_dataset(path, worker_config=config, **settings)

    return make


def texts_of(dataset: Any) -> list[str]:
    return [sample.text for sample in get_savable_loader(dataset)]


def val_texts(path: Any, encoder: type[DefaultTaskEncoder] = Cooking, **options: Any) -> list[str]:
    settings = {"batch_size": None, "task_encoder": encoder(), **options}
    return texts_of(get_val_dataset(path, worker_config=ONE, **settings))


EXPECTED = [text_of(i) for i in range(NUM_SAMPLES)]


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("split_part", ["train", "val", "anything"])
def test_all_lines_are_in_every_split_prepared_or_not(tmp_path, is_prepared, split_part) -> None:
    path = lines(tmp_path / "a.jsonl")
    if is_prepared:
        assert CrudeJsonlDatasetFactory.prepare_dataset(path) == NUM_SAMPLES
    assert val_texts(path, split_part=split_part) == EXPECTED


def test_crude_samples_have_energons_fields(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl")
    factory = DefaultCrudeJsonlDatasetFactory(path, training=False, subflavors={"a": 1})
    sample: Any = next(factory.build().cursor(Stream(0, 1)))
    assert sample == {
        "__key__": "0", "__shard__": "a.jsonl", "__restore_key__": ("a.jsonl/lines", 0, 0, 0),
        "__sources__": (SourceInfo(str(path), 0, "a.jsonl", ("0.json",)),),
        "__subflavors__": {"a": 1}, "json": {"text": text_of(0), "n": 0},
    }  # fmt: skip
    assert (len(factory), factory.paths, factory.subflavors) == (NUM_SAMPLES, [path], {"a": 1})
    for found in DefaultCrudeJsonlDatasetFactory(path).build():  # shuffled
        (source,) = found["__sources__"]
        assert (str(source.index), *source.file_names) == (found["__key__"], f"{source.index}.json")
    bare = CrudeJsonlDatasetFactory(path, training=False, part_filter=lambda part: part != "json")
    assert "json" not in next(bare.build().cursor(Stream(0, 1)))


def test_the_content_of_a_file_is_read_without_decoding_in_blocks_of_any_size(
    tmp_path, monkeypatch
):
    path = lines(tmp_path / "a.jsonl", broken=(4,))
    whole = list(CrudeJsonlDatasetFactory.iter_dataset_content(path))
    assert b"".join(part["json"] for part in whole) == path.read_bytes()
    assert len(whole) == NUM_SAMPLES
    monkeypatch.setattr(LineReader, "blocks", partialmethod(ShardReader.blocks, max_bytes=70))
    assert list(CrudeJsonlDatasetFactory.iter_dataset_content(path)) == whole


def test_the_same_texts_as_tar_and_as_jsonl_are_the_same_stream(tmp_path) -> None:
    tars, path = text_set(tmp_path / "tars", NUM_SAMPLES), lines(tmp_path / "a.jsonl")
    options = {"max_samples_per_sequence": 4, "name": "texts", "batch_size": None, "repeat": False}
    config = {"worker_config": ONE, "shuffle_buffer_size": 3}
    of_tars = get_train_dataset(tars, **options, **config)
    of_lines = get_train_dataset(path, **options, **config, task_encoder=Cooking())
    found = texts_of(of_lines)
    assert found == texts_of(of_tars) != EXPECTED
    assert sorted(found) == sorted(EXPECTED)


def test_a_broken_line_is_skipped_counted_and_listed_with_its_number(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl", broken=(4, 17))
    dataset = get_val_dataset(path, worker_config=ONE, batch_size=None, task_encoder=Cooking())
    loader = get_savable_loader(dataset, skip_log=tmp_path / "log", max_skip_rate=0.5)
    assert [sample.text for sample in loader] == [
        text for i, text in enumerate(EXPECTED) if i not in (4, 17)
    ]
    assert loader.num_skipped == {"a.jsonl/val": 2}
    listed = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["sample_key"] for line in listed] == ["4", "17"]
    assert f"{path}, line 5 (blank lines not counted)" in listed[0]["error"]
    assert "part 'json' is not JSON" in listed[0]["error"]


def test_a_line_with_another_value_than_an_object_is_broken(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n[1, 2]\n{"text": "b"}\n')
    dataset = get_val_dataset(path, worker_config=ONE, batch_size=None, task_encoder=Cooking())
    loader = get_savable_loader(dataset, max_skip_rate=0.5, skip_log=tmp_path / "log")
    assert [sample.text for sample in loader] == ["a", "b"]
    assert loader.num_skipped == {"a.jsonl/val": 1}
    assert "is no JSON object, but a list" in (tmp_path / "log").read_text()


def test_cookers_match_a_file_with_and_without_subflavors(tmp_path) -> None:
    """Energon crashes where a JSONL file without subflavors meets a cooker that asks for some."""
    path = lines(tmp_path / "a.jsonl")
    assert val_texts(path, BySubflavor) == EXPECTED
    loud = [text.upper() for text in EXPECTED]
    assert val_texts(path, BySubflavor, subflavors={"loud": True}) == loud
    node = {"path": str(path), "subflavors": {"loud": True}, "loss_weight": 0.5}
    assert val_texts(metadataset(node), BySubflavor, split_part="train") == loud
    dataset = making(metadataset(node))(ONE)
    assert next(iter(get_savable_loader(dataset))).__loss_weight__ == [0.5, 0.5]


def test_a_metadataset_blends_lines_with_tars_and_takes_subsets(tmp_path) -> None:
    text_set(tmp_path / "tars", 10)
    path = lines(tmp_path / "a.jsonl")
    first, last = {"subset": {"range": ["0%", "50%"]}}, {"subset": {"range": [20, "end"]}}
    parts = [{"path": "tars"}, {"path": "a.jsonl", "weight": 3, **first},
             {"path": "./a.jsonl", "weight": 2, **last}]  # fmt: skip
    (tmp_path / "meta.yaml").write_text(json.dumps(metadataset({"blend": parts})))
    loader = get_savable_loader(making(tmp_path / "meta.yaml")(ONE))
    for _ in zip(range(60), loader, strict=False):
        pass
    assert sorted(row.samples for row in loader.stats().values()) == [20, 40, 60]
    for subset, texts in ((last, EXPECTED[20:]), (first, EXPECTED[:11])):
        assert val_texts(metadataset({"path": str(path), **subset}), split_part="train") == texts
    epoch = {"blend_epochized": [{"path": str(path), "repetitions": 1.5}]}
    dataset = making(metadataset(epoch), repeat=False, batch_size=None)(ONE)
    assert len(texts_of(dataset)) == 34


@pytest.mark.parametrize("key", ["dataset_config", "split_config"])
def test_configs_of_folders_are_refused_where_they_are_written(tmp_path, key) -> None:
    path = lines(tmp_path / "a.jsonl")
    meta = tmp_path / "meta.yaml"
    meta.write_text(f"splits:\n  train:\n    path: a.jsonl\n    {key}: x.yaml\n" + HEAD)
    message = rf"meta\.yaml:4.*'{key}' is for dataset folders, and a\.jsonl is a JSONL file"
    with pytest.raises(DatasetFormatError, match=message):
        making(meta)(ONE)
    with pytest.raises(DatasetFormatError, match=f"{key}='x.yaml' is for dataset folders"):
        making(path, **{key: "x.yaml"})(ONE)


HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.mark.parametrize(("num_workers", "is_prepared"), [(0, True), (2, False)])
def test_lengths_lie_beside_the_file_and_packs_are_planned_by_them(
    tmp_path, num_workers, is_prepared
) -> None:
    path = lines(tmp_path / "a.jsonl", 2500)
    if is_prepared:
        prepare_dataset(path)
    meta = metadataset({"path": str(path)})
    meta["splits"]["val"] = {"path": str(path)}
    (report,) = measure_lengths(meta, Cooking(), num_workers=num_workers)
    assert report.file == tmp_path / "a.jsonl.lengths/default/lines.npy"
    assert report.totals == {"tokens": sum(len(text_of(i)) for i in range(2500))}
    (again,) = measure_lengths(path, Cooking(), num_workers=num_workers)
    assert again.measured == 0
    make = making(path, Planning, batch_size=1, repeat=False)
    packs = Ranks(make, 1, num_streams=2).rest()
    packed = [text for pack in packs.values() for row in pack.text for text in row.split("|")]
    assert sorted(packed) == sorted(text_of(i) for i in range(2500))
    first = Ranks(make, 1, num_streams=2)
    found = first.steps(40)
    found |= Ranks(make, 2, states=first.save()).rest()
    assert {k: v.text for k, v in found.items()} == {k: v.text for k, v in packs.items()}


def test_lengths_of_a_file_that_changed_are_refused(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl")
    measure_lengths(path, Cooking(), num_workers=0)
    lines(path, NUM_SAMPLES + 1)
    with pytest.raises(DatasetFormatError, match="the length index is of 23 samples"):
        next(iter(get_savable_loader(making(path, Planning, batch_size=1)(ONE))))


# Content, the values that are read, and the numbers of the lines that are broken.
ODD: dict[str, tuple[bytes, list[int], list[int]]] = {
    "no newline at the end": (b'{"n": 1}\n{"n": 2}', [1, 2], []),
    "CRLF": (b'{"n": 1}\r\n\r\n{"n": 2}\r\n', [1, 2], []),
    "mark of the byte order": (b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n', [1, 2], []),
    "marks of files that were put together": (
        b'\xef\xbb\xbf{"n": 1}\n\xef\xbb\xbf{"n": 2}\n\xef\xbb\xbf\n{"n": 3}', [1, 2, 3], [3],
    ),
    "blank lines": (b'\n \t\n{"n": 1}\n\n\r\n{"n": 2}\n\n', [1, 2], []),
    "form feeds and vertical tabs": (
        b'\x0c\n\x0b{"n": 1}\x0b\n\x0c\n\x0b \x0c\r\n{"n": 2}\r\n\x0c\r\n\x0c{"n": 3}\n\x0b',
        [1, 2, 3], [],
    ),
    "NUL in a text": (b'{"n": 1}\n{"n": "\x00"}\n{"n": 3}\n', [1, 3], [2]),
    "NUL in place of a lost block": (b'{"n": 1}\n' + bytes(50) + b'\n{"n": 3}', [1, 3], [2]),
    "no UTF-8": (b'{"n": "\xff"}\n{"n": 2}\n', [2], [1]),
    "cut in a line": (b'{"n": 1}\n{"n": 2', [1], [2]),
    "two objects in a line": (b'{"n": 1} {"n": 2}\n{"n": 3}\n', [3], [1]),
    "deeply nested": (b'{"n": ' + b"[" * 99_999 + b"]" * 99_999 + b'}\n{"n": 2}', [2], [1]),
    "a JSON array": (b'[\n{"n": 1},\n{"n": 2}\n]\n', [2], [1, 2, 4]),
    "separators of other kinds": ('{"n": 1, "x": "\u2028\x85"}\n{"n": 2}'.encode(), [1, 2], []),
}  # fmt: skip


@stateless
def cook_number(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=str(sample["json"]["n"]))


class Numbers(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(cook_number)]


@pytest.mark.parametrize("name", ODD)
def test_of_odd_lines_each_is_read_or_listed(tmp_path, name) -> None:
    content, values, broken = ODD[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for is_prepared in (False, True):
        if is_prepared and len(broken) > len(values):
            with pytest.raises(DatasetFormatError, match="one object into each line"):
                prepare_dataset(path)
            break
        if is_prepared:
            prepare_dataset(path)
        dataset = get_val_dataset(path, worker_config=ONE, batch_size=None, task_encoder=Numbers())
        log = tmp_path / f"log{is_prepared}"
        loader = get_savable_loader(dataset, skip_log=log, max_skip_rate=1)
        assert [sample.text for sample in loader] == list(map(str, values))
        listed = (
            [json.loads(row)["error"] for row in log.read_text().splitlines()] if broken else []
        )
        for error, number in zip(listed, broken, strict=True):
            assert f"a.jsonl, line {number} (blank lines not counted)" in error


def test_a_line_of_100_megabytes_is_read(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "' + b"x" * 100_000_000 + b'"}\n{"n": 3}\n')
    assert prepare_dataset(path).samples == 3
    assert [len(text) for text in val_texts(path, Numbers)] == [1, 100_000_000, 1]


OTHER = {
    "gzip": gzip.compress(b'{"n": 1}\n'), "bzip2": bz2.compress(b"{}\n"),
    "xz": lzma.compress(b"{}\n"), "UTF-16": '{"n": 1}\n'.encode("utf-16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER)
def test_a_file_of_another_kind_is_refused_with_a_remedy(tmp_path, kind) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(OTHER[kind])
    for use in (prepare_dataset, val_texts):
        with pytest.raises(
            DatasetFormatError, match=rf"a\.jsonl has no lines of JSON, but .*{kind}"
        ):
            use(path)


def test_lines_that_moved_under_their_index_are_broken_and_not_lost_silently(tmp_path) -> None:
    """The file was edited in place, and has the size that it had."""
    path = lines(tmp_path / "a.jsonl")
    prepare_dataset(path)
    content = path.read_bytes()
    first, _, rest = content.partition(b"\n")
    path.write_bytes(rest[:-1] + b"\n" + first + b"\n")
    dataset = get_val_dataset(path, worker_config=ONE, batch_size=None, task_encoder=Cooking())
    loader = get_savable_loader(dataset, max_skip_rate=1)
    found = [sample.text for sample in loader]
    assert len(found) + loader.num_skipped.get("a.jsonl/val", 0) == NUM_SAMPLES
    assert set(found) <= set(EXPECTED)


# ------------------------------------------------------------------------------ prepare, lint, info


def test_preparing_reports_lines_that_are_no_objects(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl", broken=(4, 17))
    report = prepare_dataset(path)
    assert (report.samples, report.written) == (NUM_SAMPLES, ("a.jsonl.idx",))
    assert report.warnings == (
        "2 of 23 lines are no JSON objects, from { to }, and will be skipped: line 5, 18",
    )
    for broken, listed in (((4, 9, 17), "5, 10, 18"), ((4, 9, 17, 20), "5, 10, 18, ...")):
        (warning,) = prepare_dataset(lines(path, broken=broken)).warnings
        assert warning.endswith(f"line {listed}")
    prepare_dataset(lines(path, 4))
    assert len(load_factory(path)) == 4


@pytest.mark.parametrize(
    "option", [{"split_ratio": "8,1,1"}, {"sample_type": "TextSample"}, {"exclude": "x"}]
)
def test_options_for_folders_are_refused_for_a_file(tmp_path, option) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} is for folders of tars"):
        prepare_dataset(lines(tmp_path / "a.jsonl"), **option)


def test_a_changed_file_is_refused_until_it_is_prepared_again(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl")
    prepare_dataset(path)
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(DatasetFormatError, match="it was changed after it was indexed"):
        val_texts(path)
    prepare_dataset(path)
    assert val_texts(path) == [*EXPECTED, "one more"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lint_lists_broken_lines_and_a_wrong_index(tmp_path, num_workers) -> None:
    path = lines(tmp_path / "a.jsonl")
    report = lint_dataset(path, num_workers=num_workers)
    assert report.is_ok
    assert report.samples == NUM_SAMPLES
    assert "every run reads the whole file first" in report.warnings[0].message
    prepare_dataset(path)
    report = lint_dataset(path, num_workers=num_workers)
    assert (report.errors, report.warnings) == ([], [])
    prepare_dataset(lines(path, broken=(4,)))
    report = lint_dataset(path, num_workers=num_workers)
    assert (report.samples, report.failed_samples, len(report.errors)) == (NUM_SAMPLES, 1, 1)
    assert f"{path}, line 5" in report.errors[0].message
    assert "1 of 23 lines are no JSON objects" in report.warnings[0].message
    line_index_path(path).write_bytes(b"")
    assert "no index of lines" in lint_dataset(path, num_workers=0).errors[0].message


def test_info_of_a_file_and_of_a_metadataset_with_it(tmp_path) -> None:
    path = lines(tmp_path / "a.jsonl")
    found = dataset_info(path)
    assert (found["samples"], found["size_bytes"]) == (NUM_SAMPLES, path.stat().st_size)
    assert (found["is_indexed"], found["dataset"]["class"]) == (
        False, "DefaultCrudeJsonlDatasetFactory",
    )  # fmt: skip
    json.dumps(found)
