"""From files to trees: paths, ids, nested files, and what multiplies or merges down the tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import get_train_dataset
from energon_lite.core.errors import DatasetFormatError
from energon_lite.metadataset.nodes import (
    Blend,
    BlendEpochized,
    Concat,
    Leaf,
    Member,
    Node,
    children,
    leaves,
)
from energon_lite.metadataset.read import is_metadataset, read_metadataset, split_names
from energon_lite.metadataset.values import SubsetRange
from energon_lite.order.schedules import Schedule
from energon_lite.storage.yaml import dump_yaml

HEAD = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
JOINER = {"__module__": "energon_lite", "__class__": "TextSample"}


def write(path: str, expand_paths: bool | None = None, **splits: Any) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    expand = {} if expand_paths is None else {"expand_paths": expand_paths}
    Path(path).write_text(dump_yaml({**HEAD, **expand, "splits": splits}))
    return path


def inline(node: Any, **root: Any) -> dict[str, Any]:
    return {**HEAD, **root, "splits": {"train": node}}


def only_leaf(source: Any, split: str = "train") -> Leaf:
    [leaf] = leaves(read_metadataset(source, split))
    return leaf


def ids(source: Any, split: str = "train") -> list[str]:
    return [leaf.source_id for leaf in leaves(read_metadataset(source, split))]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, deep enough that `..` stays in the test's own."""
    (tmp_path / "x" / "meta").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "x" / "meta")
    return Path.cwd()


# Laws: whatever tree is written, its numbers come back.

numbers = st.floats(0, 1e6, allow_subnormal=False) | st.integers(0, 100)
plain_leaf = st.fixed_dictionaries(
    {"path": st.sampled_from(["a", "./b", "../c", "deep/d"])},
    optional={"loss_weight": numbers, "name": st.sampled_from(["one", "two"])},
)


