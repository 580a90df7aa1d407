"""Damaged data: what is said, what is skipped and counted, and that all else stays as it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    DatasetFormatError,
    DecodingError,
    DefaultTaskEncoder,
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import describe
from energon_lite.formats.nvmeta import index_path

from ..conftest import jpeg, write_tar
from ..helpers import Ranks, assert_same, prepared, text_set, through_json, train, validation

NUM_SHARDS, PER_SHARD = 6, 10
BROKEN = "shard-003.tar"
# A text sample of `text_set` is one header and one block.
SAMPLE_BYTES = 1024

Damage = Callable[[Path], None]


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("sound") / "set", NUM_SHARDS * PER_SHARD, NUM_SHARDS)


@pytest.fixture
def damaged(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage, under the same name, so that its order is the same."""
    return shutil.copytree(sound, tmp_path / "copy" / sound.name)


def overwrite(place: int, data: bytes) -> Damage:
    def damage(shard: Path) -> None:
        with shard.open("r+b") as file:
            file.seek(place)
            file.write(data)

    return damage


def shift_index(number: int) -> Damage:
    def damage(shard: Path) -> None:
        offsets = np.fromfile(index_path(shard), dtype="<u8").astype("<i8")
        (offsets + number).astype("<u8").tofile(index_path(shard))

    return damage


def end_index_at(stop: int) -> Damage:
    def damage(shard: Path) -> None:
        offsets = np.fromfile(index_path(shard), dtype="<u8")
        offsets[-1] = stop
        offsets.tofile(index_path(shard))

    return damage


def reverse_index(shard: Path) -> None:
    np.fromfile(index_path(shard), dtype="<u8")[::-1].copy().tofile(index_path(shard))


# Damage, the places in the shard that are lost, and what the message says.
CASES: dict[str, tuple[Damage, range, str]] = {
    "truncated": (
        lambda shard: os.truncate(shard, 5 * SAMPLE_BYTES + 700),
        range(5, 10),
        "but the file ends before (5820 bytes): the shard is truncated, or was replaced after "
        "preparing. Restore it, or prepare the dataset again",
    ),
    "empty": (lambda shard: os.truncate(shard, 0), range(10), "the file ends before (0 bytes)"),
    "zeros": (overwrite(4 * SAMPLE_BYTES, bytes(2048)), range(4, 6), "zeros at byte 4096"),
    "junk header": (
        overwrite(4 * SAMPLE_BYTES, b"\xff" * 512), range(4, 5), "header checksum does not match"
    ),
    "no text": (
        overwrite(4 * SAMPLE_BYTES + 512, b"\xff\xfe"),
        range(4, 5),
        "part 'txt' is not UTF-8 text (starts with ff fe",
    ),
    "index shifted into the samples": (
        shift_index(512), range(10), "does not fit it. Restore the tar, or run `energon-lite"
    ),
    "index shifted by a byte": (
        shift_index(1), range(10), "end at byte 1025, which is no multiple of 512; run"
    ),
    "index beyond the end": (
        end_index_at(1 << 60), range(9, 10), "has its end mark, so shard-003.tar.idx is wrong; run"
    ),
    "index backwards": (
        reverse_index, range(10), "sample 1 would end at byte 8192, before its first byte 9216; run"
    ),
}  # fmt: skip


def config_of(**more: Any) -> WorkerConfig:
    return WorkerConfig(**{"rank": 0, "world_size": 1, "num_workers": 0, **more})


def sequences(slots: dict[int, Any], num_streams: int) -> list[list[str]]:
    """The sample keys of each stream."""
    return [
        [item.__key__ for m, item in sorted(slots.items()) if m % num_streams == s]
        for s in range(num_streams)
    ]


