"""Joins: which samples meet, the index of a join, and what is read by it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    JoinedWebdatasetFactory,
    Sample,
    SampleDecoder,
    TextSample,
    WorkerConfig,
    edataclass,
    get_loader,
    get_train_dataset,
    get_val_dataset,
    prepare_metadataset,
)
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, describe
from energon_lite.extras.energon.energon_api import (
    DatasetLoader,
    JoinDatasetLoader,
    JoinedDatasetInfo,
)
from energon_lite.extras.joins.join_index import JoinIndexReader, JoinIndexWriter
from energon_lite.extras.joins.join_keys import build_index, digest_of, energon_digest_of
from energon_lite.extras.joins.joined import open_side
from energon_lite.extras.lengths.length_index import LengthFunction, measure_lengths
from energon_lite.metadataset.open import LeafOpener
from energon_lite.metadataset.read import read_metadataset
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage.yaml import dump_yaml
from energon_lite.testing import check_dataset

from ..conftest import write_tar
from ..helpers import ignore, prepared

prepared_by_shell = os.system  # imported from elsewhere under a name of this module
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1, global_error_handler=ignore)
KEYS = [f"d/{i:03d}" for i in range(24)]


@edataclass
class Pair(Sample):
    """A row, with the key and the text of each side."""

    texts: tuple[str | None, ...]


@edataclass
class Plain(TextSample):
    """A text, and a field with a default."""

    number: int = 3


@edataclass
class Numbered(Plain):
    """Sets a field itself, unless it was set."""

    number: int = 0

    def __post_init__(self) -> None:
        self.number = self.number or 9


def pair(*samples: TextSample | None, **named: TextSample | None) -> Pair:
    """Joins texts; those of a map by name."""
    found = samples or (named["left"], named["right"])
    return Pair.derive_from(found[0], texts=tuple(s and s.text for s in found))  # type: ignore[arg-type]


def texts(folder: Path, keys: Sequence[str], num_shards: int = 3) -> Path:
    """Prepares texts, each of which is `folder name:key`."""
    for shard in range(num_shards):
        own = keys[shard * len(keys) // num_shards : (shard + 1) * len(keys) // num_shards]
        members = [(f"{key}.txt", f"{folder.name}:{key}".encode()) for key in own]
        write_tar(folder / f"s{shard}.tar", members)
    return prepared(folder, "TextSample", {"text": "txt"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Datasets `a` of 24 samples, and `b` of 20 of these, in another order, and 4 more."""
    texts(tmp_path / "a", KEYS)
    others = [*KEYS[:20], *(f"x{i}" for i in range(4))]
    random.Random(1).shuffle(others)
    texts(tmp_path / "b", others, 4)
    return tmp_path


def joined(root: Path, nonmatch: str = "skip", split: str = "train", **keys: Any) -> dict[str, Any]:
    """The content of a metadataset that joins `a` and `b`."""
    node = {
        "join": [{"path": str(root / "a")}, {"path": str(root / "b"), "nonmatch": nonmatch}],
        "joiner": {"__module__": __name__, "__function__": "pair"},
        **keys,
    }
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    return {**head, "splits": {split: node}}


def file_of(root: Path, content: dict[str, Any]) -> Path:
    """Writes a metadataset."""
    path = root / "meta.yaml"
    path.write_text(dump_yaml(content))
    return path


def rows_of(path: Any, split: str = "train", **settings: Any) -> list[Any]:
    """All samples of a split, in file order."""
    settings = {"worker_config": ONE, "split_part": split, "batch_size": None, **settings}
    return list(get_loader(get_val_dataset(path, **settings), max_skip_rate=1))


def sides_of(path: Path, split: str = "train") -> list[Any]:
    join: Any = read_metadataset(path, split)
    return [
        open_side(one.path, one.split_part, one.split_config, nonmatch=one.nonmatch)
        for one in join.members
    ]


