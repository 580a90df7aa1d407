"""Small prepared datasets, task encoders of every kind, and runs of several ranks.

All at module level, so that worker processes of any start method can import it.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import (
    DefaultTaskEncoder,
    SavableDataLoader,
    SavableDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    sample_rng,
    stateless,
)
from energon_lite.core.state import checksum, digest
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.loader.count_table import TIMES
from energon_lite.loader.resume import counts_in, decompressed
from energon_lite.sources.dataset_config import load_factory
from energon_lite.storage import local
from energon_lite.testing import first_difference

from .conftest import jpeg, write_tar

MakeDataset = Callable[[WorkerConfig], SavableDataset[Any]]


def text_of(number: int) -> str:
    """The text of sample `number`; of several lengths."""
    return f"text {number} " + "x" * (number % 5)


def text_set(folder: Path, num_samples: int, num_shards: int = 3) -> Path:
    """Writes and prepares texts, all in split `train`, in shards of nearly one size."""
    num_shards = min(num_shards, num_samples)
    edges = [shard * num_samples // num_shards for shard in range(num_shards + 1)]
    for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
        members = [(f"{i:05d}.txt", text_of(i).encode()) for i in range(start, stop)]
        write_tar(folder / f"shard-{shard:03d}.tar", members)
    return prepared(folder, "TextSample", {"text": "txt"})


def text_sets(folder: Path, **sizes: int) -> Path:
    """Writes and prepares several sets of texts, by name."""
    for name, num_samples in sizes.items():
        text_set(folder / name, num_samples)
    return folder


def caption_set(folder: Path, num_samples: int, num_shards: int = 2) -> Path:
    """Writes and prepares pictures with captions, all in split `train`."""
    edges = [shard * num_samples // num_shards for shard in range(num_shards + 1)]
    for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
        members: list[tuple[str, bytes]] = []
        for i in range(start, stop):
            members += [(f"{i:05d}.jpg", jpeg(i)), (f"{i:05d}.txt", text_of(i).encode())]
        write_tar(folder / f"shard-{shard:03d}.tar", members)
    return prepared(folder, "CaptioningSample", {"image": "jpg", "caption": "txt"})


def prepared(folder: Path, sample_type: str, field_map: dict[str, str] | None = None) -> Path:
    """Prepares a folder with all shards in split `train`, in this process."""
    prepare_dataset(
        folder,
        split_parts={"train": ".*"},
        sample_type=sample_type,
        field_map=field_map,
        num_workers=0,
    )
    return folder


def crude_set(folder: Path, num_samples: int, num_shards: int = 3) -> Path:
    """Writes and prepares texts as a crude dataset."""
    config = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    (text_set(folder, num_samples, num_shards) / ".nv-meta/dataset.yaml").write_text(config)
    return folder


def metadataset(split: dict[str, Any]) -> dict[str, Any]:
    """The content of a metadataset of one split."""
    head = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    return {**head, "splits": {"train": split}}


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with every pair of values of any two factors, far fewer than all combinations.

    Rows of three factors of 10 values each: some 130 instead of 1,000. For `parametrize`.
    """
    missing = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(factors), 2)
        for a, b in itertools.product(range(len(first)), range(len(second)))
    }
    rows = []
    while missing:
        i, a, j, b = min(missing)
        row: dict[int, int] = {i: a, j: b}
        for k, factor in enumerate(factors):
            if k not in row:  # the value with most pairs that are still missing
                row[k] = max(
                    range(len(factor)),
                    key=lambda c, k=k: sum(
                        ((m, row[m], k, c) if m < k else (k, c, m, row[m])) in missing for m in row
                    ),
                )
        missing -= {(m, row[m], n, row[n]) for m, n in itertools.combinations(sorted(row), 2)}
        rows.append(tuple(factor[row[k]] for k, factor in enumerate(factors)))
    return rows


# --------------------------------------------------------------------------------- task encoders


def number_of(sample: Any) -> int:
    """The number of a sample of `text_set`."""
    return int(sample.__key__)