@pytest.mark.parametrize("case", CASES)
def test_damage_costs_its_samples_and_nothing_else(sound, damaged, tmp_path, case) -> None:
    damage, lost, _ = CASES[case]
    settings = {"batch_size": None, "repeat": False}
    expected = sequences(Ranks(train(sound, **settings), 1, num_streams=4).rest(), 4)
    damage(damaged / BROKEN)
    lost_keys = {f"{3 * PER_SHARD + place:05d}" for place in lost}
    assert lost_keys <= {key for keys in expected for key in keys}
    expected = [[key for key in keys if key not in lost_keys] for keys in expected]
    make = train(damaged, **settings)
    run = Ranks(make, 1, num_streams=4)
    whole = run.rest()
    assert sequences(whole, 4) == expected
    assert run.loaders[0].num_skipped == {"set/train": len(lost)}
    # The same on other ranks, and after resumes in the middle.
    found: dict[int, Any] = {}
    run = Ranks(make, 4, num_streams=4)
    for world_size in (1, 3, 2):
        found.update(run.steps(3))
        run = Ranks(make, world_size, states=run.save())
    found.update(run.rest())
    assert_same(dict(sorted(found.items())), whole)
    assert sum(loader.num_skipped.get("set/train", 0) for loader in run.loaders) == len(lost)


@pytest.mark.parametrize("case", CASES)
def test_error_names_file_sample_and_way_out(damaged, case) -> None:
    damage, lost, text = CASES[case]
    damage(damaged / BROKEN)
    errors = []
    config = config_of(global_error_handler=lambda *args: errors.append(args))
    dataset = get_train_dataset(damaged, worker_config=config, batch_size=None, repeat=False)
    list(get_savable_loader(dataset))
    assert len(errors) == len(lost)
    indices = set()
    for error, sample, sources in errors:
        message = describe(error)
        assert str(damaged / BROKEN) in message
        place = sources[0].index - 3 * PER_SHARD
        assert f"sample number {place}" in message or f"sample '{sources[0].index:05d}'" in message
        assert sources[0].shard_name == BROKEN
        assert sample["__key__"] in (f"{BROKEN}[{place}]", f"{sources[0].index:05d}")
        indices.add(place)
    assert indices == set(lost)
    assert any(text in describe(error) for error, _, _ in errors)
    assert len({describe(error) for error, _, _ in errors}) == len(lost)  # no notes pile up


def test_skipped_samples_are_counted_and_listed(damaged, tmp_path) -> None:
    for case in ("truncated", "no text"):
        CASES[case][0](damaged / BROKEN)
    log = tmp_path / "skipped-{rank}.jsonl"
    config = config_of(num_streams=3)
    dataset = get_train_dataset(damaged, worker_config=config, batch_size=4, repeat=False)
    loader = get_savable_loader(dataset, skip_log=log)
    slots = len(list(loader))
    assert loader.num_skipped == {"set/train": 6}
    lines = [json.loads(line) for line in (tmp_path / "skipped-0.jsonl").read_text().splitlines()]
    assert sorted(line["restore_key"][2] for line in lines) == [34, 35, 36, 37, 38, 39]
    by_index = {line["restore_key"][2]: line for line in lines}
    assert by_index[34]["sample_key"] == "00034"
    assert by_index[36]["sample_key"] == f"{BROKEN}[6]"
    for line in lines:
        assert set(line) == {
            "restore_key", "sample_key", "source", "stage", "error", "on_purpose", "num_samples",
            "slot",
        }  # fmt: skip
        assert (line["source"], line["stage"]) == ("set/train", "load")
        assert (line["on_purpose"], line["num_samples"]) == (False, 1)
        assert str(damaged / BROKEN) in line["error"]
        assert 0 <= line["slot"] < slots + 3


