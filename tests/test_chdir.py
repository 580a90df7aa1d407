"""A dataset that was opened by a relative path is read from there, also after `os.chdir`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    Cooker,
    CrudeSample,
    DefaultTaskEncoder,
    Packing,
    Sample,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.lengths.length_index import measure_lengths

from .conftest import write_tar
from .helpers import metadataset, prepared, text_set

LOADER = """
def load(parts):
    return {"text": parts["txt"]}


def wants(part):
    return part == "txt"
"""
BROKEN = 7  # the position of a line that is no JSON object


@dataclass
class Pair(TextSample):
    """A text of a join."""


def both(left: TextSample, right: TextSample) -> Pair:
    return Pair.derive_from(left, text=left.text + right.text)


@stateless
def cook(sample: CrudeSample, **aux: Any) -> TextSample:
    notes = [store.get("note.txt", sample) for store in aux.values()]
    return TextSample(**basic_sample_keys(sample), text=f"{sample['json']}{notes}")


class Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Cooks crude samples; batches are their keys and texts."""

    cookers = (Cooker(cook),)

    @stateless
    def batch(self, samples: list[Sample]) -> list[Any]:
        return [(sample.__key__, sample.text) for sample in samples]  # type: ignore[attr-defined]


class Packs(Encoder):
    """Packs that are planned by a length index."""

    packing = Packing(capacity=50, lengths="index")

    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
        return TextSample.derive_from(samples[0], text="|".join(s.text for s in samples))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    text_set(tmp_path / "texts", 20)
    text_set(tmp_path / "others", 20, 2)
    measure_lengths(tmp_path / "texts", Packs(), name="index", num_workers=0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/note.txt").write_text("a note")
    write_tar(tmp_path / "more" / "a.tar", [("note.txt", b"more")])
    prepared(tmp_path / "more", "CrudeWebdataset")
    lines = [json.dumps({"n": n}) if n != BROKEN else "[]" for n in range(20)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    write_tar(tmp_path / "own/a.tar", [(f"{n}.txt", b"%d" % n) for n in range(20)])
    prepared(tmp_path / "own", "TextSample", {"text": "txt"})
    meta = tmp_path / "own/.nv-meta"
    (meta / "sample_loader.py").write_text(LOADER)
    (meta / "dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "sample_loader: sample_loader.py:load\npart_filter: sample_loader.py:wants\n"
    )
    stores = {"notes": "filesystem://notes", "more": "more"}
    joiner = {"__module__": __name__, "__function__": "both"}
    nodes = [
        {"path": "texts"},
        {"path": "lines.jsonl", "aux": stores},
        {"join": [{"path": "texts"}, {"path": "others"}], "joiner": joiner},
        {"path": "own"},
    ]
    blend = metadataset({"blend": [{"weight": 1, **node} for node in nodes]})
    (tmp_path / "all.yaml").write_text(json.dumps(blend))
    return tmp_path


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_a_run_reads_where_its_dataset_was_opened(root: Path, monkeypatch, method) -> None:
    place = {"rank": 0, "world_size": 1, "num_streams": 1}
    here = WorkerConfig(**place, num_workers=0)
    moved = WorkerConfig(**place, num_workers=1, start_method=method) if method else here
    kinds = [("all.yaml", Encoder)]
    if method != "spawn":
        kinds += [("texts", Packs), ("lines.jsonl", Encoder), ("own", Encoder)]

    def batches(path: Any, encoder: Any, config: WorkerConfig, then: Path) -> list[Any]:
        dataset = get_train_dataset(
            path, worker_config=config, task_encoder=encoder(), batch_size=2, trust=True
        )
        loader = get_savable_loader(dataset, skip_log="skipped.jsonl", max_skip_rate=1.0)
        monkeypatch.chdir(then)
        return list(islice(iter(loader), 40))

    away = root / "away"
    away.mkdir()
    for path, encoder in kinds:
        monkeypatch.chdir(root)
        found = batches(path, encoder, moved, away)
        monkeypatch.chdir(root)
        assert found == batches(root / path, encoder, here, root)
    assert list(away.iterdir()) == []
    assert f"lines.jsonl, line {BROKEN + 1}" in (root / "skipped.jsonl").read_text()
