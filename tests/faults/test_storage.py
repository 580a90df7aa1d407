"""Storage that fails for a moment, for a minute, or in one place: what heals, and what is lost.

Faults are put in between the readers and the system's calls; nothing waits, as in all tests.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import resource
import shutil
import traceback
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import (
    FatalSampleError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.core import errors
from energon_lite.formats.nvmeta import META, index_path
from energon_lite.storage.local import LocalFile

from ..conftest import examples, write_tar
from ..helpers import last_slot, prepared, text_set, through_json, train
from .failing_storage import FailingStorage, error_of

NUM_SHARDS, PER_SHARD = 4, 30
# A text sample of `text_set` is one header and one block.
SAMPLE_BYTES = 1024
BROKEN = "shard-002.tar"

ERRORS = [
    "EIO", "ESTALE", "EAGAIN", "EINTR", "ETIMEDOUT", "ENOTCONN", "ECONNRESET", "EREMOTEIO",
    "ENETDOWN", "EHOSTDOWN", "EBUSY", "ENOLCK", "ENOMEM", "EBADF",
]  # fmt: skip


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("storage") / "set", NUM_SHARDS * PER_SHARD, NUM_SHARDS)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may change, under the same name, so that its order is the same."""
    return shutil.copytree(sound, tmp_path / "copy" / sound.name)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FailingStorage:
    monkeypatch.setattr(errors, "_counts", Counter())
    return FailingStorage(monkeypatch)


def loader_of(path: Path, num_workers: int = 0, **settings: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, num_streams=1)
    settings = {"batch_size": 1, "repeat": False, **settings}
    return get_savable_loader(train(path, **settings)(config))


def keys_in(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch.__key__]


@pytest.mark.parametrize(("name", "number"), [("EIO", 1), ("ESTALE", 4)])
def test_an_error_that_passes_costs_nothing(sound, storage, name, number, caplog) -> None:
    expected = keys_in(loader_of(sound))
    storage.fail(name, BROKEN, number, blocks=True)
    loader = loader_of(sound)
    assert keys_in(loader) == expected
    assert loader.num_skipped == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{BROKEN} could be read at try {number + 1}, after " in line


@pytest.mark.parametrize("name", ["EIO", "ENOMEM"])
def test_an_error_that_stays_costs_the_shard_and_reports_the_number_of_tries(
    sound, storage, name, caplog
) -> None:
    expected = keys_in(loader_of(sound))
    storage.fail(name, BROKEN, blocks=name != "ENOMEM")
    loader = loader_of(sound)
    lost = {f"{2 * PER_SHARD + i:05d}" for i in range(PER_SHARD)}
    assert keys_in(loader) == [key for key in expected if key not in lost]
    assert loader.num_skipped == {"set/train": PER_SHARD}
    assert re.search(r"tried [89] times in 4\.0 s", caplog.text)
    assert os.strerror(getattr(errno, name)) in caplog.text
    assert len(caplog.records) <= 2  # the first, and the tenth


def test_a_descriptor_that_went_bad_is_opened_again(sound, storage) -> None:
    expected = keys_in(loader_of(sound))
    opened: list[str] = []
    storage.at_opening = opened.append

    def fault(path: str, start: int, stop: int) -> None:
        if sum(name == path for name in opened) < 3:
            raise error_of("EBADF")

    storage.fault = fault
    loader = loader_of(sound)
    assert keys_in(loader) == expected
    assert loader.num_skipped == {}


def test_while_nothing_can_be_read_nothing_is_skipped_and_the_run_ends_with_one_error(
    sound, storage, caplog
) -> None:
    expected = keys_in(loader_of(sound))
    loader = loader_of(sound)
    iterator = iter(loader)
    found = keys_in([next(iterator) for _ in range(10)])

    storage.fail("ENOTCONN", sound)
    with pytest.raises(FatalSampleError, match="cannot be read any more, an outage") as caught:
        found.extend(batch.__key__[0] for batch in iterator)
    assert "Transport endpoint is not connected" in str(caught.value)
    assert "times in 300.0 s" in str(caught.value)
    assert loader.num_skipped == {}
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("waiting for 300 s at most")
    state = through_json(loader.save_state_rank())
    storage.mend()
    resumed = loader_of(sound)
    resumed.restore_state_rank(state)
    assert found + keys_in(resumed) == expected
    assert found + keys_in(loader) == expected


