"""Folders of files, and datasets whose texts name files in them, which Energon calls polylithic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    ImageSample,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.cli import app

from ..conftest import jpeg
from ..helpers import metadataset

NUM_SAMPLES = 6
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of pictures, in folders, and texts that name them."""
    lines = []
    for i in range(NUM_SAMPLES):
        path = tmp_path / f"images/{i % 2}/{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i, (8 + i, 8)))
        lines.append(json.dumps({"image": f"{i % 2}/{i}.jpg"}))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@stateless
def cook(sample: Any, images: Any) -> ImageSample:
    key = sample["json"]["image"]
    width = images.get_media_metadata(key).width
    assert images.get(key, sample).shape == (3, 8, width)
    return ImageSample(**basic_sample_keys(sample), image=width)


class Widths(DefaultTaskEncoder[Any, Any, Any, Any]):
    cookers: ClassVar = (Cooker(cook),)


def train(path: Any) -> Any:
    return get_train_dataset(path, batch_size=1, task_encoder=Widths(), worker_config=CONFIG)


def test_texts_with_pictures_in_a_folder_are_samples_after_two_commands(root: Path) -> None:
    """As in Energon's page on polylithic datasets: `prepare` of the texts, `prepare-media`."""
    assert command("prepare", root / "texts.jsonl").exit_code == 0
    done = command("prepare-media", root / "images", "--media-metadata-by-extension")
    assert "Stored metadata for 6 files" in done.output
    assert sorted(p.name for p in (root / "images/.nv-meta").iterdir()) == ["index.sqlite"]
    node = {"path": "texts.jsonl", "aux": {"images": "filesystem://images"}}
    (root / "meta.yaml").write_text(json.dumps(metadataset(node)))
    batches = iter(get_loader(train(root / "meta.yaml")))
    found = [next(batches) for _ in range(NUM_SAMPLES)]
    assert sorted(batch.image[0] for batch in found) == [8 + i for i in range(NUM_SAMPLES)]
    for batch in found:
        assert [Path(source.dataset_path).name for source in batch.__sources__[0]] == [
            "texts.jsonl", "images",
        ]  # fmt: skip


def test_prepare_of_a_folder_without_tars_names_the_way_to_its_files(root: Path) -> None:
    done = command("prepare", root / "images")
    assert done.exit_code == 1
    assert f"filesystem://{root}/images" in done.output
    assert "energon-lite prepare-media" in done.output


@pytest.mark.parametrize("name", ["info", "lint", "mount", "lengths", "train", "aux"])
def test_filesystem_dataset_is_refused_where_samples_are_needed(root: Path, name: str) -> None:
    assert not command("prepare-media", root / "images", "--media-metadata-by-header").exit_code
    if name in ("train", "aux"):
        node = {"path": str(root / "texts.jsonl"), "aux": {"images": str(root / "images")}}
        with pytest.raises(ValueError, match="is a filesystem dataset") as caught:
            train(metadataset(node) if name == "aux" else root / "images")
        text = str(caught.value)
    else:
        more = {"mount": [root / "at"], "lengths": ["--with", f"{__name__}:Widths"]}
        done = command(name, root / "images", *more.get(name, []))
        assert done.exit_code == 1
        text = done.output
    assert f"filesystem://{root}/images" in text