def blends(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entry = st.builds(
        lambda node, weight: {**node, "weight": weight}, inner, numbers.filter(lambda w: w > 0)
    )
    made = st.fixed_dictionaries(
        {"blend": st.lists(entry, min_size=1, max_size=3)}, optional={"loss_weight": numbers}
    )
    concats = st.fixed_dictionaries(
        {"concat": st.lists(inner, min_size=1, max_size=3)}, optional={"loss_weight": numbers}
    )
    return made | concats


trees = st.recursive(plain_leaf, blends, max_leaves=8)


def flat(tree: Any, above: float = 1.0) -> Iterator[tuple[str, float]]:
    """Each leaf's id and loss weight, worked out another way."""
    factor = above * tree.get("loss_weight", 1.0)
    if "path" in tree:
        text = os.path.normpath(tree["path"])
        yield tree.get("name", f"{text}/train"), factor
    for entry in tree.get("blend", tree.get("concat", [])):
        yield from flat(entry, factor)


def same_shape(tree: Any, node: Node) -> None:
    if "path" in tree:
        assert isinstance(node, Leaf)
        return
    entries = tree.get("blend", tree.get("concat"))
    assert isinstance(node, Blend if "blend" in tree else Concat)
    if isinstance(node, Blend):
        assert [member.weight for member in node.members] == [e["weight"] for e in entries]
    for entry, child in zip(entries, children(node), strict=True):
        same_shape(entry, child)


@given(trees)
def test_every_tree_is_read_with_its_weights_and_ids(tree: Any) -> None:
    node = read_metadataset(write("demo.yaml", train=tree), "train")
    same_shape(tree, node)
    assert [(leaf.source_id, leaf.loss_weight) for leaf in leaves(node)] == list(flat(tree))
    from_dict = leaves(read_metadataset(inline(tree), "train"))
    assert [leaf.path for leaf in from_dict] == [leaf.path for leaf in leaves(node)]


@given(trees)
def test_a_tree_in_a_separate_file_is_the_same_tree(tree: Any) -> None:
    write("inner.yaml", train=tree)
    outer = read_metadataset(write("outer.yaml", train={"path": "inner.yaml"}), "train")
    alone = read_metadataset("inner.yaml", "train")
    assert outer == alone


# Paths and ids.


def test_paths_are_relative_to_their_file_and_ids_to_the_root(folder: Path) -> None:
    nodes = [{"path": path} for path in ("../coco", "../../far/", str(folder / "abs" / "in"))]
    write("sub/inner.yaml", train={"concat": nodes})
    found = leaves(read_metadataset(write("demo.yaml", train={"path": "sub/inner.yaml"}), "train"))
    assert [leaf.source_id for leaf in found] == ["coco/train", "../far/train", "abs/in/train"]
    assert [leaf.path for leaf in found] == [
        folder / "coco", folder.parent / "far", folder / "abs" / "in",
    ]  # fmt: skip
    assert found[1].written == "../../far/"
    assert str(found[1].place) == "sub/inner.yaml:7, splits.train.concat[1]"


def test_ids_do_not_depend_on_the_folder_of_the_root_metadataset(folder: Path) -> None:
    for place in ("one", "two/deep"):
        tree = {
            "concat": [{"path": f"{folder}/{place}/mine"}, {"path": "../other"},
                       {"path": "/data/sets/coco"}, {"path": "/coco"}]
        }  # fmt: skip
        write(f"{place}/demo.yaml", train=tree)
        for source in (f"{place}/demo.yaml", f"{folder}/{place}/demo.yaml"):
            assert ids(source) == [
                "mine/train", "../other/train", "sets/coco/train", "coco/train",
            ]  # fmt: skip
    other = str(folder.parent / "other" / "inner.yaml")
    write(other, train={"concat": [{"path": "../sets/coco"}, {"path": f"{folder}/mine"}]})
    assert ids(write("demo.yaml", train={"path": other})) == ["sets/coco/train", "mine/train"]


def test_paths_of_a_dict_start_in_the_current_folder_without_links(folder: Path) -> None:
    (folder / "real" / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "real" / "deep")
    leaf = only_leaf(inline({"path": Path("sets") / "coco"}))
    assert (str(leaf.place), leaf.source_id) == ("<dict>, splits.train", "sets/coco/train")
    for written, path in (
        (Path("sets") / "coco", folder / "sets/coco"), ("link/../coco", folder / "coco"),
        ("file://sub/a", folder / "sub/a"), ("file:///sub/a", Path("/sub/a")),
    ):  # fmt: skip
        assert only_leaf(inline({"path": written})).path == path


BY_TOKENS = "a blend by tokens is exact: 'unit: tokens' cannot be 'blend_mode: random'"
# The node of a split -> the key of the mistake, and the message.
REFUSED: dict[str, tuple[Any, str, str]] = {
    "a remote path": (
        {"path": "dss://p/a"}, ".path", "'dss://p/a' is remote (dss://), and of no storage that is "
        "known here: s3://, gs://, az://, msc://, http:// and https:// are. Copy or mount the "
        "data, and write its local path",
    ),
    "a path above the root": (
        {"path": "../" * 99 + "a"}, ".path",
        f"'{'../' * 99}a' leads above the root of the file system; correct it",
    ),
    "a config for lines of JSON": (
        {"path": "a.jsonl", "split_config": "b.yaml"}, ".split_config", "'split_config' is for "
        "dataset folders, and a.jsonl is a JSONL file, which has no split parts and only crude "
        "samples",
    ),
    "a variable that is not set": (
        {"path": "${NOT_SET}/a"}, ".path",
        "'${NOT_SET}/a': environment variable 'NOT_SET' is not set; set it",
    ),
    "an empty variable": (
        {"path": "${EMPTY}/a"}, ".path",
        "'${EMPTY}/a': environment variable 'EMPTY' is not set; set it",
    ),
    "an open brace": (
        {"path": "${OPEN/a"}, ".path", "'${OPEN/a': '${' without a name and '}' behind it"
    ),
    "an unknown user": (
        {"path": "~no_such_user_/a"}, ".path",
        "'~no_such_user_/a': no home folder known for '~no_such_user_'",
    ),
    "numbers of samples for a metadataset": (
        {"path": "inner.yaml", "subset": {"range": [0, 5]}}, ".subset",
        "Can only use absolute subset ranges for a leaf dataset: numbers of samples are only "
        "allowed for a leaf dataset, a folder or a JSONL file, and inner.yaml is a metadataset; "
        "write percentages, as ['0%', '50%']",
    ),
    "a random blend by tokens": (
        {"unit": "tokens", "blend_mode": "random", "blend": [{"path": "a"}]}, ".unit", BY_TOKENS,
    ),
    "a blend by tokens in a random one": (
        {"blend_mode": "random", "blend": [{"unit": "tokens", "blend": [{"path": "a"}]}]},
        ".blend[0].unit", BY_TOKENS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY", "")
    write("inner.yaml", train={"path": "a"})
    node, key, message = REFUSED[name]
    with pytest.raises(DatasetFormatError) as caught:
        read_metadataset(inline(node, expand_paths=True), "train", trust=True)
    assert str(caught.value) == f"<dict>, splits.train{key}: {message}"


def test_paths_are_expanded_only_where_the_file_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/mnt/disk7/data")
    monkeypatch.setenv("NAME", "coco")
    monkeypatch.setenv("HOME", "/users/me")
    nodes = [{"path": path} for path in ("${DATA}/coco", "~/coco", "sets/${NAME}", "$DATA/x")]
    written = inline({"concat": nodes}, expand_paths=True)
    found = leaves(read_metadataset(written, "train", trust=True))
    assert [str(leaf.path) for leaf in found] == [
        "/mnt/disk7/data/coco", "/users/me/coco", f"{folder}/sets/coco", f"{folder}/$DATA/x",
    ]  # fmt: skip
    # What is absolute keeps its id on another machine; what is relative is as if written out.
    assert [leaf.source_id for leaf in found] == [
        "${DATA}/coco/train", "~/coco/train", "sets/coco/train", "$DATA/x/train",
    ]  # fmt: skip
    assert [leaf.written for leaf in found] == [node["path"] for node in nodes]
    literal = leaves(read_metadataset(inline({"concat": nodes}), "train"))
    assert [leaf.path for leaf in literal] == [folder / node["path"] for node in nodes]


def test_expansion_is_for_the_file_that_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", str(folder))
    write("inner.yaml", train={"path": "${HERE}/a"})
    outer = write("outer.yaml", expand_paths=True, train={"path": "${HERE}/inner.yaml"})
    (leaf,) = leaves(read_metadataset(outer, "train", trust=True))
    assert leaf.path == folder / "${HERE}" / "a"


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    "node",
    [
        {"path": "${SECRET}/a"},
        {"path": "http://127.0.0.1:9/${SECRET}/a"},
        {"path": "a", "meta_dir": "b/${SECRET}"},
        {"path": "a", "aux": {"images": "filesystem://${SECRET}"}},
        {"join": [{"path": "a"}, {"path": "${SECRET}"}], "joiner": JOINER},
    ],
)
def test_the_environment_is_read_only_with_trust(
    folder: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any], is_nested: bool
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    file = write("inner.yaml", expand_paths=True, train=node)
    if is_nested:
        file = write("outer.yaml", train={"path": "inner.yaml"})
    with pytest.raises(DatasetFormatError, match=r"\$\{SECRET\}.* trust=True") as caught:
        read_metadataset(file, "train")
    assert "hidden" not in str(caught.value)
    with pytest.raises(DatasetFormatError, match="trust=True"):
        get_train_dataset(file, batch_size=1)
    monkeypatch.setenv("ENERGON_LITE_TRUST", "1")
    read_metadataset(file, "train")


# What multiplies and merges.


def test_subflavors_of_outer_nodes_win() -> None:
    write("inner.yaml", train={"path": "a", "subflavors": {"x": 1, "y": 1, "z": 1}})
    outer = {
        "blend": [{"path": "inner.yaml", "subflavors": {"y": 2, "z": 2}}],
        "subflavors": {"z": 3, "w": [3]},
    }
    leaf = only_leaf(write("outer.yaml", train=outer))
    assert leaf.subflavors == {"x": 1, "y": 2, "z": 3, "w": [3]}
    assert type(leaf.subflavors) is dict


@pytest.mark.parametrize(
    ("outer", "inner", "combined"),
    [(2, 3, 6), (2, -1, -1), (-1, 2, -1), (-1, -1, -1), (None, -1, None), (2, None, None)],
)
def test_multipliers_are_combined(outer: Any, inner: Any, combined: Any) -> None:
    key = "shuffle_over_epochs_multiplier"
    write("inner.yaml", train={"path": "a", key: inner})
    assert only_leaf(inline({"path": "inner.yaml", key: outer})).shuffle_over_epochs_multiplier == (
        combined
    )


def test_ranges_are_ordered_from_the_innermost_to_the_outermost() -> None:
    write("inner.yaml", train={"path": "a", "subset": {"range": [100, "end"]}})
    outer = {
        "blend": [{"path": "inner.yaml", "subset": {"range": ["25%", "75%"]}}, {"path": "b"}],
        "subset": {"range": ["0%", "50%"]},
    }
    first, second = leaves(read_metadataset(write("outer.yaml", train=outer), "train"))
    half = SubsetRange(Fraction(0), Fraction(1, 2))
    assert first.subset == (
        SubsetRange(100, None), SubsetRange(Fraction(1, 4), Fraction(3, 4)), half,
    )  # fmt: skip
    assert second.subset == (half,)


def test_split_part_holds_for_what_is_inside() -> None:
    write("inner.yaml", good={"concat": [{"path": "a"}, {"path": "b", "split_part": "own"}]})
    tree = {"concat": [{"path": "inner.yaml"}, {"path": "c"}], "split_part": "good"}
    assert ids(inline(tree)) == ["a/good", "b/own", "c/good"]
    found = leaves(read_metadataset(inline(tree), "train"))
    assert [leaf.split_part for leaf in found] == ["good", "own", "good"]


def test_names_are_ids_of_leaves_and_names_of_nodes() -> None:
    write("one.yaml", train={"path": "a", "name": "inner"})
    write("many.yaml", train={"concat": [{"path": "a"}, {"path": "b"}], "name": "inner"})
    assert ids(inline({"path": "a", "name": "mine"})) == ["mine"]
    assert ids("one.yaml") == ["inner"]
    assert ids(inline({"path": "one.yaml", "name": "outer"})) == ["outer"]
    node = read_metadataset(inline({"path": "many.yaml", "name": "outer"}), "train")
    assert isinstance(node, Concat)
    assert node.name == "outer"
    assert [leaf.name for leaf in leaves(node)] == [None, None]


# What is off.


def test_entries_of_weight_0_are_removed_and_never_looked_up() -> None:
    off = {"schedule": "step", "points": {"0": 0}}
    on = {"schedule": "step", "points": {"0": 0, "5": 1}}
    tree = {
        "blend": [
            {"path": "missing.yaml", "weight": 0},
            {"path": "msc://nowhere", "weight": 0.0},
            {"path": "${NOT_SET}", "weight": off},
            {"blend_epochized": [{"path": "missing.yaml", "repetitions": 0}], "weight": 0},
            {"path": "a"},
            {"path": "b", "weight": on},
        ]
    }
    node = read_metadataset(inline(tree, expand_paths=True), "train")
    assert isinstance(node, Blend)
    assert [member.weight for member in node.members] == [
        1.0, Schedule("step", ((0.0, 0.0), (5.0, 1.0))),
    ]  # fmt: skip
    epochized = {"blend_epochized": [{"path": "missing.yaml", "repetitions": 0}, {"path": "a"}]}
    node = read_metadataset(inline(epochized), "train")
    assert isinstance(node, BlendEpochized)
    assert len(node.members) == 1
    assert only_leaf(inline({"path": "a", "loss_weight": 0})).loss_weight == 0.0  # not off


# Blends of both kinds.


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("concat_between", [False, True])
@pytest.mark.parametrize("outer", ["blend", "blend_epochized"])
def test_both_kinds_of_blend_in_one_tree_are_refused(
    outer: str, concat_between: bool, through_a_file: bool
) -> None:
    inner_kind = "blend" if outer == "blend_epochized" else "blend_epochized"
    inner: dict[str, Any] = {inner_kind: [{"path": "a"}]}
    if concat_between:
        inner = {"concat": [inner]}
    if through_a_file:
        inner = {"path": write("inner.yaml", train=inner)}
    source = write("demo.yaml", train={outer: [{"path": "b"}, inner]})
    with pytest.raises(ValueError, match="same blend mode") as caught:
        read_metadataset(source, "train")
    assert "demo.yaml:4, splits.train " in str(caught.value)
    at = "inner.yaml:" if through_a_file else f"splits.train.{outer}[1]"
    assert at in str(caught.value)
    assert ("concat[0]" in str(caught.value)) == concat_between


# Nested files.


def test_nested_files_of_both_suffixes_and_forms_are_opened() -> None:
    write("new.yml", train={"path": "a"})
    Path("old.yaml").write_text(
        "splits:\n  train:\n    datasets:\n    - {path: new.yml, weight: 2}\n"
    )
    node = read_metadataset(inline({"blend": [{"path": "old.yaml", "weight": 3}]}), "train")
    assert isinstance(node, Blend)
    assert isinstance(node.members[0], Member)
    assert isinstance(node.members[0].node, Blend)
    assert ids(inline({"path": "old.yaml"})) == ["a/train"]


def test_a_folder_with_the_suffix_of_a_file_is_a_dataset(folder: Path) -> None:
    (folder / "odd.yaml").mkdir()
    assert only_leaf(inline({"path": "odd.yaml"})).path == folder / "odd.yaml"
    assert not is_metadataset("odd.yaml")


THERE = "Splits there: train, val. Ask for one of them with split_part"
CONFIG = (
    "is for dataset folders, and inner.yaml is a metadataset; set it beside the paths of the "
    "folders in there"
)
A, NAMED = {"path": "a"}, "sub/inner.yaml is named at outer.yaml:5, splits.train.path"
OUTER = {"path": "sub/inner.yaml"}
# The files, the last of which is read, as (name, split, node), the split, and the message.
FILES: dict[str, tuple[list[tuple[str, str, Any]], str, str, list[str]]] = {
    **{f"a {key}": (
        [("inner.yaml", "train", A), ("outer.yaml", "train", {"path": "inner.yaml", key: "x"})],
        "train", f"outer.yaml:6, splits.train.{key}: {key!r} {CONFIG}", [],
    ) for key in ("dataset_config", "split_config")},
    "nothing at the path": (
        [("sub/inner.yaml", "train", {"concat": [{"path": "gone.yaml"}]}),
         ("outer.yaml", "train", OUTER)], "train",
        "sub/inner.yaml:6, splits.train.concat[0].path: there is no metadataset FOLDER/sub/"
        "gone.yaml; check the path, which is relative to the folder of the file that names it",
        [NAMED],
    ),
    "a mistake in a nested file": (
        [("sub/inner.yaml", "train", {"paht": "a"}), ("outer.yaml", "train", OUTER)], "train",
        "sub/inner.yaml:5, splits.train: unknown key 'paht'. Did you mean 'path'?", [NAMED],
    ),
    "a split that is not there": (
        [("sub/inner.yaml", "train val", A)], "trian",
        f"sub/inner.yaml: no split 'trian'. Did you mean 'train'? {THERE}", [],
    ),
    "a split that a nested file has not": (
        [("sub/inner.yaml", "train val", A), ("outer.yaml", "test", OUTER)], "test",
        f"outer.yaml:5, splits.test.path: sub/inner.yaml has no split 'test'. {THERE}", [],
    ),
    "a circle": (
        [("sub/b.yaml", "train", {"path": "../c.yaml"}),
         ("c.yaml", "train", {"blend": [{"path": "sub/b.yaml"}]}),
         ("a.yaml", "train", {"path": "sub/b.yaml"})], "train",
        "c.yaml:6, splits.train.blend[0].path: metadatasets name each other in a circle: "
        "sub/b.yaml -> c.yaml -> sub/b.yaml",
        ["c.yaml is named at sub/b.yaml:5, splits.train.path",
         "sub/b.yaml is named at a.yaml:5, splits.train.path"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_mistakes_across_files_name_the_place_and_what_names_it(folder: Path, name: str) -> None:
    files, split, message, notes = FILES[name]
    for path, splits, node in files:
        write(path, **dict.fromkeys(splits.split(), node))
    with pytest.raises((DatasetFormatError, FileNotFoundError)) as caught:
        read_metadataset(files[-1][0], split)
    found = str(caught.value).replace(str(folder), "FOLDER")
    assert found.partition(" Allowed here")[0] == message
    assert getattr(caught.value, "__notes__", []) == notes


def test_missing_roots_and_circles_by_links_are_refused(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"metadataset nope\.yaml does not exist"):
        read_metadataset("nope.yaml", "train")
    with pytest.raises(FileNotFoundError, match="is a folder, not a metadataset file"):
        read_metadataset(folder, "train")
    write("self.yaml", train={"path": "link/self.yaml"})
    (folder / "link").symlink_to(folder)
    with pytest.raises(DatasetFormatError, match=r"circle: self\.yaml -> link/self\.yaml$"):
        read_metadataset("self.yaml", "train")


# The other functions.


def test_metadatasets_are_recognised_by_form(folder: Path) -> None:
    here = (write("a.yaml", train={"path": "a"}), "later.yml", folder / "a.yaml", {})
    assert all(map(is_metadataset, here))
    assert not any(map(is_metadataset, (folder, "a.jsonl")))


def test_split_names_come_in_the_order_of_the_file() -> None:
    source = write("demo.yaml", val={"path": "a"}, train={"path": "a"}, extra={"path": "a"})
    assert split_names(source) == ["val", "train", "extra"]
    assert split_names(inline({"path": "a"})) == ["train"]


def test_reading_changes_nothing_in_the_dict() -> None:
    tags = {"x": [1]}
    source = inline({"path": "a", "subflavors": tags})
    only_leaf(source).subflavors["x"].append(2)
    assert tags == {"x": [1]}


def test_nested_blends_inherit_mode_unit_and_lengths_unless_they_set_them() -> None:
    entries = [
        {"blend": [{"path": "a"}, {"concat": [{"blend": [{"path": "b"}]}]}]},
        {"unit": "samples", "blend_mode": "random", "blend": [{"path": "c"}]},
    ]
    tree: Any = read_metadataset(
        inline({"unit": "tokens", "lengths": "gpt2", "blend": entries}), "train"
    )
    first, second = (member.node for member in tree.members)
    inner = first.members[1].node.members[0]
    for blend in (tree, first, inner):
        assert (blend.mode, blend.unit, blend.lengths) == ("exact", "tokens", "gpt2")
    assert (second.mode, second.unit, second.lengths) == ("random", "samples", None)