@pytest.mark.parametrize("nonmatch", ["skip", "none"])
def test_rows_are_those_of_the_primary_in_its_order(root: Path, nonmatch: str) -> None:
    rows = rows_of(file_of(root, joined(root, nonmatch)))
    keys = KEYS if nonmatch == "none" else KEYS[:20]
    assert [row.__key__ for row in rows] == keys
    assert [row.texts for row in rows] == [
        (f"a:{key}", f"b:{key}" if key in KEYS[:20] else None) for key in keys
    ]
    sources = [source.shard_name for source in rows[0].__sources__]
    assert len(sources) == 2
    assert rows[0].__restore_key__ == ("a/train+b/train", 0, 0, 0)


def test_missing_keys_are_an_error_that_counts_and_names_them(root: Path) -> None:
    path = file_of(root, joined(root, "error"))
    with pytest.raises(DatasetFormatError, match=r"4 of 24 samples of .*/a .* as 'd/020', 'd/021'"):
        prepare_metadataset(path)
    # Fault 3 of Energon's: a join that failed leaves an index.
    assert not list((root / "meta.yaml.cache").glob("*"))


@pytest.mark.parametrize("nonmatch", ["error", "skip"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([f"e/{key}" for key in KEYS], "The key here is 'e/d/0.*', not 'd/0"),
        ([key.upper() for key in KEYS], "The key here is 'D/0.*', not 'd/0"),
        ([*KEYS, *(f"x{i}" for i in range(12))], "not in this split part"),
    ],
)
def test_cause_of_missing_keys_is_named(root: Path, nonmatch: str, keys, words) -> None:
    texts(root / "c", keys)
    (root / "c/.nv-meta/split.yaml").write_text(
        "split_parts: {train: [s2.tar], val: [s0.tar, s1.tar]}\n"
        if len(keys) > len(KEYS)
        else "split_parts: {train: [s0.tar, s1.tar, s2.tar]}\n"
    )
    content = joined(root, nonmatch)
    content["splits"]["train"]["join"][1]["path"] = str(root / "c")
    with pytest.raises(DatasetFormatError, match=words) as caught:
        rows_of(file_of(root, content))
    assert "nonmatch" not in str(caught.value)


def test_shard_that_is_listed_twice_is_named(root: Path) -> None:
    (root / "b/.nv-meta/split.yaml").write_text("split_parts: {train: [s0.tar, s1.tar, s0.tar]}\n")
    with pytest.raises(DatasetFormatError, match="List no shard twice in the split file"):
        prepare_metadataset(file_of(root, joined(root)))


def test_map_of_datasets_names_the_arguments(root: Path) -> None:
    content = joined(root)
    left, right = content["splits"]["train"]["join"]
    content["splits"]["train"]["join"] = {"left": left, "right": right}
    assert rows_of(file_of(root, content))[0].texts == ("a:d/000", "b:d/000")
    content["splits"]["train"]["joiner"] = {"__module__": "energon_lite", "__class__": "TextSample"}
    assert rows_of(file_of(root, content))[0].text == "b:d/000"


def test_joiner_is_imported_only_with_trust(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "my_joiner.py").write_text("def join(a, b):\n    return a\n")
    monkeypatch.syspath_prepend(root)
    joiner = {"__module__": "my_joiner", "__function__": "join"}
    path = file_of(root, joined(root, joiner=joiner))
    with pytest.raises(DatasetFormatError, match=r"joiner: my_joiner\.join would have to be imp"):
        rows_of(path)
    assert rows_of(path, trust=True)[3].text == "a:d/003"
    prepare_metadataset(path)  # imports nothing


FOREIGN = "is a function of Python or of an installed package"