def test_skips_of_several_ranks_are_listed_once_though_they_share_streams(
    damaged, tmp_path
) -> None:
    """Three ranks compute each of two streams; only who gives the batch counts."""
    CASES["truncated"][0](damaged / BROKEN)
    make = train(damaged, "skipping", repeat=False)
    one = Ranks(make, 1, num_streams=2)
    one.rest()
    run = Ranks(make, 3, num_streams=2, skip_log=tmp_path / "skipped-{rank}.jsonl")
    run.rest()
    total = sum(loader.num_skipped.get("set/train", 0) for loader in run.loaders)
    assert total == one.loaders[0].num_skipped["set/train"] > 10
    lines = [
        json.loads(line)
        for file in tmp_path.glob("skipped-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    keys = [json.dumps(line["restore_key"]) for line in lines]
    assert len(keys) == len(set(keys)) == total
    assert {line["on_purpose"] for line in lines} == {True, False}


# ------------------------------------------------------------------ damage that is seen when opened


def take_another_index(damaged: Path) -> None:
    other = text_set(damaged.parent / "other", 7, 1)
    shutil.copy(index_path(other / "shard-000.tar"), index_path(damaged / BROKEN))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda root: index_path(root / BROKEN).unlink(),
         r"idx is missing; run `energon-lite prepare .* --tar-index-only`"),
        (lambda root: (root / BROKEN).unlink(),
         "shard-003.tar.* restore the file, or prepare the dataset again"),
        (take_another_index,
         r"003\.tar\.idx: 64 bytes are the index of 7 samples.*has 10 samples; run `energon-lite"),
    ],
)  # fmt: skip
def test_damage_is_named_when_the_dataset_is_opened(damaged, damage, words) -> None:
    damage(damaged)
    for make_from in (train, validation):
        with pytest.raises((FileNotFoundError, DatasetFormatError), match=words):
            make_from(damaged)(config_of())


# -------------------------------------------------------------------------- damage during the run


def in_file_order(damaged: Path) -> Any:
    make = train(
        damaged, batch_size=1, repeat=False, shuffle_over_epochs_multiplier=None,
        shuffle_buffer_size=0,
    )  # fmt: skip
    return get_savable_loader(make(config_of(global_error_handler=lambda *args: None)))


@pytest.mark.parametrize("damage", ["deleted", "truncated", "index deleted"])
def test_shard_corrupted_in_mid_run_costs_its_samples_only(damaged, damage) -> None:
    """In file order, while shard 0 is being given; what is open or read already may still come."""
    loader = in_file_order(damaged)
    iterator = iter(loader)
    found = [key for batch in islice(iterator, 5) for key in batch.__key__]
    shard = damaged / "shard-005.tar"
    if damage == "deleted":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, 2 * SAMPLE_BYTES)
    else:
        index_path(shard).unlink()
    state = through_json(loader.save_state_rank())
    found += [key for batch in iterator for key in batch.__key__]
    lost = {f"{i:05d}" for i in range(52 if damage == "truncated" else 50, 60)}
    everything = {f"{i:05d}" for i in range(60)}
    missing = everything - set(found)
    assert found == sorted(set(found))
    assert missing in (lost, set())  # nothing is lost if the look-ahead was faster
    assert sum(loader.num_skipped.values()) == len(missing)
    if damage == "truncated":
        again = in_file_order(damaged)
        with pytest.raises(ValueError, match="other names or sizes"):
            again.restore_state_rank(state)


# ------------------------------------------------------------------------------------- bad samples


def pictures(folder: Path, **changes: bytes | None) -> Path:
    """Ten pictures with captions, of which some parts are replaced or left out."""
    members: list[tuple[str, bytes]] = []
    for i in range(10):
        for part, data in (("jpg", jpeg(i)), ("txt", f"text {i}".encode()), ("json", b'{"a": 1}')):
            value = changes.get(f"{part}_{i}", data)
            if value is not None:
                members.append((f"{i:05d}.{part}", value))
    write_tar(folder / "shard-0.tar", members)
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"jpg_4": b"\x3c\x68\x74\x6d\x6c\x3e"}, "part 'jpg' is not a JPEG (starts with 3c 68"),
        ({"jpg_4": jpeg(4)[:200]}, "part 'jpg'"),
        ({"jpg_4": b""}, "part 'jpg'"),
        ({"jpg_4": None}, "'jpg'"),
        ({"txt_4": b"\xff\xff"}, "part 'txt' is not UTF-8 text"),
        ({"txt_4": None}, "'txt'"),
    ],
)  # fmt: skip
def test_broken_or_missing_part_is_named_and_skipped(tmp_path, changes, text) -> None:
    folder = prepared(
        pictures(tmp_path / "set", **changes),
        "CaptioningSample",
        {"image": "jpg", "caption": "txt"},
    )
    errors: list[Any] = []
    config = config_of(global_error_handler=lambda error, *rest: errors.append(error))
    dataset = get_train_dataset(folder, worker_config=config, batch_size=None, repeat=False)
    keys = [sample.__key__ for sample in get_savable_loader(dataset)]
    assert sorted(keys) == [f"{i:05d}" for i in range(10) if i != 4]
    (error,) = errors
    message = describe(error)
    assert text in message
    assert f"{folder / 'shard-0.tar'}, sample '00004'" in message
    assert isinstance(error, (DecodingError, DatasetFormatError))


