"""Datasets as Energon's documentation writes them: by webdataset's ShardWriter."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds
from megatron.energon import WorkerConfig, get_train_dataset, get_val_dataset
from PIL import Image

from energon_lite import prepare_dataset

MakeSample = Callable[[int], dict[str, Any]]


def png(number: int, size: tuple[int, int] = (12, 8)) -> bytes:
    """A picture of one colour; `size` is (width, height)."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, 2 * number % 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_shards(folder: Path, num_samples: int, make: MakeSample, maxcount: int = 10) -> Path:
    """Writes samples of parts into `folder/parts/data-*.tar`; returns the folder."""
    (folder / "parts").mkdir(parents=True)
    with wds.ShardWriter(f"{folder}/parts/data-%d.tar", maxcount=maxcount, verbose=0) as writer:
        for number in range(num_samples):
            writer.write({"__key__": f"{number:06d}", **make(number)})
    return folder


def prepared(folder: Path, dataset_yaml: dict[str, Any] | str, **splits: str) -> Path:
    """Prepares a folder, all of it as `train` unless `splits` say otherwise."""
    prepare_dataset(folder, split_parts=splits or {"train": ".*"}, num_workers=0)
    text = dataset_yaml if isinstance(dataset_yaml, str) else json.dumps(dataset_yaml)
    (folder / ".nv-meta/dataset.yaml").write_text(text)
    return folder


def class_of(name: str, module: str = "megatron.energon") -> dict[str, str]:
    """The reference of a class in YAML."""
    return {"__module__": module, "__class__": name}


def caption(number: int) -> dict[str, Any]:
    """A picture, its caption as text and in JSON."""
    text = f"caption {number} " + "word " * (number % 5)
    return {"jpg": png(number), "txt": text, "json": {"caption": text, "id": number}}


def captions(folder: Path, num_samples: int = 30, **splits: str) -> Path:
    """A captioning dataset with a field map."""
    write_shards(folder, num_samples, caption)
    field_map = {"image": "jpg", "caption": "txt"}
    config = {"sample_type": class_of("CaptioningSample"), "field_map": field_map}
    return prepared(folder, config, **splits)


def texts(folder: Path, num_samples: int = 30, **splits: str) -> Path:
    """A text dataset with a field map."""
    write_shards(folder, num_samples, lambda n: {"txt": f"text {n} " + "x" * (n % 7)})
    config = {"sample_type": class_of("TextSample"), "field_map": {"text": "txt"}}
    return prepared(folder, config, **splits)


def crude(folder: Path, num_samples: int = 20, **subflavors: str) -> Path:
    """A crude dataset of pictures and JSON."""
    write_shards(folder, num_samples, caption)
    config: dict[str, Any] = {**class_of("CrudeWebdataset")}
    if subflavors:
        config["subflavors"] = subflavors
    return prepared(folder, config)


def metadataset(path: Path, **splits: Any) -> Path:
    """Writes a metadataset file."""
    path.write_text(json.dumps({**class_of("MetadatasetV2"), "splits": splits}))
    return path


def train_set(path: Any, batch_size: int | None = None, **settings: Any) -> Any:
    """A training dataset of one rank, which is not shuffled unless `settings` say so."""
    settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, **settings}
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_train_dataset(path, worker_config=config, batch_size=batch_size, **settings)


def val_set(path: Any, batch_size: int | None = None, **settings: Any) -> Any:
    """A validation dataset of one rank."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_val_dataset(path, worker_config=config, batch_size=batch_size, **settings)


def keys_of(batches: Any) -> list[str]:
    """The sample keys of batches, in their order."""
    found = [batch["__key__"] if isinstance(batch, dict) else batch.__key__ for batch in batches]
    return [key for keys in found for key in (keys if isinstance(keys, list) else [keys])]


def image_of(sample: Any) -> np.ndarray:
    """A picture as (H, W, C) in 0..255."""
    return np.asarray(sample)