@pytest.mark.parametrize(
    ("module", "name", "problem"),
    [
        ("subprocess", "call", FOREIGN),
        ("builtins", "exec", FOREIGN),
        ("torch", "load", FOREIGN),
        (__name__, "prepare_metadataset", FOREIGN),
        (__name__, "prepared_by_shell", FOREIGN),
        ("subprocess", "Popen", "must be a function; write __class__"),
        ("math", "pi", "must be a function"),
    ],
)
def test_joiner_without_trust_is_a_function_of_the_program(
    root: Path, module: str, name: str, problem: str
) -> None:
    joiner = {"__module__": module, "__function__": name}
    with pytest.raises(DatasetFormatError, match=problem):
        get_train_dataset(file_of(root, joined(root, joiner=joiner)), batch_size=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"shuffle_buffer_size": 6, "max_samples_per_sequence": 4},
        {"repeat": False, "max_samples_per_sequence": 5},
        {"shuffle_over_epochs_multiplier": -1},
        {"repeat": False, "shuffle_over_epochs_multiplier": None, "batch_size": 4},
    ],
)
@pytest.mark.parametrize("nonmatch", ["skip", "none"])
def test_joined_source_obeys_the_laws(root: Path, nonmatch: str, settings: Any) -> None:
    path = file_of(root, joined(root, nonmatch))
    settings = {"batch_size": None, **settings}
    dataset = get_train_dataset(path, worker_config=ONE, **settings)
    check_dataset(dataset, num_streams=(2,), max_items=8)


def test_subset_counts_rows_and_subsets_of_entries_count_samples(root: Path) -> None:
    for written, keys in ([[5, 8], KEYS[5:8]], [["50%", "100%"], KEYS[10:20]]):
        path = file_of(root, joined(root, subset={"range": written}))
        assert [row.__key__ for row in rows_of(path)] == keys
    content = joined(root)
    content["splits"]["train"]["join"][0]["subset"] = {"range": [4, 22]}
    assert [row.__key__ for row in rows_of(file_of(root, content))] == KEYS[4:20]
    content["splits"]["train"]["join"][0]["subset"] = {"range": [20, 24]}
    with pytest.raises(EmptyDatasetError, match=r"no sample of .*/a and .*/b has the same key"):
        rows_of(file_of(root, content))


def test_tags_of_the_join_override_those_of_its_entries(root: Path) -> None:
    content = joined(root, subflavors={"x": 1})
    content["splits"]["train"]["join"][0]["subflavors"] = {"x": 0, "y": 2}
    assert rows_of(file_of(root, content))[0].__subflavors__ == {"x": 1, "y": 2}


# --------------------------------------------------------------------------- faults of Energon's


def two_splits(root: Path) -> Path:
    """A metadataset that joins the same datasets in `train` and in `val`."""
    for name in "ab":
        texts(root / name, KEYS, 4)
        shards = "split_parts:\n  train: ['s{0..1}.tar']\n  val: ['s{2..3}.tar']\nexclude: []\n"
        (root / name / ".nv-meta" / "split.yaml").write_text(shards)
    content = joined(root)
    content["splits"]["val"] = content["splits"]["train"]
    return file_of(root, content)


def test_each_split_has_its_own_index(tmp_path: Path) -> None:
    path = two_splits(tmp_path)
    assert len(prepare_metadataset(path)) == 2
    assert len(list((tmp_path / "meta.yaml.cache").iterdir())) == 2
    for split, keys in (("train", KEYS[:12]), ("val", KEYS[12:])):
        assert [row.__key__ for row in rows_of(path, split)] == keys


def test_index_of_energon_is_used_where_it_fits_and_only_there(tmp_path: Path) -> None:
    path = two_splits(tmp_path)
    cache = tmp_path / "meta.yaml.cache"
    train, val = (sides_of(path, split) for split in ("train", "val"))
    theirs = energon_digest_of(train)
    uuids = [(tmp_path / name / ".nv-meta" / "index.uuid").read_text() for name in "ab"]
    text = "".join(
        f"\0uuid={uuid}\0excludes=\0nonmatch={mode}\0"
        for uuid, mode in zip(uuids, ("error", "skip"), strict=True)
    )
    assert theirs == hashlib.sha256(text.encode()).hexdigest() == energon_digest_of(val)
    own = cache / f"join_index_{theirs}.bin"
    build_index(cache, train).path.rename(own)
    assert [row.__key__ for row in rows_of(path, "train")] == KEYS[:12]
    assert len(list(cache.iterdir())) == 1
    content = own.read_bytes()
    own.write_bytes(content + content[16 : 16 + 48])  # the first row twice
    assert [row.__key__ for row in rows_of(path, "train")] == KEYS[:12]
    (made,) = cache.glob(f"join_index_{digest_of(train)}_*")
    made.unlink()
    # An incomplete one, as Energon leaves behind.
    own.write_bytes(content[: 16 + 48 * 7])
    assert [row.__key__ for row in rows_of(path, "train")] == KEYS[:12]
    assert [row.__key__ for row in rows_of(path, "val")] == KEYS[12:]
    assert len(list(cache.iterdir())) == 3


