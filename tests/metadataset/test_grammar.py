"""Every error in a metadataset names file, line, key path and remedy."""

from __future__ import annotations

import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.nodes import HOMES, KEYS, KINDS, Blend, BlendEpochized, Leaf
from energon_lite.metadataset.read import read_metadataset
from energon_lite.metadataset.values import SubsetRange
from energon_lite.order.schedules import Schedule
from energon_lite.storage.yaml import dump_yaml

HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
# The first line of what stands below is line 5 of the file.
TRAIN = HEAD + "splits:\n  train:\n"
NODES = "path, join, blend, blend_epochized, concat"
REFERENCE = (
    "path, name, loss_weight, subset, subflavors, split_part, shuffle_over_epochs_multiplier, "
    "dataset_config, split_config, aux"
)
EPOCHIZED = (
    "blend_epochized, name, loss_weight, subset, subflavors, split_part, "
    "shuffle_over_epochs_multiplier"
)
RANGE = (
    "a list of two percentages, as ['0%', '50%'], or two sample numbers, as [0, 1000] or "
    "[1000, end]"
)


def read(text: str, folder: Path, split: str = "train") -> Any:
    (folder / "demo.yaml").write_text(text)
    return read_metadataset("demo.yaml", split)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(body: str) -> str:
    return TRAIN + "".join(f"    {line}\n" for line in body.splitlines())


def entries(body: str) -> str:
    return train("blend:\n" + body)


