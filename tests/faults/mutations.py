"""Files of datasets with random damage, and what reading them comes to.

A scene is a small dataset with something that is done with it. `outcome_of` damages one of its
files, does the same again and compares.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import resource
import shutil
import signal
import tarfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_lite import (
    CrudeWebdataset,
    SampleDecoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
)
from energon_lite.core.errors import (
    DatasetFormatError,
    DecodingError,
    FatalSampleError,
    StateError,
    describe,
)
from energon_lite.extras.inspect.lint import lint_dataset
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.formats.length_files import read_lengths, write_lengths
from energon_lite.formats.nvmeta import read_info, write_info

from ..helpers import prepared, text_of

NUM_SAMPLES = 12
TIMEOUT_SEC = 20
_MEMORY_BYTES = 1 << 30


class Hang(BaseException):
    """What was done did not end."""


@dataclass
class Seen:
    """What came of something that was done with a dataset.

    Attributes:
        values: what was read, by its name: the samples by their keys, and the like.
        errors: of samples that were skipped.
        warnings: that were logged.
    """

    values: dict[str, Any] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any) -> None:
        """Adds a value, under another name if this one was there before."""
        while name in self.values:
            name += " again"
        self.values[name] = value


@dataclass(frozen=True)
class Scene:
    """A kind of file, a dataset that has one, and what is done with it.

    Attributes:
        kind: the row of the table.
        make: writes the dataset into a folder.
        file: which file is damaged.
        do: reads, prepares or resumes.
        told_by: what notices a changed value: `all`, everything; `keys`, only keys and the number
            of samples (contents have no checksum); `none`, it may be another valid setting.
    """

    kind: str
    make: Callable[[Path], Any]
    file: str
    do: Callable[[Path], Seen]
    told_by: str = "all"


# ---------------------------------------------------------------------------------------- datasets


def texts(folder: Path, tar_format: int = tarfile.USTAR_FORMAT, lead: str = "") -> None:
    """Two shards of texts; names of PAX have the file's time, as most programs write it."""
    folder.mkdir(parents=True)
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard}.tar", "w", format=tar_format) as tar:
            for i in range(shard * NUM_SAMPLES // 2, (shard + 1) * NUM_SAMPLES // 2):
                data = text_of(i).encode() * 20
                info = tarfile.TarInfo(f"{lead}{i:05d}.txt")
                info.size, info.mtime = len(data), 1700000000.25
                tar.addfile(info, io.BytesIO(data))
    prepared(folder, "TextSample", {"text": "txt"})


def with_excludes(folder: Path) -> None:
    texts(folder)
    config = folder / ".nv-meta/split.yaml"
    config.write_text(config.read_text().replace("exclude: []", "exclude: [shard-1.tar/00008]"))


def with_info_yaml(folder: Path) -> None:
    texts(folder)
    write_info(folder, read_info(folder), also_yaml=True)
    (folder / ".nv-meta/.info.json").unlink()


def parts_of(i: int) -> dict[str, bytes]:
    """Parts of most kinds; those that know when they are damaged, and those that do not."""
    pixels = np.random.default_rng(i).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    files: dict[str, io.BytesIO] = {name: io.BytesIO() for name in ("png", "npz", "jpg")}
    Image.fromarray(pixels).save(files["png"], "PNG")
    Image.fromarray(pixels).save(files["jpg"], "JPEG")
    np.savez(files["npz"], x=pixels)
    document = {"number": i, "text": text_of(i), "list": list(range(9))}
    return {
        **{name: file.getvalue() for name, file in files.items()},
        "json": json.dumps(document).encode(),
        "txt.gz": gzip.compress(text_of(i).encode() * 9, mtime=0),
    }


def media(folder: Path) -> None:
    folder.mkdir(parents=True)
    with tarfile.open(folder / "shard-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for i in range(4):
            for part, data in parts_of(i).items():
                info = tarfile.TarInfo(f"{i:05d}.{part}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    prepared(folder, "CrudeWebdataset")


def metadataset(folder: Path) -> None:
    texts(folder / "a")
    texts(folder / "b")
    (folder / "all.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n    blend:\n"
        "      - path: ./a\n        weight: 3\n      - path: ./b\n        weight: 1.5\n"
        "        subset: {range: [0, 6]}\n        subflavors: {kind: other}\n"
    )


def lengths(folder: Path) -> None:
    texts(folder)
    write_lengths(folder, "train", "name", np.arange(1, NUM_SAMPLES + 1), "data")


def with_state(folder: Path) -> None:
    texts(folder)
    loader = _loader(folder, Seen())
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    (folder / "state.json").write_text(json.dumps(loader.save_state_rank(), indent=1))


# ---------------------------------------------------------------------------------- what is done


def _config(seen: Seen) -> WorkerConfig:
    return WorkerConfig(
        rank=0, world_size=1, num_workers=0,
        global_error_handler=lambda error, *_: seen.errors.append(error),
    )  # fmt: skip


def _loader(folder: Path, seen: Seen) -> Any:
    dataset = get_train_dataset(
        folder, worker_config=_config(seen), batch_size=None, repeat=False,
        shuffle_over_epochs_multiplier=None, shuffle_buffer_size=0,
    )  # fmt: skip
    return get_savable_loader(dataset, max_skip_rate=1)


def read(folder: Path) -> Seen:
    seen = Seen()
    for sample in _loader(folder, seen):
        seen.add(sample.__key__, sample.text)
    return seen


def read_media(folder: Path) -> Seen:
    seen = Seen()
    source = CrudeWebdataset(
        folder,
        training=False,
        worker_config=_config(seen),
        decoder=SampleDecoder(image_decode="pilrgb"),
    ).build()
    for sample in get_savable_loader(source, max_skip_rate=1):
        for name, value in sample.items():
            if not name.startswith("__"):
                shown = getattr(value, "tobytes", lambda value=value: canonical_text(value))()
                seen.add(f"{sample['__key__']}.{name}", shown)
    return seen


def canonical_text(value: Any) -> str:
    """A value as text: arrays of `npz` among them."""
    if hasattr(value, "items"):
        return repr(sorted((name, np.asarray(x).tolist()) for name, x in value.items()))
    return repr(value)


def read_metadataset(folder: Path) -> Seen:
    seen = Seen()
    dataset = get_val_dataset(
        folder / "all.yaml", split_part="train", worker_config=_config(seen), batch_size=None
    )
    for sample in get_savable_loader(dataset, max_skip_rate=1):
        name = Path(sample.__sources__[0].dataset_path).name
        seen.add(f"{name}/{sample.__key__}", (sample.text, sample.__subflavors__))
    return seen


def prepare(folder: Path) -> Seen:
    """Prepares the tars of a folder as if for the first time; reads what it found."""
    shutil.rmtree(folder / ".nv-meta")
    for index in folder.glob("*.idx"):
        index.unlink()
    prepared(folder, "TextSample", {"text": "txt"})
    return read(folder)


def read_length_index(folder: Path) -> Seen:
    found = read_lengths(folder, "train", "name", NUM_SAMPLES, "data")
    return Seen({"lengths": np.asarray(found).tolist()})


def resume(folder: Path) -> Seen:
    """Goes on from a saved state; text that is no JSON is the user's to notice."""
    seen = Seen()
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{folder}/state.json: {error}") from None
    loader = _loader(folder, seen)
    loader.restore_state_rank(state)
    for sample in loader:
        seen.add(sample.__key__, sample.text)
    return seen


def reindex(folder: Path) -> Seen:
    prepare_dataset(folder, tar_index_only=True, num_workers=0)
    return read(folder)


LONG = "folder/" + "long/" * 22
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}


def _tars() -> Iterator[Scene]:
    for name, number in FORMATS.items():
        for lead, suffix in (("", ""), (LONG, ", long names")):

            def make(folder: Path, number: int = number, lead: str = lead) -> None:
                texts(folder, number, lead)

            kind = f"tar, {name}{suffix}"
            yield Scene(kind, make, "shard-1.tar", read, "keys")
            yield Scene(f"{kind}: prepared", make, "shard-1.tar", prepare, "none")


META = ".nv-meta"
LENGTHS = f"{META}/energon_lite/lengths/name/train"
SCENES = [
    *_tars(),
    Scene("tar, media parts", media, "shard-0.tar", read_media, "keys"),
    Scene(".tar.idx", texts, "shard-1.tar.idx", read),
    Scene(".tar.idx, samples of several parts", media, "shard-0.tar.idx", read_media),
    Scene(".info.json", texts, f"{META}/.info.json", read),
    Scene(".info.json: indexed again", texts, f"{META}/.info.json", reindex, "none"),
    Scene(".info.yaml", with_info_yaml, f"{META}/.info.yaml", read),
    Scene("split.yaml", with_excludes, f"{META}/split.yaml", read, "none"),
    Scene("dataset.yaml", texts, f"{META}/dataset.yaml", read, "none"),
    Scene("index.sqlite", with_excludes, f"{META}/index.sqlite", read),
    Scene("index.uuid", texts, f"{META}/index.uuid", read),
    Scene("metadataset", metadataset, "all.yaml", read_metadataset, "none"),
    Scene("length index, npy", lengths, f"{LENGTHS}.npy", read_length_index, "none"),
    Scene("length index, json", lengths, f"{LENGTHS}.json", read_length_index),
    Scene("state", with_state, "state.json", resume),
]


# ----------------------------------------------------------------------------------------- damage


# What parsers stumble over, rather than bytes at random.
TOKENS = (
    b"[" * 3000, b"{" * 3000, b"&a [*a]", b"*x", b"!!python/name:os.system ", b"9" * 5000,
    b"-", b"1e999", b"null", b"\0", b"\xff", b"\xed\xa0\x80", b"{0..9999999999}", b": ", b"\n- ",
    b"'", b'"', b"\t", b"../../", b"%s", b"---\n", b"?", b"\\", b"\xef\xbb\xbf", b"<<: *a",
)  # fmt: skip


def damage(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Changes a few bytes, or blocks; returns the bytes and what was done."""
    raw = bytearray(data)
    block = 512 if len(raw) >= 2048 else 8
    at, length = rng.randrange(len(raw)), rng.randrange(1, 65)
    first, second = (rng.randrange(max(1, len(raw) // block)) * block for _ in range(2))
    what = rng.choice([
        "bit", "bit", "byte", "byte", "range", "deleted", "inserted", "truncated", "duplicated",
        "zeros", "swapped", "token", "token inserted",
    ])  # fmt: skip
    if what == "bit":
        raw[at] ^= 1 << rng.randrange(8)
    elif what == "byte":
        raw[at] = rng.choice([0, 255, *b"0179-+_ ]}{[:,\"'&*!", rng.randrange(256)])
    elif what == "range":
        raw[at : at + length] = rng.randbytes(len(raw[at : at + length]))
    elif what == "deleted":
        del raw[at : at + rng.choice([1, length, block])]
    elif what == "inserted":
        raw[at:at] = rng.randbytes(rng.choice([1, length, block]))
    elif what == "truncated":
        del raw[at:]
    elif what.startswith("token"):
        token = rng.choice(TOKENS)
        raw[at : at + ("inserted" not in what) * len(token)] = token
    elif what == "duplicated":
        raw[second : second + block] = raw[first : first + block]
    elif what == "zeros":
        raw[first : first + block] = bytes(len(raw[first : first + block]))
    else:
        one, other = raw[first : first + block], raw[second : second + block]
        if len(one) == len(other):
            raw[first : first + block], raw[second : second + block] = other, one
    return bytes(raw), f"{what} at byte {at if block > 8 else first} of {len(data)}"


# --------------------------------------------------------------------------------------- outcomes

CLEAR = (DatasetFormatError, DecodingError, StateError, FileNotFoundError, FatalSampleError)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what is logged as a warning or worse."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("energon_lite")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@contextmanager
def guarded() -> Iterator[None]:
    """Ends what takes too long, or too much memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SEC)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _stop(*_: Any) -> None:
    raise Hang


def outcome_of(scene: Scene, made: Path, expected: Seen, seed: str, work: Path) -> tuple[str, str]:
    """Damages a copy of a dataset and does what the scene does.

    Returns:
        The class, and what was done and seen. Classes: `same`; `skipped`, with a clear error;
        `error`, a clear one; `warning`, one that names the file; `content`, bytes without a
        checksum, or another valid setting; `moved`, a whole tar header in the place of another,
        which `lint` finds; `SILENT`; `UNCLEAR`; `HANG`; `MEMORY`.
    """
    folder = shutil.copytree(made, work / made.name)
    file = folder / scene.file
    data, what = damage(file.read_bytes(), random.Random(seed))
    file.chmod(0o644)
    file.write_bytes(data)
    try:
        kind, text = _outcome(scene, folder, expected)
        is_moved = "duplicated" in what or "swapped" in what
        if kind == "SILENT" and scene.told_by == "keys" and is_moved:
            kind = kind if lint_dataset(folder, num_workers=0).is_ok else "moved"
    finally:
        shutil.rmtree(folder)
    return kind, f"{kind}: {scene.kind}, seed {seed!r}: {what}: {text}"


def _outcome(scene: Scene, folder: Path, expected: Seen) -> tuple[str, str]:
    try:
        with guarded(), logged() as warnings:
            seen = scene.do(folder)
        seen.warnings += [text for text in warnings if str(folder) in text]
    except Hang:
        return "HANG", ""
    except MemoryError:
        return "MEMORY", traceback.format_exc()
    except Exception as error:
        kind = "error" if is_clear(error, folder) else "UNCLEAR"
        return kind, "".join(traceback.format_exception(error))
    unclear = [error for error in seen.errors if not is_clear(error, folder)]
    if unclear:
        return "UNCLEAR", "".join(traceback.format_exception(unclear[0]))
    return compared(scene, expected, seen), differences(expected, seen)


def is_clear(error: BaseException, folder: Path) -> bool:
    """Whether an error is one of ours, or the system's, and names a file."""
    return isinstance(error, CLEAR) and (
        isinstance(error, StateError) or str(folder) in describe(error)
    )


def compared(scene: Scene, expected: Seen, seen: Seen) -> str:
    if seen.values == expected.values:
        return "skipped" if seen.errors else "same"
    if scene.told_by == "none":
        return "content"
    if seen.warnings:
        return "warning"
    changed = [name for name in seen.values if seen.values[name] != expected.values.get(name)]
    lost = expected.values.keys() - seen.values
    if scene.told_by == "keys" and not seen.values.keys() - expected.values:
        is_blind = all(not name.endswith((".png", ".npz", ".txt.gz")) for name in changed)
        if changed and is_blind and len(lost) <= len(seen.errors):
            return "content"
    if changed or len({name.partition(".")[0] for name in lost}) > len(seen.errors):
        return "SILENT"
    return "skipped"


def differences(expected: Seen, seen: Seen) -> str:
    names = sorted(seen.values.keys() | expected.values)
    differing = [n for n in names if seen.values.get(n) != expected.values.get(n)]
    return (
        ", ".join(
            f"{n}: {expected.values.get(n)!r:.80} became {seen.values.get(n)!r:.80}"
            for n in differing[:3]
        )
        + f" ({len(seen.errors)} errors: {[describe(e)[:200] for e in seen.errors[:2]]})"
    )


class Scenes:
    """The datasets of all scenes, each written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[Callable[[Path], Any], Path] = {}
        self._expected: dict[int, Seen] = {}

    def try_one(self, number: int, seed: str, work: Path) -> tuple[str, str]:
        """Tries the scene of a number, with the damage of a seed."""
        scene = SCENES[number]
        made = self._made.get(scene.make)
        if made is None:
            made = self._made[scene.make] = self.folder / str(number) / "set"
            scene.make(made)
        if number not in self._expected:
            copy = shutil.copytree(made, self.folder / "copy" / str(number) / "set")
            self._expected[number] = scene.do(copy)
        return outcome_of(scene, made, self._expected[number], seed, work)
