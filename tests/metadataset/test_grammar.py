"""Every error in a metadataset names file, line, key path and remedy."""

from __future__ import annotations

import re
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.nodes import KEYS, Blend, BlendEpochized, Leaf
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
    "dataset_config, split_config, meta_dir, aux"
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


# Long words of the messages.
WORDS = {
    "<ANY>": f"{NODES}, {REFERENCE[6:]}, joiner, blend_mode, unit, lengths, until",
    "<REFERENCE>": REFERENCE,
    "<EPOCHIZED>": EPOCHIZED,
    "<BLEND>": f"{EPOCHIZED.replace('_epochized', '')}, blend_mode, unit, lengths, until",
    "<RANGE>": RANGE,
    "<OLDER>": "is not of the older form, in which files without '__class__' or with '__class__: "
    "Metadataset' are read. Add '__module__: megatron.energon' and '__class__: MetadatasetV2' at "
    "the top of the file; 'datasets' is then called 'blend'",
    "<NODES>": NODES,
    "<ONLY>": "Can only use absolute subset ranges for a leaf dataset: numbers of samples are only "
    "allowed for a leaf dataset, a folder or a JSONL file; write percentages, as ['0%', '50%']",
    "<NUMBER>": "expected a number of at least 0, not",
    "<WEIGHT>": "expected a number of at least 0 or a schedule, not",
    "<MIX>": "mixes a percentage with something else; write both ends in percent ('100%' is the "
    "end) or both as sample numbers",
    "<PATH>": "expected a path, as ./images or filesystem://./images, or a map {path: ...} or "
    "{fs_path: ...}, not",
    "<OFF>": "which turns every entry off. Write",
    "<NONE>": "selects nothing: it must start before it ends",
    "<HOME>": "does not belong here but",
    "<NODE>": f"expected a map with one of the keys {NODES}, not",
}
# What is written -> line, place below `splits.train` and message; or the whole message.
MISTAKES = {
    "unknown key": (train("path: coco\nfoo: 1"), "6: unknown key 'foo'. Allowed here: "
        "<REFERENCE>."),
    "misspelled key in an entry": (entries("- path: a\n- path: b\n- path: c\n  wieght: 3"),
        "9.blend[2]: unknown key 'wieght'. Did you mean 'weight'? Allowed here: <REFERENCE>, "
        "weight."),
    "misspelled kind": (train("blnd:\n- path: a"), "5: unknown key 'blnd'. Did you mean 'blend'? "
        "Allowed here: <ANY>."),
    "no kind": (train("name: x"), "4: what to read is missing; write exactly one of <NODES>"),
    "key of another kind": (train("path: a\nblend_mode: random"), "6: key 'blend_mode' <HOME> "
        "beside 'blend'. Allowed here: <REFERENCE>."),
    "weight at a split": (train("path: a\nweight: 2"), "6: key 'weight' <HOME> to the entries of "
        "'blend'. Allowed here: <REFERENCE>."),
    "weight in an epochized blend": (train("blend_epochized:\n- path: a\n  weight: 2"),
        "7.blend_epochized[0]: key 'weight' <HOME> to the entries of 'blend'. Allowed here: "
        "<REFERENCE>, repetitions."),
    "until of an epochized blend": (train("blend_epochized:\n- path: a\nuntil: first"),
        "7: key 'until' <HOME> beside 'blend'. Allowed here: <EPOCHIZED>."),
    "datasets in the new form": (train("datasets:\n- path: a"), "5: key 'datasets' <HOME> to "
        "files without '__class__: MetadatasetV2'; write 'blend'. Allowed here: <ANY>."),
    "join": (train("join:\n- path: a\njoiner: {__module__: m, __class__: C}"),
        "5.join: a join of 1 datasets; write at least two, or a `path`"),
    "aux that is no map": (train("path: a\naux: ./b"), "6.aux: expected a map of names and file "
        "stores, as {images: ./images}, not './b'."),
    "aux of two paths": (train("path: a\naux: {more: {path: b, fs_path: c}}"),
        "6.aux.more: <PATH> {'path': 'b', 'fs_path': 'c'}."),
    "aux with a reserved name": (train("path: a\naux: {cache: ./b}"),
        "6.aux.cache: 'cache' is reserved: it is the cache, for `@cooker(need_cache=True)`. "
        "Choose another name"),
    "weight that is a word": (entries("- path: a\n  weight: abc"), "7.blend[0].weight: <WEIGHT> "
        "'abc'."),
    "infinite weight": (entries("- path: a\n  weight: 1e999"), "7.blend[0].weight: <WEIGHT> inf."),
    "weight that is too large a number": (
        entries("- path: a\n  weight: 1" + 400 * "0"),
        f"7.blend[0].weight: <WEIGHT> 1{75 * '0'} ....",
    ),
    "multiplier 0": (train("path: a\nshuffle_over_epochs_multiplier: 0"),
        "6.shuffle_over_epochs_multiplier: expected a whole number of at least 1, -1 (with "
        "replacement) or null, not 0."),
    "blend mode": (entries("- path: a\nblend_mode: exat"), "7.blend_mode: expected one of exact, "
        "random, not 'exat'. Did you mean 'exact'?"),
    "lengths without tokens": (entries("- path: a\nlengths: tokens"),
        "7.lengths: 'lengths' has no meaning without 'unit: tokens'"),
    "number as split part": (train("path: a\nsplit_part: 5"), "6.split_part: expected text, not "
        "5. Write it in quotes: '5'."),
    "empty path": (train("path:"), "5.path: expected text, not nothing."),
    "list of tags": (train("path: a\nsubflavors: [x]"), "6.subflavors: expected a map of tags, "
        "not ['x']."),
    "text for a node": (HEAD + "splits:\n  train: coco\n", "4: expected a map with one of the "
        "keys <NODES>, not 'coco'. Write {path: coco}."),
    "text for a blend": (train("blend: a"), "5.blend: expected a list of entries, as [{path: "
        "./coco}], not 'a'."),
    "empty blend": (train("blend: []"), "5.blend: the list is empty; write at least one entry"),
    "all weights 0": (
        entries("- path: a\n  weight: 0\n- path: b\n  weight: {schedule: step, points: {0: 0}}"),
        "4: all weights are 0, <OFF> a weight above 0 to at least one"),
    "all repetitions 0": (train("blend_epochized:\n- path: a\n  repetitions: 0"),
        "4: all repetitions are 0, <OFF> repetitions above 0 to at least one"),
    "subset without range": (train("path: a\nsubset: {rang: [0%, 5%]}"),
        "6.subset: unknown key 'rang'. Did you mean 'range'? Allowed here: range."),
    "subset that is a list": (train("path: a\nsubset: [0%, 5%]"), "6.subset: expected a map with "
        "the keys range, not ['0%', '5%']."),
    "percent and number": (train("path: a\nsubset: {range: [10%, 500]}"),
        "6.subset.range: ['10%', 500] <MIX>"),
    "floats": (train("path: a\nsubset: {range: [0.1, 0.5]}"), "6.subset.range: expected <RANGE>, "
        "not [0.1, 0.5]."),
    "more than everything": (train("path: a\nsubset: {range: [0%, 101%]}"),
        "6.subset.range: '101%' is more than 100%"),
    "start behind the end": (train("path: a\nsubset: {range: [60%, 50%]}"),
        "6.subset.range: ['60%', '50%'] <NONE>"),
    "empty range": (train("path: a\nsubset: {range: [5, 5]}"), "6.subset.range: [5, 5] <NONE>"),
    "numbers on a blend": (entries("- path: a\nsubset: {range: [0, 5]}"),
        "7.subset.range: [0, 5]: <ONLY>"),
    "schedule without points": (entries("- path: a\n  weight: {schedule: linear}"),
        "7.blend[0].weight: key 'points' is missing. Weights by the number of samples drawn so "
        "far in the run, or by steps."),
    "kind of schedule": (entries("- path: a\n  weight: {schedule: cosin, points: {0: 1}}"),
        "7.blend[0].weight.schedule: expected one of linear, step, cosine, not 'cosin'. Did you "
        "mean 'cosine'?"),
    "place of a point": (
        entries("- path: a\n  weight:\n    schedule: step\n    points: {0: 1, soon: 2}"),
        "9.blend[0].weight.points.soon: 'soon' is not a number of draws or steps"),
    "value of a point": (
        entries("- path: a\n  weight:\n    schedule: step\n    points: {0: 1, 9: x}"),
        "9.blend[0].weight.points.9: <NUMBER> 'x'."),
    "samples per step": (
        entries("- path: a\n  weight: {schedule: step, points: {0: 1}, samples_per_step: 0}"),
        "7.blend[0].weight.samples_per_step: expected a whole number of at least 1, not 0."),
    "points without a schedule around them": (entries("- path: a\n  points: {0: 1}"),
        "7.blend[0]: key 'points' <HOME> into 'weight'. Allowed here: <REFERENCE>, weight."),
    "no splits": (HEAD, "demo.yaml:1: key 'splits' is missing. A node for each split, by the "
        "name of the split."),
    "no split": (HEAD + "splits: {}\n", "demo.yaml:3, splits: expected a map of splits, as "
        "{train: {path: ./coco}}, not {}."),
    "a list": ("- path: a\n", "demo.yaml: expected a map with the keys splits, __module__, "
        "__class__, expand_paths, not [{'path': 'a'}]."),
    "empty file (item 28)": ("", "demo.yaml: the file is empty; write it, or remove it"),
    "expand_paths": (HEAD + "expand_paths: 1\nsplits:\n  train: {path: a}\n",
        "demo.yaml:3, expand_paths: expected true or false, not 1."),
    "foreign module": (
        "__module__: my.data\n__class__: MetadatasetV2\nsplits:\n  train: {path: a}\n",
        "demo.yaml:1, __module__: expected megatron.energon, or a module in it, as no other is "
        "imported, even with `trust`, not 'my.data'."),
    "foreign class": (
        "__module__: megatron.energon\n__class__: MetadatasetV3\nsplits:\n  train: {path: a}\n",
        "demo.yaml:2, __class__: expected one of Metadataset, MetadatasetV2, not 'MetadatasetV3'. "
        "Did you mean 'MetadatasetV2'?"),
    "mistake in another split": (HEAD + "splits:\n  train: {path: a}\n  val: {paht: b}\n",
        "demo.yaml:5, splits.val: unknown key 'paht'. Did you mean 'path'? Allowed here: <ANY>."),
    "newer form without its class": ("splits:\n  train:\n    blend:\n    - path: a\n",
        "3: key 'blend' <OLDER>"),
    "unknown key of the older form": (
        "splits:\n  train:\n    datasets:\n    - path: a\n      wieght: 1\n",
        "5.datasets[0]: unknown key 'wieght'. Did you mean 'weight'? Allowed here: path, weight, "
        "split_part, subflavor, subflavors, shuffle_over_epochs_multiplier, dataset_config, "
        "split_config."),
    "schedule in the older form": (
        "splits:\n  train:\n    datasets:\n    - {path: a, weight: {schedule: step}}\n",
        "4.datasets[0].weight: <NUMBER> {'schedule': 'step'}."),
    "split without datasets": ("splits:\n  train: {}\n", "2: key 'datasets' is missing. Entries, "
        "each with a weight (1 by default)."),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_error_names_place_and_remedy(name: str, folder: Path) -> None:
    text, message = MISTAKES[name]
    line, below = re.match(r"(\d*)(.*)", message).groups()  # type: ignore[union-attr]
    expected = f"demo.yaml:{line}, splits.train{below}" if line else message
    with pytest.raises(DatasetFormatError) as caught:
        read(text, folder)
    assert str(caught.value) == re.sub("<[A-Z]+>", lambda word: WORDS[word[0]], expected)


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
                    "split_config": "s.yaml", "meta_dir": "m", "shuffle_over_epochs_multiplier": 2,
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


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("[.5%, 33.3%]", SubsetRange(Fraction(1, 200), Fraction(333, 1000))),
        ("[10, end]", SubsetRange(10, None)),
        ("[10, 20]", SubsetRange(10, 20)),
    ],
)
def test_ranges_are_exact(folder: Path, written: str, found: SubsetRange) -> None:
    assert read(train(f"path: a\nsubset: {{range: {written}}}"), folder).subset == (found,)


def test_repetitions_are_exact_and_points_are_sorted_and_in_draws(folder: Path) -> None:
    node = read(train("blend_epochized:\n- {path: a, repetitions: 0.1}\n- path: b"), folder)
    assert isinstance(node, BlendEpochized)
    assert [member.repetitions for member in node.members] == [Fraction(1, 10), 1]
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