def test_excluded_shards_and_samples_have_no_part(root: Path) -> None:
    path = file_of(root, joined(root))
    split = root / "a" / ".nv-meta" / "split.yaml"
    written = split.read_text()
    for key in ("d/009", "d/010"):  # of each there is an index
        split.write_text(written.replace("exclude: []", f"exclude: [s1.tar/{key}]"))
        assert [row.__key__ for row in rows_of(path)] == [k for k in KEYS[:20] if k != key]
    split.write_text(written)
    for name, entries in (("a", "[s0.tar, s1.tar/d/009]"), ("b", "[s0.tar]")):
        split = root / name / ".nv-meta" / "split.yaml"
        split.write_text(split.read_text().replace("exclude: []", f"exclude: {entries}"))
    path = file_of(root, joined(root))
    others = {sample.__key__ for sample in load_factory(root / "b", training=False).build()}
    keys = [key for key in KEYS[8:20] if key != "d/009" and key in others]
    assert len(keys) > 3
    assert [row.__key__ for row in rows_of(path)] == keys


# ----------------------------------------------------------------------------------- wrong data


def test_keys_that_are_there_twice_are_counted_and_named(root: Path) -> None:
    index = root / "b" / ".nv-meta" / "index.sqlite"
    with sqlite3.connect(index) as db:  # an index of an old version allows them
        db.execute("ALTER TABLE samples RENAME TO old")
        db.execute("CREATE TABLE samples AS SELECT * FROM old")
        db.execute("DROP TABLE old")
        db.execute("CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)")
        db.execute("UPDATE samples SET sample_key = 'd/001' WHERE sample_key IN ('x1', 'x2')")
    with pytest.raises(DatasetFormatError, match=r"2 samples have a key .* as 'd/001', 'd/001'"):
        prepare_metadataset(file_of(root, joined(root)))


def test_index_that_lacks_samples_is_refused(root: Path) -> None:
    with sqlite3.connect(root / "b" / ".nv-meta" / "index.sqlite") as db:
        db.execute("DELETE FROM samples WHERE tar_file_id = 1 AND sample_index = 2")
    with pytest.raises(DatasetFormatError, match=r"sample 2 of s1\.tar has no entry; run `energon"):
        prepare_metadataset(file_of(root, joined(root)))


def test_new_uuid_makes_a_new_index(root: Path) -> None:
    path = file_of(root, joined(root))
    (first,) = prepare_metadataset(path)
    assert first[1] is not None
    assert (first[1].rows, first[1].samples) == (20, 24)
    assert prepare_metadataset(path) == [(first[0], None)]
    (root / "b" / ".nv-meta" / "index.uuid").write_text("other")
    ((file, report),) = prepare_metadataset(path, num_workers=2)
    assert file != first[0]
    assert report is not None
    assert file.read_bytes() == first[0].read_bytes()
    assert list(report.missing.values()) == list(report.unused.values()) == [4]


@pytest.mark.parametrize("size", [0, 11, 16 + 48 * 7, 16 + 48 * 7 + 3])
def test_index_that_was_cut_is_written_again(root: Path, size: int) -> None:
    path = file_of(root, joined(root))
    ((file, _),) = prepare_metadataset(path)
    whole = file.read_bytes()
    for again in (prepare_metadataset, rows_of):
        file.write_bytes(whole[:size])
        again(path)
        assert file.read_bytes() == whole
        assert list(file.parent.iterdir()) == [file]


