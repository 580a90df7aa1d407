"""Keys of a large buffer that are saved by place: small, and right wherever they are resumed."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import get_savable_loader, get_train_dataset
from energon_lite.core.errors import StateError
from energon_lite.core.state import Snapshot
from energon_lite.loader.resume import decompressed

from ..helpers import text_sets
from .list_laws import ONE, Packs, blend_of, keys_in, state_of, stream_run

NAMES = {"texts", "other", "third"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_sets(tmp_path_factory.mktemp("places"), texts=1500, other=400, third=300)


def dataset_of(path: Any, noisy: bool = False) -> Any:
    encoder = Packs(noisy=noisy, buffer_size=1300)
    return get_train_dataset(
        path, batch_size=None, shuffle_buffer_size=50, task_encoder=encoder, worker_config=ONE
    )


def columns_in(state: Any) -> Any:
    while "columns of samples" not in state:
        state = state["inner"][0]
    return state["columns of samples"]


@pytest.mark.parametrize("names", [["texts"], ["texts", "other"]])
def test_run_resumes_from_places_also_where_samples_failed(folder, names) -> None:
    paths = [folder / name for name in names]
    dataset = dataset_of(blend_of(*paths) if len(paths) > 1 else paths[0], noisy=True)
    run = stream_run(dataset, 1, 2)
    for num in (1, 400):
        list(islice(run, num))
        state = state_of(run)
        assert "place" in columns_in(state)["texts"]  # of most keys, not epoch and index
        again = stream_run(dataset, 1, 2)
        again.restore(Snapshot.from_json(state))
        assert json.dumps(state_of(again)) == json.dumps(state)
        expected, found = ([made["keys"] for made in islice(own, 9)] for own in (run, again))
        assert expected == found
    again.restore(Snapshot.from_json(state))
    list(islice(again, 900))
    assert "place" in columns_in(state_of(again))["texts"]


def test_places_stay_right_in_an_edited_blend(folder) -> None:
    texts, other, third = (folder / name for name in ("texts", "other", "third"))
    loader = get_savable_loader(dataset_of(blend_of(texts, other)))
    assert len(list(islice(loader, 60))) == 60
    state = json.loads(json.dumps(loader.save_state_rank()))
    text = json.dumps(decompressed(state["streams"], "streams"))
    assert "place" in text
    num_read = int(text.split('"read": ')[1].split(",")[0])
    rest = [key for made in islice(loader, 1200) for key in keys_in(made["keys"], NAMES)]
    buffered = {key for key in rest if key[0] == "texts" and key[3] < num_read}
    assert len(buffered) > 500
    again = get_savable_loader(dataset_of(blend_of(texts, third)))
    again.restore_state_rank(state, migrate=True)
    found = [key for made in islice(again, 1200) for key in keys_in(made["keys"], NAMES)]
    assert buffered <= set(found)
    assert len(found) == len(set(found))
    assert {key[0] for key in found} == {"texts", "third"}


@pytest.mark.parametrize("bad", [-1, 1 << 62, None])
def test_place_that_is_none_is_refused(folder, bad) -> None:
    dataset = dataset_of(folder / "texts")
    run = stream_run(dataset, 0, 2)
    list(islice(run, 30))
    snapshot = Snapshot.from_json(state_of(run))
    lists = snapshot
    while "keys" not in lists.fields:
        lists = lists.inner[0]
    keys = list(lists.fields["keys"])
    row = next(row for row, key in enumerate(keys) if key[1] == "place")
    keys[row] = (*keys[row][:2], bad, 3)
    lists.fields = {**lists.fields, "keys": tuple(keys)}
    again = stream_run(dataset, 0, 2)
    with pytest.raises(StateError, match="invalid"):
        again.restore(snapshot)
