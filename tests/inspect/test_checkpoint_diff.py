"""Two checkpoints are compared in plain words: settings, places of sources, counts."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from energon_lite import StateError, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.cli import app
from energon_lite.extras.inspect.checkpoints import checkpoint_diff

from ..helpers import metadataset, text_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in "abc":
        text_set(root / name, 40)
    return root


def state(folder, batches=3, weights=(("a", 3), ("b", 1)), batch_size=4, rank=0, world_size=1):
    blend = [{"path": str(folder / name), "weight": weight} for name, weight in weights]
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    loader = get_savable_loader(
        get_train_dataset(
            metadataset({"blend": blend}), batch_size=batch_size, worker_config=config
        )
    )
    for _ in zip(range(batches), loader, strict=False):
        pass
    return loader.save_state_rank()


def save(path, *states):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(states))
    return path


def diff(*arguments):
    result = CliRunner().invoke(app, ["checkpoint", "diff", *map(str, arguments)])
    return result.exit_code, result.output


def source(folder, name):
    return f"source {folder.name}/{name}/train"


def test_equal_states_are_equal_in_any_file(folder, tmp_path):
    one = save(tmp_path / "a.json", state(folder))
    (tmp_path / "run").mkdir()
    torch.save({"epoch": 3, "data": [state(folder)]}, tmp_path / "run" / "trainer.pt")
    code, text = diff(one, tmp_path / "run")
    assert (code, text.splitlines()[2:]) == (
        0, ["settings: equal", "places: equal", "counts: equal"],
    )  # fmt: skip


def test_a_later_state_is_at_other_places(folder, tmp_path):
    paths = [save(tmp_path / f"{n}.json", state(folder, n)) for n in (1, 3)]
    code, text = diff(*paths)
    assert code == 1
    assert "settings: equal\nplaces: differ\n  stream 0: batches: 1 in A, 3 in B\n" in text
    assert f"{source(folder, 'a')}: samples drawn: 3 in A, 9 in B" in text
    assert "  rank 0: batches of the pass: 1 in A, 3 in B\n" in text


def test_edited_settings_are_named(folder, tmp_path):
    old = save(tmp_path / "old.json", state(folder))
    new = save(tmp_path / "new.json", state(folder, 1, (("a", 1), ("c", 1)), 8))
    code, text = diff(old, new, "--json")
    report = json.loads(text)
    assert code == 1
    assert report["settings"] == [
        f"{source(folder, 'a')}: weight 3.0 is now 1.0",
        f"{source(folder, 'b')}: removed; if it comes back, it starts at its beginning",
        f"{source(folder, 'c')}: added; it starts at its beginning",
        "A has batch_size=4 where B has 8",
    ]
    what = f"{source(folder, 'c')}: samples drawn"
    assert [row for row in report["places"] if row["what"] == what] == [
        {"what": what, "a": None, "b": 5}
    ]


def test_other_numbers_of_ranks_are_counted(folder, tmp_path):
    one = save(tmp_path / "one.json", state(folder))
    ranks = [state(folder, rank=rank, world_size=2) for rank in range(2)]
    two = save(tmp_path / "two.json", *ranks)
    report = checkpoint_diff(one, two)
    assert report["counts"][0] == {"what": "ranks", "a": 1, "b": 2}
    assert {"what": "rank 1: batches of the pass", "a": None, "b": 3} in report["counts"]
    assert checkpoint_diff(two, two)["counts"] == []
    for rank, own in enumerate(ranks):
        save(tmp_path / "ranks" / f"{rank}.json", own)
    assert checkpoint_diff(two, tmp_path / "ranks")["places"] == []


def test_what_cannot_be_compared_is_refused(folder, tmp_path):
    one = save(tmp_path / "run" / "a.json", state(folder))
    save(tmp_path / "run" / "b.json", state(folder, 2))
    with pytest.raises(StateError, match="several states of rank 0"):
        checkpoint_diff(one, tmp_path / "run")
    damaged = save(tmp_path / "c.json", {**state(folder), "count": 7})
    with pytest.raises(StateError, match="rank 0 was edited, or is corrupt"):
        checkpoint_diff(one, damaged)
    with pytest.raises(FileNotFoundError):
        checkpoint_diff(one, tmp_path / "none.json")


def test_of_many_differences_the_first_are_printed(folder, tmp_path):
    new = save(tmp_path / "new.json", *[state(folder, 1, rank=r, world_size=40) for r in range(40)])
    _, text = diff(save(tmp_path / "old.json", state(folder)), new)
    assert len(text.splitlines()) < 100
    assert "more (all of them with --json)" in text