def test_rows_of_other_data_are_skipped_and_not_joined(root: Path) -> None:
    path = file_of(root, joined(root))
    ((file, _),) = prepare_metadataset(path)
    rows = JoinIndexReader(file).rows().copy()
    rows[[3, 4], 1] = rows[[4, 3], 1]
    rows[5, 1, 0] = 77
    rows[6, 1, 1] += 512
    rows[7, 1, 2] += 512
    with JoinIndexWriter(file) as writer:
        writer.extend(rows)
    found = [row.__key__ for row in rows_of(path)]
    assert found == [key for i, key in enumerate(KEYS[:20]) if i not in (3, 4, 5, 6, 7)]


def test_broken_sample_of_one_side_is_skipped_and_counted(root: Path) -> None:
    path = file_of(root, joined(root))
    shard = root / "b" / "s2.tar"
    data = bytearray(shard.read_bytes())
    at = data.index(b"b:d/")
    key = data[at + 2 : at + 7].decode()
    data[at - 512 : at - 400] = b"\xff" * 112
    shard.write_bytes(data)
    dataset = get_val_dataset(path, worker_config=ONE, split_part="train", batch_size=None)
    loader = get_loader(dataset, max_skip_rate=1)
    assert [row.__key__ for row in loader] == [k for k in KEYS[:20] if k != key]
    assert loader.stats()["a/train+b/train"].skipped == 1


def test_types_of_samples_that_are_more_than_their_fields_are_made(root: Path) -> None:
    """The default joiner makes no samples of the sides, unless their class does something."""
    content = joined(root, "none")
    content["splits"]["train"]["joiner"] = {"__module__": __name__, "__class__": "Numbered"}
    config = root / "b" / ".nv-meta" / "dataset.yaml"
    for kind in ("Numbered", "Plain"):
        sample_type = f"{{__module__: {__name__}, __class__: {kind}}}"
        config.write_text(f"sample_type: {sample_type}\nfield_map: {{text: txt}}\n")
        rows = rows_of(file_of(root, content))
        assert [row.text for row in rows] == [
            f"b:{key}" if key in KEYS[:20] else f"a:{key}" for key in KEYS
        ]
        assert {row.number for row in rows[:20]} == {9 if kind == "Numbered" else 3}
        assert {row.number for row in rows[20:]} == {9}  # of the joined class itself


def test_broken_sample_of_the_primary_is_named_by_its_place_in_its_shard(root: Path) -> None:
    shard, errors = root / "a" / "s1.tar", list[str]()
    data = bytearray(shard.read_bytes())
    at = data.index(b"a:d/010") - 512
    data[at : at + 112] = b"\xff" * 112
    shard.write_bytes(data)
    config = dataclasses.replace(ONE, global_error_handler=lambda e, *_: errors.append(describe(e)))
    rows = rows_of(file_of(root, joined(root)), worker_config=config)
    assert [row.__key__ for row in rows] == [key for key in KEYS[:20] if key != "d/010"]
    (error,) = errors
    assert f"{shard}, sample number 2" in error


def test_missing_index_where_nothing_can_be_written_names_the_remedy(root, monkeypatch):
    path = file_of(root, joined(root))

    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("energon_lite.extras.joins.joined.build_index", refuse)
    with pytest.raises(FileNotFoundError, match=r"no join index of .*Run `energon-lite prepare`"):
        rows_of(path)


@pytest.mark.parametrize("size", [3, 15, 16 + 24])
def test_incomplete_file_is_no_join_index(tmp_path: Path, size: int) -> None:
    with JoinIndexWriter(tmp_path / "i.bin") as writer:
        writer.append((0, 0, 512), (1, 512, 1024))
    whole = (tmp_path / "i.bin").read_bytes()
    assert (whole[:16], len(whole)) == (b"JIDX0001\2\0\0\0\0\0\0\0", 64)
    reader = pickle.loads(pickle.dumps(JoinIndexReader(tmp_path / "i.bin")))
    assert list(reader) == [[(0, 0, 512), (1, 512, 1024)]]
    assert JoinIndexReader(tmp_path / "i.bin", column=1)[0] == [(1, 512, 1024)]
    assert reader.get_as_tensor().tolist() == [[[0, 0, 512], [1, 512, 1024]]]
    (tmp_path / "i.bin").write_bytes(whole[:size])
    with pytest.raises(DatasetFormatError, match="are no whole join index"):
        JoinIndexReader(tmp_path / "i.bin")


