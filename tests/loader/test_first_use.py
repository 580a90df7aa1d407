"""What people try first with a dataset or a loader, and that cannot be: errors with a remedy."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

from energon_lite import (
    DefaultTaskEncoder,
    FatalSampleError,
    SavableDataLoader,
    WorkerConfig,
    get_savable_loader,
)
from energon_lite.storage import files

from ..helpers import caption_set, train, validation
from .workers import loader_from, loader_of

WORKER = WorkerConfig(rank=0, world_size=1, num_workers=0)


def dataset_of(texts: Path) -> Any:
    return train(texts, repeat=False, batch_size=4)(WORKER)


HABITS: list[tuple[Any, type[Exception], str]] = [
    (lambda data: data[0], TypeError, r"dataset\[0\]: .*next\(iter\(dataset\)\).*split parts"),
    (lambda data: Subset(data, [0])[0], TypeError, "no samples by number"),
    (lambda data: random_split(data, [5, 5])[0][0], TypeError, "no samples by number"),
    (lambda data: data.map(str), AttributeError, "no 'map': use .*encode_sample"),
    (lambda data: data.filter(bool), AttributeError, "no 'filter': use .*SkipSample"),
    (lambda data: data.shuffle(), AttributeError, "no 'shuffle': use .*shuffle_buffer_size"),
    (lambda data: data.nonsense, AttributeError, "object has no attribute 'nonsense'"),
    (lambda data: get_savable_loader(data)[0], TypeError, r"loader\[0\]: .*get_train_dataloader"),
    (lambda data: next(iter(DataLoader(get_savable_loader(data)))), TypeError, "train_dataset="),
]


@pytest.mark.parametrize(("use", "error", "words"), HABITS)
def test_habits_of_map_style_data_are_answered(texts, use, error, words) -> None:
    with pytest.raises(error, match=words):
        use(dataset_of(texts))


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_not_copied_its_dataset_is(texts, duplicate, has_begun) -> None:
    loader = get_savable_loader(dataset_of(texts))
    iterator = iter(loader)
    if has_begun:
        next(iterator)
    with pytest.raises(TypeError, match=r"loader.dataset.* get_savable_loader\(dataset\)"):
        duplicate(loader)
    assert duplicate(loader.dataset)
    assert next(iterator)


def test_a_daemonic_process_starts_no_worker_processes(texts) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        text = pool.apply(_error_with, (texts, {"num_workers": 1}))
        assert "num_workers=0" in text
        assert "worker_type='thread'" in text
        assert pool.apply(_error_with, (texts, {"num_workers": 0})) == ""
        thread = {"num_workers": 1, "worker_type": "thread"}
        assert pool.apply(_error_with, (texts, thread)) == ""


def _error_with(texts: Path, config: dict[str, Any]) -> str:
    try:
        with loader_from(train(texts), **config) as loader:
            next(iter(loader))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_trainer_that_iterates_the_dataset_is_warned_of_once(texts, caplog) -> None:
    files.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        list(dataset_of(texts))  # one's own loop
        list(get_savable_loader(dataset_of(texts)))
        assert caplog.records == []
        for _ in range(2):
            list(DataLoader(dataset_of(texts), batch_size=None))
    (record,) = caplog.records
    assert "no checkpoint has the position. Use energon_lite.get_sav" in record.getMessage()


class Exiting(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) % 4 == 3:
            sys.exit(3)
        return sample


class OnGpu(DefaultTaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA ...")


@pytest.mark.processes
def test_the_end_of_a_process_by_a_hook_is_told_at_once(texts) -> None:
    with pytest.raises(RuntimeError, match=r"failed: a hook called sys.exit\(3\)"):
        list(loader_of(texts, Exiting(), num_workers=1))


def test_cuda_in_a_forked_process_names_the_setting(texts) -> None:
    with pytest.raises(FatalSampleError, match=r"WorkerConfig\(start_method='spawn'\)"):
        list(loader_of(texts, OnGpu(), num_workers=1))


KINDS = ({}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"})


@pytest.mark.parametrize("config", KINDS, ids=["none", "process", "thread"])
@pytest.mark.parametrize("way", ["set", "with"])
def test_batches_are_on_the_cpu_whatever_the_default_device(texts, tmp_path, config, way) -> None:
    pictures = caption_set(tmp_path / "pictures", 8)
    for make in (train(texts), validation(texts), train(pictures)):
        with loader_from(make, **config) as loader:
            expected = [loader_batch for loader_batch, _ in zip(loader, range(3), strict=False)]
        device = torch.device("meta")
        try:
            if way == "set":
                torch.set_default_device(device)
                found, again = _some(make, config)
            else:
                with device:
                    found, again = _some(make, config)
        finally:
            torch.set_default_device(None)
        for batch, same in zip(found + again, expected + expected[:1], strict=True):
            assert batch.__key__ == same.__key__
            for name in ("image", "loss_weight", "valid"):
                if hasattr(same, name):
                    assert getattr(batch, name).device.type == "cpu"
                    assert torch.equal(getattr(batch, name), getattr(same, name))


def _some(make: Any, config: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    with loader_from(make, **config) as loader:
        found = [batch for batch, _ in zip(loader, range(3), strict=False)]
        again = [loader.restore_sample(found[0].__restore_key__)]
        for batch in found + again:  # made when they are looked at
            _ = batch.loss_weight, batch.valid
        return found, again


def test_loader_is_no_iterator_to_those_who_ask() -> None:
    assert not hasattr(SavableDataLoader, "__next__")