class SkippingEncoder(DefaultTaskEncoder):
    """Leaves out one sample in seven on purpose, fails on one in eleven, and is random."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: TextSample) -> TextSample:
        number = number_of(sample)
        if number % 7 == 3:
            raise SkipSample
        if number % 11 == 5:
            raise ValueError(f"cannot encode {number}")
        noise = f"{torch.rand(()).item():.6f} {np.random.rand():.6f} {random.random():.6f}"
        return TextSample.derive_from(sample, text=f"{sample.text} {noise}")

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        return {
            "keys": batch.__key__,
            "texts": batch.text,
            "slot": self.current_batch_index,
            "first": self.current_sample_index,
            "noise": sample_rng().random(),
        }


class ExpandingEncoder(DefaultTaskEncoder):
    """Makes 0..2 samples of each, with random numbers drawn before and between them."""

    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for i in range(number_of(sample) % 3):
            noise = f"{sample_rng().random():.6f}"
            yield TextSample.derive_from(sample, text=f"{i} of {sample.text} {noise}")


class ExpandingBatches(DefaultTaskEncoder):
    """Halves each batch, by a generator that is seeded."""

    @stateless(restore_seeds=True)
    def encode_batch(self, batch: Any) -> Iterator[dict[str, Any]]:
        middle = len(batch.text) // 2
        for part in (slice(0, middle), slice(middle, None)):
            yield {"keys": batch.__key__[part], "texts": batch.text[part], "x": torch.rand(3)}


class GroupingEncoder(DefaultTaskEncoder):
    """Batches of texts of one length."""

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        if number_of(sample) % 10 == 9:
            raise SkipSample
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random():.6f}")

    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[int, None]:
        return len(sample.text.split()[2:][0].strip("0123456789.")), None


ENCODERS: dict[str, type[DefaultTaskEncoder]] = {
    "plain": DefaultTaskEncoder,
    "skipping": SkippingEncoder,
    "expanding": ExpandingEncoder,
    "expanding batches": ExpandingBatches,
    "grouping": GroupingEncoder,
}


def train(path: Path, encoder: str = "plain", **settings: Any) -> MakeDataset:
    """A maker of training datasets, for any place in the run."""
    settings = {
        "batch_size": 3,
        "shuffle_buffer_size": 8,
        "max_samples_per_sequence": 5,
        **settings,
    }

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return get_train_dataset(
            path, worker_config=config, task_encoder=ENCODERS[encoder](), **settings
        )

    return make


def blend_maker(root: Path, split: str, encoder: Any, **settings: Any) -> MakeDataset:
    """A maker of the training dataset of a file in `root` whose training split is `split`."""
    path = root / "meta.yaml"
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
    text = head + textwrap.indent(textwrap.dedent(split).strip("\n"), "    ") + "\n"
    settings = {"batch_size": 2, **settings}

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        path.write_text(text)
        return get_train_dataset(path, worker_config=config, task_encoder=encoder(), **settings)

    return make


def blend_with_itself(texts: Path, tmp_path: Path, encoder: str = "skipping") -> MakeDataset:
    """A maker of a metadataset's blend of one folder with itself."""
    split = f"""
    blend:
      - path: {texts}
        weight: 2
      - path: {texts}
        weight: 1
        shuffle_over_epochs_multiplier: 2
    """
    return blend_maker(tmp_path, split, ENCODERS[encoder])


