"""Cookers with a cache pool: in any process, in a pack, after a resume, and by a restore key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite import (
    CachePool,
    Cooker,
    DefaultTaskEncoder,
    FileStoreCachePool,
    Lazy,
    NoCachePool,
    Sample,
    SavableDataLoader,
    WorkerConfig,
    basic_sample_keys,
    cooker,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    stateless,
)
from energon_lite.testing import check_dataset

from ..conftest import write_tar
from ..helpers import metadataset, prepared

NUM_SAMPLES = 40


@edataclass
class LazySample(Sample):
    media: Lazy[bytes]
    kept: Lazy[str]
    pool: str


@edataclass
class ReadSample(Sample):
    text: str
    pool: str


@cooker(need_cache=True)
def cook(sample: Any, media: Any, cache: CachePool) -> LazySample:
    return LazySample(
        **basic_sample_keys(sample),
        media=cache.get_lazy(media, sample["txt"]),
        kept=cache.to_cache(f"kept {sample['__key__']}", sample["__key__"]),
        pool=type(cache).__name__,
    )


class LazyEncoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Reads a file when its sample leaves the buffer, as Energon's documentation shows it."""

    cookers = (Cooker(cook),)

    @stateless
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        assert all(isinstance(sample.media, Lazy) for sample in samples)
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]

    @stateless
    def postencode_sample(self, sample: LazySample) -> ReadSample:
        assert type(self.cache).__name__ == sample.pool
        text = f"{sample.media.get(sample).decode()}, {sample.kept.get()}"
        assert sample.media.get().decode() in text
        return ReadSample.derive_from(sample, text=text, pool=sample.pool)

    @stateless
    def pack_selected_samples(self, samples: list[ReadSample]) -> ReadSample:
        sources = tuple(info for sample in samples for info in sample.__sources__ or ())
        text = "; ".join(sample.text for sample in samples)
        pool = samples[0].pool
        return ReadSample.derive_from(samples[0], text=text, pool=pool, __sources__=sources)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lazy")
    (root / "media").mkdir()
    members = []
    for number in range(NUM_SAMPLES):
        members.append((f"{number:05d}.txt", f"{number % 30}.bin".encode()))
        (root / "media" / f"{number % 30}.bin").write_text(f"media {number % 30}")
    write_tar(root / "crude" / "shard-0.tar", members)
    prepared(root / "crude", "CrudeWebdataset")
    content = metadataset({"path": "crude", "aux": {"media": "filesystem://./media"}})
    (root / "data.yaml").write_text(yaml.safe_dump(content))
    return root


MakeLoader = Callable[..., SavableDataLoader[Any]]


@pytest.fixture
def make_loader(folder: Path) -> Iterator[MakeLoader]:
    made: list[SavableDataLoader[Any]] = []

    def make(
        pool: CachePool | None, num_workers: int = 0, **settings: Any
    ) -> SavableDataLoader[Any]:
        config = WorkerConfig(
            rank=0, world_size=1, num_workers=num_workers, num_streams=2, **settings
        )
        dataset = get_train_dataset(
            folder / "data.yaml", worker_config=config, batch_size=1, packing_buffer_size=8,
            shuffle_buffer_size=5, max_samples_per_sequence=None, task_encoder=LazyEncoder(),
        )  # fmt: skip
        made.append(get_savable_loader(dataset, cache_pool=pool))
        return made[-1]

    yield make
    for loader in made:
        loader.shutdown()


def read(loader: SavableDataLoader[Any], number: int) -> list[Any]:
    """Texts and sources of the next batches."""
    return [
        (batch.text, [[(s.index, s.file_names) for s in row] for row in batch.__sources__])
        for batch in islice(loader, number)
    ]


POOLS: dict[str, Callable[[Path], CachePool | None]] = {
    "default": lambda _: None,
    "direct": lambda _: NoCachePool(),
    "files": lambda parent: FileStoreCachePool(parent_cache_dir=parent, num_workers=2),
    "small": lambda parent: FileStoreCachePool(parent_cache_dir=parent, max_cache_count=3),
    "pickled": lambda parent: FileStoreCachePool(parent_cache_dir=parent, method="pickle"),
}


@pytest.mark.parametrize(("kind", "num_threads"), [*((kind, 0) for kind in POOLS), ("small", 2)])
def test_a_resume_with_lazy_values_in_buffers_is_exact(
    make_loader: MakeLoader, tmp_path: Path, kind: str, num_threads: int
) -> None:
    whole = read(make_loader(None), 24)
    assert {source for _, rows in whole for row in rows for source, _ in row} >= {"3.bin"}
    assert len(set(map(str, whole))) > 12
    pool = POOLS[kind](tmp_path)
    loader = make_loader(pool, num_threads, worker_type="thread")
    for done in range(6):
        state = json.loads(json.dumps(loader.save_state_rank()))
        with make_loader(pool, num_threads, worker_type="thread") as again:
            again.restore_state_rank(state)
            assert read(again, 3) == whole[done : done + 3]
        assert read(loader, 1) == whole[done : done + 1]
    loader.shutdown()
    if pool is not None:
        pool.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "num_workers"), [("default", 0), ("small", 0), ("files", 1)])
def test_an_item_is_made_again_in_the_main_process_with_the_pool(
    make_loader: MakeLoader, tmp_path: Path, kind: str, num_workers: int
) -> None:
    """Energon passes no cache pool there."""
    pool = POOLS[kind](tmp_path)
    loader = make_loader(pool, num_workers)
    for batch in islice(loader, 3):
        again = loader.restore_sample(batch.__restore_key__)
        assert (again.text, again.pool) == (batch.text, batch.pool)
        assert set(again.pool) == {type(pool or NoCachePool()).__name__}
    if pool is not None:
        pool.close()


@cooker(need_cache=True)
def cook_only(sample: Any, media: Any, cache: CachePool) -> dict[str, Any]:
    return {**basic_sample_keys(sample), "media": cache.get_lazy(media, sample["txt"])}


class OnlyLazy(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Returns batches of lazy values."""

    cookers = (Cooker(cook_only),)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_packs_of_lazy_values_keep_the_laws(folder: Path, batch_size: int | None) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(
        folder / "data.yaml", split_part="train", worker_config=config, batch_size=batch_size,
        packing_buffer_size=8, task_encoder=LazyEncoder(),
    )  # fmt: skip
    check_dataset(dataset, num_streams=(2,), max_items=6)


@pytest.mark.processes
def test_lazy_values_in_a_batch_are_read_in_the_main_process(folder: Path, tmp_path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=1)
    dataset = get_train_dataset(
        folder / "data.yaml", worker_config=config, batch_size=3, task_encoder=OnlyLazy()
    )
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    with get_savable_loader(dataset, cache_pool=pool) as loader:
        values = [lazy for batch in islice(loader, 4) for lazy in batch["media"]]
    assert {lazy.get()[:5] for lazy in values} == {b"media"}
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_an_attribute_of_the_users_encoder_is_its_own() -> None:
    encoder = LazyEncoder()
    assert type(encoder.cache) is NoCachePool
    encoder.cache = {}  # type: ignore[assignment]
    assert encoder.cache == {}


def test_code_that_runs_hooks_itself_may_set_the_pool(tmp_path: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    pool = FileStoreCachePool(parent_cache_dir=tmp_path)
    config.worker_activate(0, cache_pool=pool)
    try:
        assert LazyEncoder().cache is pool
    finally:
        config.worker_deactivate()
    assert type(LazyEncoder().cache) is NoCachePool