def test_an_outage_may_end_while_it_is_probed(sound, storage, monkeypatch) -> None:
    """The last try fails, then the other shards can be read: the shard is tried as long as ever."""
    expected = keys_in(loader_of(sound))

    def is_away() -> bool:
        callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(None)}
        return storage.waited_sec < (50 if "can_read" in callers else 52)

    loader = loader_of(sound)
    storage.fail("EIO", sound, is_away=is_away)
    assert keys_in(loader) == expected


@pytest.mark.processes
def test_an_outage_ends_worker_processes_with_the_same_error_and_exact_states(
    sound, storage
) -> None:
    num_calls, num_sound = multiprocessing.Value("i", 0), multiprocessing.Value("i", 1 << 30)

    def is_away() -> bool:
        num_calls.value += 1
        return num_calls.value > num_sound.value

    storage.fail("ENOTCONN", sound, is_away=is_away)
    batches = iter(loader_of(sound))
    first, number = keys_in([next(batches) for _ in range(5)]), num_calls.value + 1
    expected = first + keys_in(batches)
    num_calls.value, num_sound.value = 0, number
    loader, found = loader_of(sound, num_workers=1), []
    with pytest.raises(FatalSampleError, match="cannot be read any more, an outage"):
        found.extend(batch.__key__[0] for batch in loader)
    assert 0 < len(found) < len(expected)
    assert loader.num_skipped == {}
    num_sound.value = 1 << 30
    assert found + keys_in(loader) == expected


# ------------------------------------------------------------------------------- kinds of faults


def no_status(storage: FailingStorage, folder: Path) -> None:
    fstat = os.fstat

    def fault(descriptor: int) -> os.stat_result:
        if storage.waited_sec < 1:
            raise OSError(errno.EIO, "Input/output error")
        return fstat(descriptor)

    storage.patch.setattr(os, "fstat", fault)


def cut_and_restored(storage: FailingStorage, folder: Path) -> None:
    """A copy over the shard: it is cut first, and is longer and longer then."""
    content = (folder / BROKEN).read_bytes()

    def copy(waited: float) -> None:
        (folder / BROKEN).write_bytes(content if waited > 1 else content[: int(5000 * waited)])

    storage.fault = lambda path, start, stop: copy(0) if not storage.waited_sec else None
    storage.while_waiting = copy


def replaced_by_itself(storage: FailingStorage, folder: Path) -> None:
    """As by `rsync`: a new file under the same name, of the same content; the old one is stale."""
    old = {str((folder / BROKEN).stat().st_ino)}

    def fault(path: str, start: int, stop: int) -> None:
        if path.startswith(str(folder / BROKEN)) and " (deleted)" in path:
            raise error_of("ESTALE")
        if path.endswith(BROKEN) and old:
            old.clear()
            shutil.copy(folder / BROKEN, folder / "new")
            (folder / "new").replace(folder / BROKEN)
            raise error_of("ESTALE")

    storage.fault = fault


def unmounted_and_mounted(storage: FailingStorage, folder: Path) -> None:
    away = folder.with_name("away")

    def fault(path: str, start: int, stop: int) -> None:
        if storage.reads == 3:
            folder.rename(away)
        if "away" in path:
            raise error_of("ENOTCONN")

    def mount(waited: float) -> None:
        if waited > 60 and away.exists():
            away.rename(folder)

    storage.fault, storage.while_waiting = fault, mount


def write_again(storage: FailingStorage, folder: Path) -> None:
    content = (folder / BROKEN).read_bytes()
    (folder / BROKEN).unlink()
    storage.while_waiting = lambda waited: (folder / BROKEN).write_bytes(content) and None


HEALING: dict[str, Callable[[FailingStorage, Path], Any]] = {
    "index fails": lambda storage, _: storage.fail("EIO", ".idx", until_sec=1),
    "may not be opened": lambda storage, _: storage.fail("EACCES", BROKEN, until_sec=1),
    "too many files are open": lambda storage, folder: storage.fail("ENFILE", folder, until_sec=1),
    "all is away, and then one shard": lambda storage, folder: storage.fail(
        "EIO",
        folder,
        until_sec=62,
        is_away=lambda: storage.waited_sec < 60 or storage.latest.endswith(BROKEN),
    ),
    "no status": no_status,
    "deleted and written again": write_again,
    "cut and restored": cut_and_restored,
    "replaced by itself": replaced_by_itself,
    "unmounted and mounted": unmounted_and_mounted,
}


@pytest.mark.parametrize("cause", HEALING)
def test_what_heals_costs_nothing(sound, copied, storage, cause: str) -> None:
    expected = keys_in(loader_of(sound))
    storage.patch.setattr("energon_lite.formats.shards.MAX_OPEN", 2)
    loader = loader_of(copied)
    HEALING[cause](storage, copied)
    assert keys_in(loader) == expected
    assert loader.num_skipped == {}


