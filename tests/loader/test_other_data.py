"""A checkpoint meets data that have changed since: refused, with what changed and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    SavableDataLoader,
    StateError,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
)
from energon_lite.formats import nvmeta
from energon_lite.formats.stored_offsets import STORED_OFFSETS

from ..conftest import write_tar
from ..helpers import metadataset, prepared, through_json

CONFIG = {"rank": 0, "world_size": 1, "num_workers": 0}
Shards = dict[str, list[tuple[str, str]]]


def numbered(*shards: Any) -> Shards:
    """Shards `0.tar`, ... of samples whose keys and texts are these numbers."""
    return {f"{n}.tar": [(f"{i:03d}", f"t{i:03d}") for i in own] for n, own in enumerate(shards)}


SAVED = numbered(range(0, 10), range(10, 20))


def write(root: Path, shards: Shards) -> Path:
    if root.exists():
        shutil.rmtree(root)
    for name, samples in shards.items():
        write_tar(root / name, [(f"{key}.txt", text.encode()) for key, text in samples])
    return prepared(root, "TextSample", {"text": "txt"})


def loader_of(path: Any, **settings: Any) -> SavableDataLoader[Any]:
    config = WorkerConfig(**CONFIG)
    dataset = get_train_dataset(path, batch_size=4, worker_config=config, **settings)
    return get_savable_loader(dataset)


def saved(path: Any, **settings: Any) -> Any:
    loader = loader_of(path, **settings)
    next(iter(loader))
    return through_json(loader.save_state_rank())


def refusal(path: Any, state: Any, **settings: Any) -> str:
    with pytest.raises(StateError) as caught:
        loader_of(path).restore_state_global([state], **settings)
    return str(caught.value)


def swapped(shards: Shards) -> Shards:
    """The same keys, with texts of the same sizes that have changed places."""
    found = {name: [*samples] for name, samples in shards.items()}
    (a, text), (b, other) = found["0.tar"][4], found["1.tar"][7]
    found["0.tar"][4], found["1.tar"][7] = (a, other), (b, text)
    return found


REWRITTEN = {
    "keys in another order": numbered(range(0, 20, 2), range(1, 20, 2)),
    "all but the first keys of shards in another order": numbered(
        [0, *range(9, 0, -1)], [10, *range(19, 10, -1)]
    ),
    "other keys": numbered(range(0, 10), range(20, 30)),
    "texts that have changed places": swapped(SAVED),
}


@pytest.mark.parametrize("case", REWRITTEN)
@pytest.mark.parametrize("migrate", [False, True])
def test_data_rewritten_under_the_same_names_are_refused(tmp_path, case, migrate) -> None:
    state = saved(write(tmp_path / "d", SAVED))
    text = refusal(write(tmp_path / "d", REWRITTEN[case]), state, migrate=migrate)
    assert "source d/train: its data were written again after the checkpoint" in text
    assert "begin a new run" in text
    assert "settings" not in text


def prepared_again(root: Path) -> None:
    prepare_dataset(root, tar_index_only=True, num_workers=0)


def without_digests(root: Path) -> None:
    (root / nvmeta.META / STORED_OFFSETS).unlink()  # as in a folder that Energon prepared


def more_in_another_part(root: Path) -> None:
    write_tar(root / "2.tar", [("more.txt", b"t")])
    parts = {"train": r"[01]\.tar", "val": r"2\.tar"}
    prepare_dataset(
        root, split_parts=parts, sample_type="TextSample", field_map={"text": "txt"},
        num_workers=0, force_overwrite=True,
    )  # fmt: skip


@pytest.mark.parametrize("change", [prepared_again, without_digests, more_in_another_part])
def test_same_samples_resume(tmp_path: Path, change: Callable[[Path], None]) -> None:
    root = write(tmp_path / "d", SAVED)
    state = saved(root)
    change(root)
    loader_of(root).restore_state_rank(state)


def test_digests_of_a_thousand_sources_stay_small(tmp_path: Path) -> None:
    config = loader_of(write(tmp_path / "d", SAVED)).config()
    assert '"content": "' in json.dumps(config)
    assert len(json.dumps(config).split('"content": "')[1].split('"')[0]) == 6


SHARDS_NOW = {
    "appended": (numbered(range(10), range(10, 20), range(20, 25)), "as another source"),
    "sorted between": (
        {"0.tar": SAVED["0.tar"], "05.tar": [("x", "t")], "1.tar": SAVED["1.tar"]},
        "as another source",
    ),
    "removed": (numbered(range(10)), "Shards may have been removed"),
    "renamed": ({"0.tar": SAVED["0.tar"], "2.tar": SAVED["1.tar"]}, "other names or sizes"),
    "moved from one to another": (numbered(range(9), range(9, 20)), "other names or sizes"),
}


@pytest.mark.parametrize("case", SHARDS_NOW)
def test_other_shards_are_refused_with_the_way_to_go_on(tmp_path, case) -> None:
    shards, words = SHARDS_NOW[case]
    state = saved(write(tmp_path / "d", SAVED))
    text = refusal(write(tmp_path / "d", shards), state, migrate=True)
    assert words in text
    assert "max_samples_per_sequence" not in text  # it follows from the data
    assert len(text.splitlines()) == 1
    assert len(text) < 300


def test_way_to_go_on_with_added_shards_works(tmp_path: Path) -> None:
    """A split part for the new shards, which is blended in."""
    root = write(tmp_path / "d", SAVED)
    loader = loader_of(root)
    batches = iter(loader)
    seen = {key for _ in range(2) for key in next(batches).__key__}
    state = through_json(loader.save_state_rank())
    more_in_another_part(root)
    old, new = {"name": "d/train"}, {"name": "d/val", "split_part": "val"}
    path = metadataset({"blend": [{"path": str(root), **entry} for entry in (old, new)]})
    grown = loader_of(path)
    edits = grown.restore_state_global([state], migrate=True)
    assert edits == ["source d/val: added; it starts at its beginning"]
    batches, rest = iter(grown), list[str]()
    while len({*rest} - {"more"}) < 12:
        rest += next(batches).__key__
    assert not seen & {*rest}
    assert "more" in rest


def test_name_of_a_renamed_folder_is_the_remedy(tmp_path: Path) -> None:
    root = write(tmp_path / "d", SAVED)
    state = saved(root)
    root.rename(tmp_path / "moved")
    assert "Set name='d/train'" in refusal(tmp_path / "moved", state)
    loader_of(tmp_path / "moved", name="d/train").restore_state_rank(state)


def test_renamed_folder_in_a_blend_does_not_start_again(tmp_path: Path) -> None:
    def blend(*names: str) -> Any:
        entries = [{"path": str(tmp_path / name)} for name in names]
        return metadataset({"blend": entries})

    write(tmp_path / "a", numbered(range(5)))
    write(tmp_path / "b", SAVED)
    state = saved(blend("a", "b"))
    (tmp_path / "b").rename(tmp_path / "c")
    text = refusal(blend("a", "c"), state, migrate=True)
    assert re.search(
        "has name='.*b/train' where this pipeline has '.*c/train', with the same", text
    )


class Texts(DefaultTaskEncoder):
    cookers: ClassVar = [Cooker(basic_sample_keys)]


LINES = [f'{{"text": "line {i:04d}"}}\n' for i in range(2000)]


@pytest.mark.parametrize(
    "lines", [LINES[::-1], [*LINES[::2], *LINES[1::2]], [LINES[0], *LINES[:0:-1]]]
)
def test_jsonl_of_the_same_size_with_other_lines_is_refused(tmp_path, lines) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(LINES))
    state = saved(path, task_encoder=Texts())
    loader_of(path, task_encoder=Texts()).restore_state_rank(state)
    path.write_text("".join(lines))
    with pytest.raises(StateError, match=r"d.jsonl/train: its data were written again"):
        loader_of(path, task_encoder=Texts()).restore_state_rank(state)
