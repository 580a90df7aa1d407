"""Datasets as Energon's documentation writes them: by webdataset's ShardWriter."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import webdataset as wds
from megatron.energon import (
    DefaultTaskEncoder,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from PIL import Image
from typer.testing import CliRunner

from energon_lite import prepare_dataset
from energon_lite.extras.cli import app

IS_REAL = bool(os.environ.get("ENERGON_REAL"))

MakeSample = Callable[[int], dict[str, Any]]


def png(number: int, size: tuple[int, int] = (12, 8)) -> bytes:
    """A picture of one colour; `size` is (width, height)."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, 2 * number % 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_keyed(folder: Path, keys: Iterable[str], make: Any, maxcount: int = 3) -> Path:
    """Writes samples of parts, by their keys, into `folder/parts/data-*.tar`."""
    (folder / "parts").mkdir(parents=True)
    with wds.ShardWriter(f"{folder}/parts/data-%d.tar", maxcount=maxcount, verbose=0) as writer:
        for key in keys:
            writer.write({"__key__": key, **make(key)})
    return folder


def write_shards(folder: Path, num_samples: int, make: MakeSample, maxcount: int = 10) -> Path:
    """Writes samples with the keys 000000, 000001 and so on; returns the folder."""
    keys = [f"{number:06d}" for number in range(num_samples)]
    return write_keyed(folder, keys, lambda key: make(int(key)), maxcount)


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


def command(*arguments: Any, answers: str = "") -> None:
    """Runs a command; Energon's own where the tests run against it."""
    if IS_REAL:
        script = Path(sys.executable).with_name("energon")
        text = answers.encode()
        subprocess.run([script, *map(str, arguments)], check=True, capture_output=True, input=text)
        return
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answers)
    assert result.exit_code == 0, result.output


def encoder(kind: type[Any] = DefaultTaskEncoder, **hooks: Any) -> Any:
    """A task encoder of a few hooks."""
    return type("MyTaskEncoder", (kind,), hooks)()


def config(**settings: Any) -> WorkerConfig:
    """The place of one rank without workers, unless `settings` say otherwise."""
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **settings})


def train_set(path: Any, batch_size: int | None = None, **settings: Any) -> Any:
    """A training dataset of one rank, which is not shuffled unless `settings` say so."""
    plain = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    settings = {"worker_config": config(), **plain, **settings}
    return get_train_dataset(path, batch_size=batch_size, **settings)


def shuffled(path: Any, batch_size: int | None = 2, **settings: Any) -> Any:
    """A loader of a shuffled training dataset, whose state can be saved."""
    buffers = {"shuffle_buffer_size": 10, "max_samples_per_sequence": 10}
    return get_savable_loader(train_set(path, batch_size, **{**buffers, **settings}))


def val_set(path: Any, batch_size: int | None = None, **settings: Any) -> Any:
    """A validation dataset of one rank."""
    settings = {"worker_config": config(), **settings}
    return get_val_dataset(path, batch_size=batch_size, **settings)


def validated(path: Any, batch_size: int | None = None, **settings: Any) -> list[Any]:
    """What one pass of validation returns."""
    return list(get_loader(val_set(path, batch_size, **settings)))


def before_and_after(make: Any, before: int, after: int, path: Path | None = None) -> list[Any]:
    """What a loader returns before its state is saved, behind it, and what a resumed one returns.

    With a `path`, the state goes through `torch.save`.
    """
    loader, resumed = make(), make()
    first = list(itertools.islice(loader, before))
    state = loader.save_state_rank()
    if path is not None:
        torch.save(state, path)
        state = torch.load(path, map_location="cpu", weights_only=False)
    rest = list(itertools.islice(loader, after))
    resumed.restore_state_rank(state)
    assert len(rest) == after
    return [first, rest, list(itertools.islice(resumed, after))]


def keys_of(batches: Any) -> list[str]:
    """The sample keys of batches, in their order."""
    found = [batch["__key__"] if isinstance(batch, dict) else batch.__key__ for batch in batches]
    return [key for keys in found for key in (keys if isinstance(keys, list) else [keys])]


def numbered(numbers: Iterable[int]) -> list[str]:
    """The keys of `write_shards`."""
    return [f"{number:06d}" for number in numbers]