# ------------------------------------------------------------------------------- the rate of skips


@pytest.fixture(scope="session")
def thousands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 texts; those of a number that ends in `bad` are for encoders that fail on them."""
    return text_set(tmp_path_factory.mktemp("rate") / "many", 3000, 3)


class FailsOnOneIn(DefaultTaskEncoder):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        if int(sample.__key__) % self.number == 0:
            raise ValueError("broken sample")
        return sample


def rate_loader(path: Path, number: int, streams: int = 1, **loader: Any) -> Any:
    config = config_of(num_streams=streams, global_error_handler=lambda *args: None)
    dataset = get_train_dataset(
        path, worker_config=config, batch_size=10, task_encoder=FailsOnOneIn(number),
        max_samples_per_sequence=1,
    )  # fmt: skip
    return get_savable_loader(dataset, **loader)


def test_five_percent_of_broken_samples_end_the_run_and_name_the_rate(thousands) -> None:
    loader = rate_loader(thousands, 20)
    with pytest.raises(FatalSampleError) as caught:
        list(islice(iter(loader), 2000))
    message = str(caught.value)
    for part in (
        "max_skip_rate=0.01",
        "many/train",
        "encode_sample",
        "broken sample",
        "Repair the",
    ):
        assert part in message
    # 100 failures above the rate: at 5 % against 1 % after some 2,500 samples.
    assert 100 < loader.num_skipped["many/train"] < 150


def test_higher_rate_may_be_allowed(thousands) -> None:
    loader = rate_loader(thousands, 20, max_skip_rate=0.06)
    assert len(list(islice(iter(loader), 1500))) == 1500
    loader = rate_loader(thousands, 2, max_skip_rate=1)
    assert len(list(islice(iter(loader), 500))) == 500
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="max_skip_rate"):
            rate_loader(thousands, 20, max_skip_rate=wrong)


def test_run_stops_at_the_same_sample_on_any_topology_and_after_a_resume(thousands) -> None:
    def until_it_stops(loader: Any, batches: int = 10_000) -> tuple[int, str]:
        given = 0
        try:
            for _ in islice(iter(loader), batches):
                given += 1
        except FatalSampleError as error:
            return given, str(error)
        return given, ""

    given, message = until_it_stops(rate_loader(thousands, 20, streams=2))
    assert message
    loader = rate_loader(thousands, 20, streams=2)
    total, resumes = 0, 0
    text = ""
    while not text:
        resumed = rate_loader(thousands, 20, streams=2)
        resumed.load_state_dict(through_json(loader.state_dict()))
        loader = resumed
        more, text = until_it_stops(loader, 100)
        total += more
        resumes += 1
    assert resumes > 3
    assert (total, text) == (given, message)


@pytest.mark.processes
def test_stop_in_a_worker_process_comes_with_its_message_and_an_exact_state(thousands) -> None:
    config = config_of(num_workers=2, global_error_handler=lambda *args: None)
    dataset = get_train_dataset(
        thousands, worker_config=config, batch_size=10, task_encoder=FailsOnOneIn(20)
    )
    loader = get_savable_loader(dataset)
    with pytest.raises(FatalSampleError, match=r"max_skip_rate=0\.01"):
        list(islice(iter(loader), 2000))
    state = through_json(loader.save_state_rank())
    tolerant = get_savable_loader(dataset, max_skip_rate=1)
    tolerant.restore_state_rank(state)
    assert tolerant.save_state_rank()["count"] == state["count"] > 100
    assert len(list(islice(iter(tolerant), 20))) == 20