# What is written -> the whole message.
MISTAKES = {
    # Unknown keys: item 27 and section 3.10 of the reference, which name an unrelated 'join'.
    "unknown key": (
        train("path: coco\nfoo: 1"),
        f"demo.yaml:6, splits.train: unknown key 'foo'. Allowed here: {REFERENCE}.",
    ),
    "misspelled key in an entry": (
        entries("- path: a\n- path: b\n- path: c\n  wieght: 3"),
        "demo.yaml:9, splits.train.blend[2]: unknown key 'wieght'. Did you mean 'weight'? "
        f"Allowed here: {REFERENCE}, weight.",
    ),
    "misspelled kind": (
        train("blnd:\n- path: a"),
        "demo.yaml:5, splits.train: unknown key 'blnd'. Did you mean 'blend'? Allowed here: "
        f"{NODES}, {REFERENCE[6:]}, joiner, blend_mode, unit, lengths, until.",
    ),
    "misspelled root key": (
        HEAD + "split:\n  train: {path: a}\n",
        "demo.yaml:3: unknown key 'split'. Did you mean 'splits'? "
        "Allowed here: splits, __module__, __class__, expand_paths.",
    ),
    "no kind": (
        train("name: x"),
        f"demo.yaml:4, splits.train: what to read is missing; write exactly one of {NODES}",
    ),
    "two kinds": (
        train("path: a\nblend:\n- path: b"),
        f"demo.yaml:4, splits.train: 'path' and 'blend' exclude each other; write exactly one of "
        f"{NODES}",
    ),
    "key of another kind": (
        train("path: a\nblend_mode: random"),
        "demo.yaml:6, splits.train: key 'blend_mode' does not belong here but beside 'blend'. "
        f"Allowed here: {REFERENCE}.",
    ),
    "weight at a split": (
        train("path: a\nweight: 2"),
        "demo.yaml:6, splits.train: key 'weight' does not belong here but to the entries of "
        f"'blend'. Allowed here: {REFERENCE}.",
    ),
    "weight in an epochized blend": (
        train("blend_epochized:\n- path: a\n  weight: 2"),
        "demo.yaml:7, splits.train.blend_epochized[0]: key 'weight' does not belong here but to "
        f"the entries of 'blend'. Allowed here: {REFERENCE}, repetitions.",
    ),
    "repetitions in a blend": (
        entries("- path: a\n  repetitions: 2"),
        "demo.yaml:7, splits.train.blend[0]: key 'repetitions' does not belong here but to the "
        f"entries of 'blend_epochized'. Allowed here: {REFERENCE}, weight.",
    ),
    "until of an epochized blend": (
        train("blend_epochized:\n- path: a\nuntil: first"),
        "demo.yaml:7, splits.train: key 'until' does not belong here but beside 'blend'. "
        f"Allowed here: {EPOCHIZED}.",
    ),
    "dataset_config of a blend": (
        entries("- path: a\ndataset_config: x.yaml"),
        "demo.yaml:7, splits.train: key 'dataset_config' does not belong here but beside 'path'. "
        "Allowed here: blend, name, loss_weight, subset, subflavors, split_part, "
        "shuffle_over_epochs_multiplier, blend_mode, unit, lengths, until.",
    ),
    "datasets in the new form": (
        train("datasets:\n- path: a"),
        "demo.yaml:5, splits.train: key 'datasets' does not belong here but to files without "
        f"'__class__: MetadatasetV2'; write 'blend'. Allowed here: {NODES}, {REFERENCE[6:]}, "
        "joiner, blend_mode, unit, lengths, until.",
    ),
    "join": (
        train("join:\n- path: a\njoiner: {__module__: m, __class__: C}"),
        "demo.yaml:5, splits.train.join: a join of 1 datasets; write at least two, or a `path`",
    ),
    "aux that is no map": (
        train("path: a\naux: ./b"),
        "demo.yaml:6, splits.train.aux: expected a map of names and file stores, as "
        "{images: ./images}, not './b'.",
    ),
    "aux that is no path": (
        train("path: a\naux: {more: 3}"),
        "demo.yaml:6, splits.train.aux.more: expected a path, as ./images or "
        "filesystem://./images, or a map {path: ...} or {fs_path: ...}, not 3.",
    ),
    "aux of two paths": (
        train("path: a\naux: {more: {path: b, fs_path: c}}"),
        "demo.yaml:6, splits.train.aux.more: expected a path, as ./images or "
        "filesystem://./images, or a map {path: ...} or {fs_path: ...}, not "
        "{'path': 'b', 'fs_path': 'c'}.",
    ),
    "aux of a blend": (
        train("blend:\n- path: a\naux: {more: b}"),
        "demo.yaml:7, splits.train: key 'aux' does not belong here but beside 'path'. Allowed "
        f"here: {EPOCHIZED.replace('_epochized', '')}, blend_mode, unit, lengths, until.",
    ),
    "aux with a reserved name": (
        train("path: a\naux: {cache: ./b}"),
        "demo.yaml:6, splits.train.aux.cache: 'cache' is reserved: it is the cache, for "
        "`@cooker(need_cache=True)`. Choose another name",
    ),
    # Values.
    "weight that is a word": (
        entries("- path: a\n  weight: abc"),
        "demo.yaml:7, splits.train.blend[0].weight: expected a number of at least 0 or a "
        "schedule, not 'abc'.",
    ),
    "negative weight": (
        entries("- path: a\n  weight: -1"),
        "demo.yaml:7, splits.train.blend[0].weight: expected a number of at least 0 or a "
        "schedule, not -1.",
    ),
    "infinite weight": (
        entries("- path: a\n  weight: 1e999"),
        "demo.yaml:7, splits.train.blend[0].weight: expected a number of at least 0 or a "
        "schedule, not inf.",
    ),
    "weight that is too large a number": (
        entries("- path: a\n  weight: 1" + 400 * "0"),
        "demo.yaml:7, splits.train.blend[0].weight: expected a number of at least 0 or a "
        f"schedule, not 1{75 * '0'} ....",
    ),
    "true as loss weight": (
        train("path: a\nloss_weight: yes"),
        "demo.yaml:6, splits.train.loss_weight: expected a number of at least 0, not True.",
    ),
    "repetitions": (
        train("blend_epochized:\n- path: a\n  repetitions: twice"),
        "demo.yaml:7, splits.train.blend_epochized[0].repetitions: expected a number of at least "
        "0, not 'twice'.",
    ),
    "multiplier 0": (
        train("path: a\nshuffle_over_epochs_multiplier: 0"),
        "demo.yaml:6, splits.train.shuffle_over_epochs_multiplier: expected a whole number of at "
        "least 1, -1 (with replacement) or null, not 0.",
    ),
    "blend mode": (
        entries("- path: a\nblend_mode: exat"),
        "demo.yaml:7, splits.train.blend_mode: expected one of exact, random, not 'exat'. Did "
        "you mean 'exact'?",
    ),
    "lengths without tokens": (
        entries("- path: a\nlengths: tokens"),
        "demo.yaml:7, splits.train.lengths: 'lengths' has no meaning without 'unit: tokens'",
    ),
    "number as split part": (
        train("path: a\nsplit_part: 5"),
        "demo.yaml:6, splits.train.split_part: expected text, not 5. Write it in quotes: '5'.",
    ),
    "empty path": (
        train("path:"),
        "demo.yaml:5, splits.train.path: expected text, not nothing.",
    ),
    "list of tags": (
        train("path: a\nsubflavors: [x]"),
        "demo.yaml:6, splits.train.subflavors: expected a map of tags, not ['x'].",
    ),
    "text for a node": (
        HEAD + "splits:\n  train: coco\n",
        f"demo.yaml:4, splits.train: expected a map with one of the keys {NODES}, not 'coco'. "
        "Write {path: coco}.",
    ),
    "empty split (item 28)": (
        HEAD + "splits:\n  train:\n",
        f"demo.yaml:4, splits.train: expected a map with one of the keys {NODES}, not nothing.",
    ),
    "text for a blend": (
        train("blend: a"),
        "demo.yaml:5, splits.train.blend: expected a list of entries, as [{path: ./coco}], not "
        "'a'.",
    ),
    "empty blend": (
        train("blend: []"),
        "demo.yaml:5, splits.train.blend: the list is empty; write at least one entry",
    ),
    # Item 39: 0 is off, so only all of them are an error.
    "all weights 0": (
        entries("- path: a\n  weight: 0\n- path: b\n  weight: {schedule: step, points: {0: 0}}"),
        "demo.yaml:4, splits.train: all weights are 0, which turns every entry off. Write a weight "
        "above 0 to at least one",
    ),
    "all repetitions 0": (
        train("blend_epochized:\n- path: a\n  repetitions: 0"),
        "demo.yaml:4, splits.train: all repetitions are 0, which turns every entry off. Write "
        "repetitions above 0 to at least one",
    ),
    # Subsets.
    "subset without range": (
        train("path: a\nsubset: {rang: [0%, 5%]}"),
        "demo.yaml:6, splits.train.subset: unknown key 'rang'. Did you mean 'range'? Allowed "
        "here: range.",
    ),
    "subset that is a list": (
        train("path: a\nsubset: [0%, 5%]"),
        "demo.yaml:6, splits.train.subset: expected a map with the keys range, not ['0%', '5%'].",
    ),
    "percent and number": (
        train("path: a\nsubset: {range: [10%, 500]}"),
        "demo.yaml:6, splits.train.subset.range: ['10%', 500] mixes a percentage with something "
        "else; write both ends in percent ('100%' is the end) or both as sample numbers",
    ),
    "percent and end": (
        train("path: a\nsubset: {range: [10%, end]}"),
        "demo.yaml:6, splits.train.subset.range: ['10%', 'end'] mixes a percentage with something "
        "else; write both ends in percent ('100%' is the end) or both as sample numbers",
    ),
    "floats": (
        train("path: a\nsubset: {range: [0.1, 0.5]}"),
        f"demo.yaml:6, splits.train.subset.range: expected {RANGE}, not [0.1, 0.5].",
    ),
    "three ends": (
        train("path: a\nsubset: {range: [1, 2, 3]}"),
        f"demo.yaml:6, splits.train.subset.range: expected {RANGE}, not [1, 2, 3].",
    ),
    "negative start": (
        train("path: a\nsubset: {range: [-5, end]}"),
        f"demo.yaml:6, splits.train.subset.range: expected {RANGE}, not [-5, 'end'].",
    ),
    "more than everything": (
        train("path: a\nsubset: {range: [0%, 101%]}"),
        "demo.yaml:6, splits.train.subset.range: '101%' is more than 100%",
    ),
    "start behind the end": (
        train("path: a\nsubset: {range: [60%, 50%]}"),
        "demo.yaml:6, splits.train.subset.range: ['60%', '50%'] selects nothing: it must start "
        "before it ends",
    ),
    "empty range": (
        train("path: a\nsubset: {range: [5, 5]}"),
        "demo.yaml:6, splits.train.subset.range: [5, 5] selects nothing: it must start before it "
        "ends",
    ),
    "numbers on a blend": (
        entries("- path: a\nsubset: {range: [0, 5]}"),
        "demo.yaml:7, splits.train.subset.range: [0, 5]: Can only use absolute subset ranges for "
        "a leaf dataset: numbers of samples are only allowed for a leaf dataset, a folder or a "
        "JSONL file; write percentages, as ['0%', '50%']",
    ),
    # Schedules.
    "schedule without points": (
        entries("- path: a\n  weight: {schedule: linear}"),
        "demo.yaml:7, splits.train.blend[0].weight: key 'points' is missing. Weights by the "
        "number of samples drawn so far in the run, or by steps.",
    ),
    "kind of schedule": (
        entries("- path: a\n  weight: {schedule: cosin, points: {0: 1}}"),
        "demo.yaml:7, splits.train.blend[0].weight.schedule: expected one of linear, step, "
        "cosine, not 'cosin'. Did you mean 'cosine'?",
    ),
    "place of a point": (
        entries("- path: a\n  weight:\n    schedule: step\n    points: {0: 1, soon: 2}"),
        "demo.yaml:9, splits.train.blend[0].weight.points.soon: 'soon' is not a number of draws "
        "or steps",
    ),
    "value of a point": (
        entries("- path: a\n  weight:\n    schedule: step\n    points: {0: 1, 9: x}"),
        "demo.yaml:9, splits.train.blend[0].weight.points.9: expected a number of at least 0, not "
        "'x'.",
    ),
    "list of points": (
        entries("- path: a\n  weight: {schedule: step, points: [1, 2]}"),
        "demo.yaml:7, splits.train.blend[0].weight.points: expected a map of points, as "
        "{0: 1.0, 1000: 0.1}, not [1, 2].",
    ),
    "point twice": (
        entries("- path: a\n  weight: {schedule: step, points: {0: 1, 0.0: 2}}"),
        "demo.yaml:7, splits.train.blend[0].weight: step schedule, point 1: x=0.0 must lie behind "
        "x=0.0 of the point before",
    ),
    "samples per step": (
        entries("- path: a\n  weight: {schedule: step, points: {0: 1}, samples_per_step: 0}"),
        "demo.yaml:7, splits.train.blend[0].weight.samples_per_step: expected a whole number of "
        "at least 1, not 0.",
    ),
    "points without a schedule around them": (
        entries("- path: a\n  points: {0: 1}"),
        "demo.yaml:7, splits.train.blend[0]: key 'points' does not belong here but into 'weight'. "
        f"Allowed here: {REFERENCE}, weight.",
    ),
    # The whole file.
    "no splits": (
        HEAD,
        "demo.yaml:1: key 'splits' is missing. A node for each split, by the name of the split.",
    ),
    "no split": (
        HEAD + "splits: {}\n",
        "demo.yaml:3, splits: expected a map of splits, as {train: {path: ./coco}}, not {}.",
    ),
    "list of splits": (
        HEAD + "splits:\n- train\n",
        "demo.yaml:3, splits: expected a map of splits, as {train: {path: ./coco}}, not "
        "['train'].",
    ),
    "a list": (
        "- path: a\n",
        "demo.yaml: expected a map with the keys splits, __module__, __class__, expand_paths, not "
        "[{'path': 'a'}].",
    ),
    "empty file (item 28)": ("", "demo.yaml: the file is empty; write it, or remove it"),
    "expand_paths": (
        HEAD + "expand_paths: 1\nsplits:\n  train: {path: a}\n",
        "demo.yaml:3, expand_paths: expected true or false, not 1.",
    ),
    "foreign module": (
        "__module__: my.data\n__class__: MetadatasetV2\nsplits:\n  train: {path: a}\n",
        "demo.yaml:1, __module__: expected megatron.energon, or a module in it, as no other is "
        "imported, even with `trust`, not 'my.data'.",
    ),
    "foreign class": (
        "__module__: megatron.energon\n__class__: MetadatasetV3\nsplits:\n  train: {path: a}\n",
        "demo.yaml:2, __class__: expected one of Metadataset, MetadatasetV2, not 'MetadatasetV3'. "
        "Did you mean 'MetadatasetV2'?",
    ),
    "mistake in another split": (
        HEAD + "splits:\n  train: {path: a}\n  val: {paht: b}\n",
        "demo.yaml:5, splits.val: unknown key 'paht'. Did you mean 'path'? Allowed here: "
        f"{NODES}, {REFERENCE[6:]}, joiner, blend_mode, unit, lengths, until.",
    ),
    "mistake in an entry that is off": (
        entries("- path: a\n- weight: 0\n  path: b\n  nmae: x"),
        "demo.yaml:9, splits.train.blend[1]: unknown key 'nmae'. Did you mean 'name'? Allowed "
        f"here: {REFERENCE}, weight.",
    ),
    # The older form.
    "newer form without its class": (
        "splits:\n  train:\n    blend:\n    - path: a\n",
        "demo.yaml:3, splits.train: key 'blend' is not of the older form, in which files without "
        "'__class__' or with '__class__: Metadataset' are read. Add '__module__: megatron.energon'"
        " and '__class__: MetadatasetV2' at the top of the file; 'datasets' is then called 'blend'",
    ),
    "path without the class": (
        "splits:\n  train:\n    path: a\n",
        "demo.yaml:3, splits.train: key 'path' is not of the older form, in which files without "
        "'__class__' or with '__class__: Metadataset' are read. Add '__module__: megatron.energon'"
        " and '__class__: MetadatasetV2' at the top of the file; 'datasets' is then called 'blend'",
    ),
    "key of the newer form in an entry": (
        "splits:\n  train:\n    datasets:\n    - path: a\n      subset: {range: [0, 5]}\n",
        "demo.yaml:5, splits.train.datasets[0]: key 'subset' is not of the older form, in which "
        "files without '__class__' or with '__class__: Metadataset' are read. Add "
        "'__module__: megatron.energon' and '__class__: MetadatasetV2' at the top of the file; "
        "'datasets' is then called 'blend'",
    ),
    "unknown key of the older form": (
        "splits:\n  train:\n    datasets:\n    - path: a\n      wieght: 1\n",
        "demo.yaml:5, splits.train.datasets[0]: unknown key 'wieght'. Did you mean 'weight'? "
        "Allowed here: path, weight, split_part, subflavor, subflavors, "
        "shuffle_over_epochs_multiplier, dataset_config, split_config.",
    ),
    "schedule in the older form": (
        "splits:\n  train:\n    datasets:\n    - {path: a, weight: {schedule: step}}\n",
        "demo.yaml:4, splits.train.datasets[0].weight: expected a number of at least 0, not "
        "{'schedule': 'step'}.",
    ),
    "split without datasets": (
        "splits:\n  train: {}\n",
        "demo.yaml:2, splits.train: key 'datasets' is missing. Entries, each with a weight (1 by "
        "default).",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_error_names_place_and_remedy(name: str, folder: Path) -> None:
    text, message = MISTAKES[name]
    with pytest.raises(DatasetFormatError) as caught:
        read(text, folder)
    assert str(caught.value) == message


def test_key_that_is_twice_is_refused(folder: Path) -> None:
    with pytest.raises(DatasetFormatError, match=r"^demo.yaml:5: key 'train' is there twice"):
        read(HEAD + "splits:\n  train: {path: a}\n  train: {path: b}\n", folder)


def test_error_in_a_dict_names_the_key_path(folder: Path) -> None:
    source = {"__class__": "MetadatasetV2", "splits": {"train": {"blend": [{"paht": "a"}]}}}
    with pytest.raises(DatasetFormatError) as caught:
        read_metadataset(source, "train")
    assert str(caught.value).startswith(
        "<dict>, splits.train.blend[0]: unknown key 'paht'. Did you mean 'path'?"
    )


FULL = {
    "__module__": "megatron.energon",
    "__class__": "MetadatasetV2",
    "expand_paths": False,
    "splits": {
        "train": {
            "blend": [
                {
                    "weight": {"schedule": "linear", "points": {"0": 1}, "samples_per_step": 8},
                    "path": "a", "name": "a", "loss_weight": 0.5, "subset": {"range": [1, "end"]},
                    "subflavors": {"tag": 1}, "split_part": "p", "dataset_config": "d.yaml",
                    "split_config": "s.yaml", "shuffle_over_epochs_multiplier": 2,
                    "aux": {"x": "b", "y": {"path": "b"}, "z": {"fs_path": "b"}},
                },
                {"weight": 2, "concat": [{"path": "b"}], "loss_weight": 2},
            ],
            "name": "all", "loss_weight": 3, "subset": {"range": ["0%", "50%"]},
            "subflavors": {"tag": 2}, "split_part": "q", "shuffle_over_epochs_multiplier": 1,
            "blend_mode": "exact", "unit": "tokens", "lengths": "gpt2", "until": "forever",
        },
        "val": {"blend_epochized": [{"repetitions": 2, "path": "c"}], "name": "val"},
        "joined": {
            "join": [{"path": "a"}, {"path": "b", "nonmatch": "skip"}],
            "joiner": {"__module__": "m", "__function__": "f"},
        },
    },
}  # fmt: skip
FULL_V1 = {
    "splits": {
        "train": {
            "datasets": [
                {
                    "weight": 2, "path": "a", "split_part": "p", "subflavors": {"tag": 1},
                    "shuffle_over_epochs_multiplier": 2, "dataset_config": "d", "split_config": "s",
                    "subflavor": "x",
                }
            ]
        }
    }
}  # fmt: skip
# Below these, keys are the user's own.
FREE = ("splits", "subflavors", "points", "aux")


def misspellings(value: Any, rebuild: Any = lambda value: value, is_free: bool = False) -> Any:
    """All copies of a tree with one key misspelled, as (copy, right key, wrong key)."""
    if isinstance(value, list):
        for i, item in enumerate(value):

            def with_item(new: Any, i: int = i) -> Any:
                return rebuild([*value[:i], new, *value[i + 1 :]])

            yield from misspellings(item, with_item)
    if isinstance(value, dict):
        for key, item in value.items():
            if not is_free:
                for wrong in {key[:2] + key[1:], key[:-2] + key[-1], key[0] + key[2:]}:
                    changed = {wrong if k == key else k: v for k, v in value.items()}
                    yield rebuild(changed), key, wrong

            def with_value(new: Any, key: str = key) -> Any:
                return rebuild({**value, key: new})

            yield from misspellings(item, with_value, is_free=key in FREE)


@pytest.mark.parametrize("whole", [FULL, FULL_V1], ids=["v2", "v1"])
def test_every_misspelled_key_is_named_with_the_right_one(whole: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        read(dump_yaml(whole), folder)
        tried = set()
        for text, right, wrong in misspellings(whole):
            with pytest.raises(DatasetFormatError) as caught:
                read(dump_yaml(text), folder)
            if right in ("__class__", "__module__"):  # the file is one of the older form then
                assert f"unknown key {wrong!r}" in str(caught.value)
            else:
                assert f"unknown key {wrong!r}. Did you mean {right!r}?" in str(caught.value)
            tried.add(right)
    every_key = {name for keys in KEYS.values() for name in keys}
    assert len(tried) >= 10
    assert whole is FULL_V1 or every_key <= tried


def test_every_key_that_has_one_home_names_it() -> None:
    for main, kind in KINDS.items():
        others = [KEYS[other] for other in KINDS.values() if other is not kind]
        for name in KEYS[kind]:
            if name != main and not any(name in keys for keys in others):
                assert HOMES[name] == f"beside {main!r}"


def test_percentages_are_exact(folder: Path) -> None:
    node = read(train("path: a\nsubset: {range: [.5%, 33.3%]}"), folder)
    assert node.subset == (SubsetRange(Fraction(1, 200), Fraction(333, 1000)),)
    node = read(train("path: a\nsubset: {range: [10, end]}"), folder)
    assert node.subset == (SubsetRange(10, None),)
    node = read(train("path: a\nsubset: {range: [10, 20]}"), folder)
    assert node.subset == (SubsetRange(10, 20),)


def test_repetitions_are_exact(folder: Path) -> None:
    node = read(train("blend_epochized:\n- {path: a, repetitions: 0.1}\n- path: b"), folder)
    assert isinstance(node, BlendEpochized)
    assert [member.repetitions for member in node.members] == [Fraction(1, 10), 1]


def test_points_are_sorted_and_steps_are_turned_into_draws(folder: Path) -> None:
    weight = "{schedule: cosine, points: {1_000: 0.1, 0: 1}, samples_per_step: 256}"
    node = read(entries(f"- path: a\n  weight: {weight}"), folder)
    assert node.members[0].weight == Schedule("cosine", ((0.0, 1.0), (256_000.0, 0.1)))


def test_settings_of_a_blend_have_defaults_and_can_be_set(folder: Path) -> None:
    node = read(entries("- path: a"), folder)
    assert isinstance(node, Blend)
    assert (node.mode, node.unit, node.lengths, node.until) == ("exact", "samples", None, None)
    assert node.members[0].weight == 1.0
    text = entries("- path: a\nunit: tokens\nlengths: gpt2\nuntil: all_once\nname: mine")
    node = read(text, folder)
    assert (node.unit, node.lengths, node.until) == ("tokens", "gpt2", "all_once")
    assert (node.name, str(node.place)) == ("mine", "demo.yaml:4, splits.train")
    assert read(entries("- path: a\nblend_mode: random"), folder).mode == "random"


def test_empty_values_of_optional_keys_equal_absent_keys(folder: Path) -> None:
    keys = ("name", "subset", "subflavors", "split_part", "dataset_config", "split_config")
    plain = read(train("path: a"), folder)
    assert isinstance(plain, Leaf)
    assert read(train("path: a\n" + "".join(f"{key}:\n" for key in keys)), folder) == plain


def test_older_form_is_a_blend(folder: Path) -> None:
    text = "splits:\n  train:\n    datasets:\n    - {path: a, weight: 3}\n    - path: b\n"
    for head in ("", "__module__: megatron.energon\n__class__: Metadataset\n"):
        node = read(head + text, folder)
        assert isinstance(node, Blend)
        assert [member.weight for member in node.members] == [3.0, 1.0]
        assert [member.node.source_id for member in node.members] == ["a/train", "b/train"]


def test_subflavor_of_the_older_form_is_deprecated(folder: Path) -> None:
    text = "splits:\n  train:\n    datasets:\n    - {path: a, subflavor: x, subflavors: {y: z}}\n"
    with pytest.warns(FutureWarning, match=r"demo\.yaml:4, .*subflavors: {__subflavor__: x}"):
        node = read(text, folder)
    assert node.members[0].node.subflavors == {"__subflavor__": "x", "y": "z"}


@pytest.mark.parametrize(
    "head",
    [
        "__class__: MetadatasetV2\n",
        "__module__: energon_lite\n__class__: MetadatasetV2\n",
        "__module__: megatron.energon.metadataset.metadataset_v2\n__class__: MetadatasetV2\n",
    ],
)
def test_class_is_found_under_energons_and_our_names(head: str, folder: Path) -> None:
    assert isinstance(read(head + "splits:\n  train: {path: a}\n", folder), Leaf)