def test_a_shard_that_was_cut_before_the_run_is_read_again_when_it_is_restored(
    sound, copied, storage
) -> None:
    whole = (copied / BROKEN).read_bytes()
    os.truncate(copied / BROKEN, 5 * SAMPLE_BYTES)
    loader = loader_of(copied, repeat=True)
    iterator = iter(loader)
    for _ in range(NUM_SHARDS * PER_SHARD):
        next(iterator)
    lost = loader.num_skipped["set/train"]
    assert lost >= PER_SHARD - 5
    (copied / BROKEN).write_bytes(whole)
    found = keys_in([next(iterator) for _ in range(3 * NUM_SHARDS * PER_SHARD)])
    assert set(found) == set(keys_in(loader_of(sound)))
    assert loader.num_skipped["set/train"] <= 2 * PER_SHARD


def test_too_many_open_files_close_the_coldest(tmp_path, storage, caplog) -> None:
    folder = text_set(tmp_path / "many", 60, 30)
    settings = {"max_samples_per_sequence": 1, "shuffle_buffer_size": 60}
    expected = keys_in(loader_of(folder, **settings))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for free in (8, 2):
        loader = loader_of(folder, **settings)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
        try:
            found = keys_in(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert found == expected
        assert loader.num_skipped == {}
    assert storage.waited_sec < 1


@pytest.mark.parametrize("free", [12, 40])
def test_more_sources_than_open_files(tmp_path, storage, free: int) -> None:
    entry = {"path": str(text_set(tmp_path / "set", 4, 2)), "repetitions": 1}
    names = [f"n{number}" for number in range(60)]
    blend = [{**entry, "name": name} for name in names]
    content = {"__class__": "MetadatasetV2", "splits": {"train": {"blend_epochized": blend}}}
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=2)
    loader = get_savable_loader(get_train_dataset(content, batch_size=1, worker_config=config))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The program of the tests has files open above the lowest free number.
    used = {int(file.name) for file in Path("/proc/self/fd").iterdir()}
    limit = list(islice((number for number in count() if number not in used), free))[-1] + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        found = Counter(batch.__key__[0] for batch in islice(loader, 2 * 4 * len(names)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == {f"{number:05d}": 2 * len(names) for number in range(4)}
    assert storage.waited_sec < 1


def test_what_no_server_changes_is_not_waited_for(sound, storage) -> None:
    loader = loader_of(sound)
    storage.fail("ELOOP", BROKEN)
    assert len(keys_in(loader)) == (NUM_SHARDS - 1) * PER_SHARD
    assert storage.waited_sec == 0


def test_a_process_that_may_open_no_file_ends_with_one_error(sound, storage) -> None:
    loader = loader_of(sound)
    storage.fail("EMFILE", sound)
    text = r"raise the limit of open files .* Raise the limit, and resume"
    with pytest.raises(FatalSampleError, match=text):
        next(iter(loader))
    assert loader.num_skipped == {}


@pytest.mark.parametrize("longer_by", [0, 512])
def test_a_shard_replaced_by_another_one_is_named_and_not_read(
    sound, copied, storage, tmp_path, caplog, longer_by
) -> None:
    """By one with the same layout, whose keys tell, and by a longer one."""
    expected = keys_in(loader_of(sound))
    loader = loader_of(copied)
    iterator = iter(loader)
    found = keys_in([next(iterator) for _ in range(30)])  # all shards are open
    other = text_set(tmp_path / "other", NUM_SHARDS * PER_SHARD, NUM_SHARDS)
    for name in (BROKEN, f"{BROKEN}.idx"):
        (other / name.replace("2", "1")).replace(copied / name)
    with (copied / BROKEN).open("ab") as file:
        file.write(bytes(longer_by))
    storage.fail("ESTALE", BROKEN, 1, blocks=True)
    found += keys_in(iterator)
    what = "took the place of one of" if longer_by else "sample 0 has the key '00030', where"
    assert what in caplog.text
    lost = loader.num_skipped["set/train"]
    assert 0 < lost < PER_SHARD
    assert len(found) == len(expected) - lost
    assert [key for key in expected if key in set(found)] == found


# ------------------------------------------------------------------------------------- other files


def test_a_full_disk_costs_lines_of_the_skip_log_and_one_warning(sound, storage, caplog) -> None:
    """`/dev/full` takes nothing, as a full disk."""
    storage.fail("EIO", BROKEN, blocks=True)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1)
    dataset = train(sound, batch_size=1, repeat=False)(config)
    loader = get_savable_loader(dataset, skip_log="/dev/full")
    assert len(keys_in(loader)) == (NUM_SHARDS - 1) * PER_SHARD
    assert loader.num_skipped == {"set/train": PER_SHARD}
    lines = [text for text in caplog.messages if "/dev/full" in text]
    assert lines[0].endswith("lines are lost (1 times so far): [Errno 28] No space left on device")
    assert len(lines) <= 2  # and the tenth


def test_an_error_while_tars_are_indexed_fails_no_tar(tmp_path, storage, monkeypatch) -> None:
    folder = text_set(tmp_path / "set", 30, 3)
    expected = index_path(folder / "shard-001.tar").read_bytes()
    shutil.rmtree(folder / META)
    left = [3]
    read = LocalFile.read

    def fails_sometimes(file: LocalFile, start: int, stop: int) -> bytes:
        if file.path.name == "shard-001.tar" and left[0]:
            left[0] -= 1
            raise error_of("ESTALE")
        return read(file, start, stop)

    monkeypatch.setattr(LocalFile, "read", fails_sometimes)
    prepared(folder, "TextSample", {"text": "txt"})
    assert left == [0]
    assert index_path(folder / "shard-001.tar").read_bytes() == expected


def test_an_error_that_stays_names_the_tar_that_cannot_be_indexed(tmp_path, monkeypatch) -> None:
    def fails_always(file: LocalFile, start: int, stop: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalFile, "read", fails_always)
    write_tar(tmp_path / "set" / "a.tar", [("0.txt", b"")])
    with pytest.raises((OSError, ValueError), match=r"tried 8 times in 4.0 s.*a.tar'"):
        prepared(tmp_path / "set", "TextSample", {"text": "txt"})


def test_a_dataset_is_opened_though_its_files_fail_at_first(sound, storage) -> None:
    expected = keys_in(loader_of(sound))
    failed: set[str] = set()

    def fails_once(path: str) -> None:
        if str(sound) in path and path not in failed:
            failed.add(path)
            raise error_of("EIO", path)

    storage.at_opening = fails_once
    assert keys_in(loader_of(sound)) == expected
    assert {Path(path).suffix for path in failed} == {
        ".json", ".yaml", ".idx", ".tar", ".sqlite", ".bin", ".uuid",
    }  # fmt: skip


# ----------------------------------------------------------------------------------------- property


@examples(8)
@given(
    faults=st.dictionaries(
        st.integers(1, 60),
        st.sampled_from(ERRORS) | st.sampled_from([0, 100, 700, 3000]),
        max_size=12,
    ),
    away=st.none() | st.integers(1, 40),
    stops=st.lists(st.integers(0, 40), max_size=3),
    num_streams=st.integers(1, 3),
    bad=st.none() | st.integers(0, PER_SHARD - 1),
)
def test_any_faults_that_pass_change_nothing_also_after_resumes(
    sound, faults, away, stops, num_streams, bad
) -> None:
    """Beside a sample that can never be read: that one is skipped, and counted, once."""
    if bad is not None:  # its shard is tried for a moment only, the second time
        faults = dict(islice(faults.items(), 2))

    def made() -> Any:
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=num_streams)
        return get_savable_loader(train(sound, batch_size=None, repeat=False)(config))

    def slots_of(loader: Any) -> dict[int, str]:
        return {last_slot(loader): sample.__key__ for sample in loader}

    with pytest.MonkeyPatch.context() as patch:
        storage, num_reads = FailingStorage(patch), 0
        place = -1 if bad is None else bad * SAMPLE_BYTES + 512

        def bad_sector(path: str, start: int, stop: int) -> None:
            if path.endswith(BROKEN) and start <= place < stop:
                raise error_of("EIO")

        storage.fault = bad_sector
        expected = slots_of(made())
        storage.fail(
            "ENOTCONN", sound, until_sec=storage.waited_sec + 90,
            is_away=lambda: away is not None and num_reads >= away,
        )  # fmt: skip
        outage = storage.fault

        def fault(path: str, start: int, stop: int) -> int | None:
            nonlocal num_reads
            num_reads += 1
            bad_sector(path, start, stop)
            outage(path, start, stop)
            planned = faults.get(num_reads)
            if isinstance(planned, str):
                raise error_of(planned)
            return planned

        storage.fault = fault
        loader, found = made(), {}
        for number in stops:
            for sample in islice(loader, number):
                found[last_slot(loader)] = sample.__key__
            state = through_json(loader.save_state_rank())
            loader = made()
            loader.restore_state_rank(state)
        found.update(slots_of(loader))
    assert found == expected
    assert loader.num_skipped == ({} if bad is None else {"set/train": 1})