# ------------------------------------------------------------------------------ names of Energon's


def test_loader_and_factory_of_energons_join(root: Path) -> None:
    infos = {
        "left": JoinedDatasetInfo(dataset=DatasetLoader(path=root / "a"), nonmatch="error"),
        "right": JoinedDatasetInfo(dataset=DatasetLoader(path=root / "b"), nonmatch="skip"),
    }
    loader = JoinDatasetLoader(datasets=infos, joiner=pair, cache_path=root / "cache")
    (file,) = loader.prepare("train")
    factory = loader.get_dataset(training=False, worker_config=ONE, decoder=SampleDecoder())
    assert len(factory) == 20
    inner = [load_factory(root / name, training=False) for name in "ab"]
    other: JoinedWebdatasetFactory[Any] = JoinedWebdatasetFactory(
        inner, training=False, worker_config=ONE, join_index=file, joiner=pair
    )
    assert [s.texts for s in other.build()] == [s.texts for s in factory.build()]


@edataclass
class Last(Sample):
    """A row with the text of the last dataset that has one."""

    text: str


def made(root: Path, joiner: Any = Last, nonmatch: str = "skip", **settings: Any) -> Any:
    """The source of a join."""
    inner = [load_factory(root / name, training=False) for name in "ab"]
    settings = {"join_index": root / "cache", "nonmatch": ("error", nonmatch), **settings}
    return JoinedWebdatasetFactory(
        inner, training=False, worker_config=ONE, joiner=joiner, **settings
    ).build()


def last(*samples: Any) -> Last:
    """Joins as `Last` does."""
    return Last.from_joined(*samples)


def test_joined_samples_have_the_loss_weight_of_the_join(root: Path) -> None:
    for joiner in (Last, last):
        found = list(made(root, joiner, loss_weight=0.5))
        assert {row.__loss_weight__ for row in found} == {0.5}
        assert [row.text for row in found] == [f"b:{key}" for key in KEYS[:20]]


def test_configuration_of_a_join_depends_on_its_joiner_and_its_rows(root: Path) -> None:
    config = made(root).config()
    assert config == made(root).config()
    assert config != made(root, last).config()
    assert config["data"] != made(root, nonmatch="none").config()["data"]
    (file,) = (root / "cache").glob(f"*{digest_of(sides_of(file_of(root, joined(root))))}*")
    rows = JoinIndexReader(file).rows()[::-1]
    with JoinIndexWriter(root / "other.bin") as writer:
        writer.extend(rows)
    other = made(root, join_index=root / "other.bin").config()
    assert config["data"] != other["data"]


def test_dict_joins_without_a_folder_for_the_index(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert len(rows_of(joined(root))) == 20


def test_length_index_of_a_join_lies_beside_those_of_the_primary(root: Path) -> None:
    primary = LengthFunction(text_length)
    measure_lengths(root / "a", primary, name="n", num_workers=0, split_parts=["train"])
    path = file_of(root, joined(root))
    (report,) = measure_lengths(path, LengthFunction(pair_length), name="n", num_workers=0)
    assert report.samples == 20
    assert report.file is not None
    assert report.file.is_relative_to(root / "a")
    opener = LeafOpener(
        node=read_metadataset(path, "train"), settings={}, training=True, worker_config=ONE
    )
    source: Any = opener(opener.node, repeat=True)  # type: ignore[arg-type]
    assert source.stored_lengths("n").tolist() == [14] * 20
    alone = load_factory(root / "a", training=False).build()
    assert alone.stored_lengths("n").tolist() == [7] * 24


def text_length(sample: TextSample) -> int:
    return len(sample.text)


def pair_length(sample: Pair) -> int:
    return sum(len(text or "") for text in sample.texts)