def in_file_order(path: Path, **settings: Any) -> Any:
    """The source of a folder, whose samples come once, in the order of the files."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    factory = load_factory(
        path, split_part="train", training=False, worker_config=config, **settings
    )
    return factory.build()


def source_of(
    path: Path,
    *,
    repeat: bool = False,
    training: bool = True,
    config: WorkerConfig | None = None,
    **order: Any,
) -> Any:
    """The source of a folder, with any settings of its order."""
    built = {k: order.pop(k) for k in ("shuffle_buffer_size", "block") if k in order}
    config = config or WorkerConfig(rank=0, world_size=1, num_workers=0)
    factory = load_factory(path, training=training, worker_config=config, **order)
    return factory.build(repeat=repeat, **built)


def validation(path: Path, encoder: str = "plain", **settings: Any) -> MakeDataset:
    """A maker of validation datasets over the split `train`."""
    settings = {"batch_size": 3, "split_part": "train", **settings}

    def make(config: WorkerConfig) -> SavableDataset[Any]:
        return get_val_dataset(
            path, worker_config=config, task_encoder=ENCODERS[encoder](), **settings
        )

    return make


# ------------------------------------------------------------------------------- several ranks


def through_json(value: Any) -> Any:
    """What is left of a value after it was written to a file."""
    return json.loads(json.dumps(value))


class Ranks:
    """The loaders of all ranks of a run, one after the other in this process.

    Args:
        make: the pipeline.
        world_size: number of ranks.
        num_workers: workers of each rank.
        num_streams: streams of a new run.
        states: the states of all ranks of the run that goes on.
        loader: arguments of the loaders.
    """

    def __init__(
        self,
        make: MakeDataset,
        world_size: int,
        num_workers: int = 0,
        *,
        num_streams: int | None = None,
        seed: int = 0,
        start_method: str | None = None,
        worker_type: str = "process",
        states: Sequence[dict[str, Any]] | None = None,
        **loader: Any,
    ) -> None:
        self.loaders: list[SavableDataLoader[Any]] = []
        for rank in range(world_size):
            config = WorkerConfig(
                rank=rank,
                world_size=world_size,
                num_workers=num_workers,
                num_streams=num_streams,
                seed_offset=seed,
                start_method=start_method,
                worker_type=worker_type,
                global_error_handler=ignore,
            )
            made = get_savable_loader(make(config), **{"max_skip_rate": 1, **loader})
            if states is not None:
                made.restore_state_global(through_json(states))
            self.loaders.append(made)
        self.iterators = [iter(made) for made in self.loaders]

    def steps(self, number: int) -> dict[int, Any]:
        """Returns `number` batches of each rank, by slot."""
        found: dict[int, Any] = {}
        for _ in range(number):
            for rank in range(len(self.loaders)):
                slot, item = self.next(rank)
                assert slot not in found, f"slot {slot} came twice"
                found[slot] = item
        return found

    def next(self, rank: int) -> tuple[int, Any]:
        """Returns the next batch of a rank and its slot."""
        item = next(self.iterators[rank])
        return last_slot(self.loaders[rank]), item

    def slots(self, number: int) -> dict[int, Any]:
        """Returns the next `number` slots, in their order, of an endless run."""
        steps = -(-number // len(self.loaders))
        return dict(sorted(self.steps(steps).items())[:number])

    def rest(self) -> dict[int, Any]:
        """Returns the rest of the pass, by slot, of a finite run."""
        found: dict[int, Any] = {}
        for loader, iterator in zip(self.loaders, self.iterators, strict=True):
            for item in iterator:
                slot = last_slot(loader)
                assert slot not in found, f"slot {slot} came twice"
                found[slot] = item
        return dict(sorted(found.items()))

    def save(self) -> list[dict[str, Any]]:
        """Returns the states of all ranks, as they come out of a file, opened."""
        return [opened(through_json(loader.save_state_rank())) for loader in self.loaders]


def last_slot(loader: SavableDataLoader[Any]) -> int:
    """The slot of the batch that a loader gave last."""
    place = loader._run.position  # a state takes longer to make than most batches
    assert place.count > 0
    return place.start.slots._replace(first=0).slot(place.count - 1)


def opened(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its tables decompressed, to look into or to change."""
    tables = {name: decompressed(state[name], name) for name in ("config", "streams")}
    return signed({**state, **copy.deepcopy(tables)})


def counts_in_state(state: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Targets and counts of a state, by source; without the seconds."""
    (rows,) = counts_in([state])
    return {name: {k: v for k, v in row.items() if k not in TIMES} for name, row in rows.items()}


def signed(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was changed, with the checksum that belongs to it."""
    state = {**state, "pipeline": digest(state["config"])}
    return {**state, "checksum": checksum(state)}


def is_true_in_fork(function: Callable[[], Any], limit_sec: float = 60.0) -> bool:
    """Returns whether a function returns something true in a fork of this process.

    The fork ends with the function, also by an error: else it would go on as a second test runner,
    for which this process waits.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if function() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_sec
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return ended[1] == 0


def ignore(error: Exception, sample: Any, sources: Any = None) -> None:
    """An error handler that says nothing."""


def assert_same(found: Any, expected: Any) -> None:
    """Fails at the first difference, all the way down; and if there is nothing to compare."""
    assert not isinstance(expected, (list, dict)) or expected, "nothing was compared"
    difference = first_difference(found, expected)
    assert difference is None, difference


def keys_of(batch: Any) -> list[str]:
    """The sample keys of a batch."""
    return list(batch["keys"] if isinstance(batch, dict) else batch.__key__)


def is_mapped(array: Any) -> bool:
    """Whether the memory of an array is that of a mapped file."""
    while array is not None and not isinstance(array, local._Map):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array is not None


def take_singly(patch: pytest.MonkeyPatch, *cursors: Any) -> None:
    """Lets cursors of these types take one item at a time."""
    for cursor in cursors:

        def take(self: Any, _: int, take: Any = cursor.take) -> Any:
            return take(self, 1)

        patch.setattr(cursor, "take", take)
