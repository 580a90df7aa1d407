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
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

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

from ..helpers import metadataset, prepared, text_of

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


class Scene(NamedTuple):
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


def write_shard(path: Path, members: dict[str, bytes], form: int = tarfile.USTAR_FORMAT) -> None:
    """Writes a tar; names of PAX have the file's time, as most programs write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1700000000.25 if form == tarfile.PAX_FORMAT else 0
            tar.addfile(info, io.BytesIO(data))


def texts(folder: Path, form: int = tarfile.USTAR_FORMAT, lead: str = "") -> None:
    """Two shards of texts."""
    for shard in range(2):
        numbers = range(shard * NUM_SAMPLES // 2, (shard + 1) * NUM_SAMPLES // 2)
        members = {f"{lead}{i:05d}.txt": text_of(i).encode() * 20 for i in numbers}
        write_shard(folder / f"shard-{shard}.tar", members, form)
    prepared(folder, "TextSample", {"text": "txt"})


def with_excludes(folder: Path) -> None:
    texts(folder)
    config = folder / SPLIT
    config.write_text(config.read_text().replace("exclude: []", "exclude: [shard-1.tar/00008]"))


def with_info_yaml(folder: Path) -> None:
    texts(folder)
    write_info(folder, read_info(folder), also_yaml=True)
    (folder / INFO).unlink()


def parts_of(i: int) -> dict[str, bytes]:
    """Parts of most kinds; those that know when they are damaged, and those that do not."""
    pixels = np.random.default_rng(i).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    files: dict[str, io.BytesIO] = {name: io.BytesIO() for name in ("png", "npz", "jpg")}
    Image.fromarray(pixels).save(files["png"], "PNG")
    Image.fromarray(pixels).save(files["jpg"], "JPEG")
    np.savez(files["npz"], x=pixels)
    document = {"number": i, "text": text_of(i), "list": list(range(9))}
    more = {"json": json.dumps(document).encode(), "txt.gz": gzip.compress(b"text" * 9, mtime=0)}
    return {**{name: file.getvalue() for name, file in files.items()}, **more}


def media(folder: Path) -> None:
    members = {f"{i:05d}.{part}": data for i in range(4) for part, data in parts_of(i).items()}
    write_shard(folder / "shard-0.tar", members)
    prepared(folder, "CrudeWebdataset")


def blend(folder: Path) -> None:
    for name in "ab":
        texts(folder / name)
    other = {"subset": {"range": [0, 6]}, "subflavors": {"kind": "other"}}
    members = [{"path": "./a", "weight": 3}, {"path": "./b", "weight": 1.5, **other}]
    (folder / "all.yaml").write_text(json.dumps(metadataset({"blend": members}), indent=1))


def lengths(folder: Path) -> None:
    texts(folder)
    write_lengths(folder, "train", "name", np.arange(1, NUM_SAMPLES + 1), "data")


def with_state(folder: Path) -> None:
    texts(folder)
    loader = _loader(folder, Seen())
    for _ in zip(range(5), loader, strict=False):
        pass
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


def read(folder: Path, state: Any = None) -> Seen:
    seen = Seen()
    loader = _loader(folder, seen)
    if state is not None:
        loader.restore_state_rank(state)
    for sample in loader:
        seen.add(sample.__key__, sample.text)
    return seen


def read_media(folder: Path) -> Seen:
    seen = Seen()
    decoder = SampleDecoder(image_decode="pilrgb")
    source = CrudeWebdataset(folder, training=False, worker_config=_config(seen), decoder=decoder)
    for sample in get_savable_loader(source.build(), max_skip_rate=1):
        for name, value in sample.items():
            if hasattr(value, "items") and name == "npz":
                value = sorted((key, np.asarray(x).tolist()) for key, x in value.items())
            if not name.startswith("__"):
                shown = value.tobytes() if hasattr(value, "tobytes") else repr(value)
                seen.add(f"{sample['__key__']}.{name}", shown)
    return seen


def read_blend(folder: Path) -> Seen:
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
    shutil.rmtree(folder / META)
    for index in folder.glob("*.idx"):
        index.unlink()
    prepared(folder, "TextSample", {"text": "txt"})
    return read(folder)


def read_length_index(folder: Path) -> Seen:
    found = read_lengths(folder, "train", "name", NUM_SAMPLES, "data")
    return Seen({"lengths": np.asarray(found).tolist()})


def resume(folder: Path) -> Seen:
    """Goes on from a saved state; text that is no JSON is the user's to notice."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{folder}/state.json: {error}") from None
    return read(folder, state)


def reindex(folder: Path) -> Seen:
    prepare_dataset(folder, tar_index_only=True, num_workers=0)
    return read(folder)


META = ".nv-meta"
INFO, SPLIT = f"{META}/.info.json", f"{META}/split.yaml"
LENGTHS = f"{META}/energon_lite/lengths/name/train"
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}
SCENES = [
    *(
        Scene(f"tar, {name}, {lead[:4]} {do.__name__}", make, "shard-1.tar", do, told_by)
        for name, form in FORMATS.items()
        for lead in ("", "long/" * 22)
        for make in [partial(texts, form=form, lead=lead)]
        for do, told_by in ((read, "keys"), (prepare, "none"))
    ),
    Scene("tar, media parts", media, "shard-0.tar", read_media, "keys"),
    Scene(".tar.idx", texts, "shard-1.tar.idx", read),
    Scene(".tar.idx, samples of several parts", media, "shard-0.tar.idx", read_media),
    Scene(".info.json", texts, INFO, read),
    Scene(".info.json: indexed again", texts, INFO, reindex, "none"),
    Scene(".info.yaml", with_info_yaml, f"{META}/.info.yaml", read),
    Scene("split.yaml", with_excludes, SPLIT, read, "none"),
    Scene("dataset.yaml", texts, f"{META}/dataset.yaml", read, "none"),
    Scene("index.sqlite", with_excludes, f"{META}/index.sqlite", read),
    Scene("index.uuid", texts, f"{META}/index.uuid", read),
    Scene("metadataset", blend, "all.yaml", read_blend, "none"),
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
    one, other = (
        slice(start := rng.randrange(max(1, len(raw) // block)) * block, start + block)
        for _ in range(2)
    )
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
        raw[other] = raw[one]
    elif what == "zeros":
        raw[one] = bytes(len(raw[one]))
    elif len(raw[one]) == len(raw[other]):
        raw[one], raw[other] = raw[other], raw[one]
    return bytes(raw), f"{what} at byte {at if block > 8 else one.start} of {len(data)}"


# --------------------------------------------------------------------------------------- outcomes

CLEAR = (DatasetFormatError, DecodingError, StateError, FileNotFoundError, FatalSampleError)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what is logged as a warning or worse."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("energon_lite")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


@contextmanager
def guarded() -> Iterator[None]:
    """Ends what takes too long, or too much memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SEC)
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
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
    except Hang:
        return "HANG", ""
    except MemoryError:
        return "MEMORY", traceback.format_exc()
    except Exception as error:
        kind = "error" if is_clear(error, folder) else "UNCLEAR"
        return kind, "".join(traceback.format_exception(error))
    seen.warnings += [text for text in warnings if str(folder) in text]
    for error in seen.errors:
        if not is_clear(error, folder):
            return "UNCLEAR", "".join(traceback.format_exception(error))
    return compared(scene, expected, seen), f"{expected.values}\nbecame\n{seen}"[:5000]


def is_clear(error: BaseException, folder: Path) -> bool:
    """Whether an error is one of ours, or the system's, and names a file."""
    is_named = isinstance(error, StateError) or str(folder) in describe(error)
    return isinstance(error, CLEAR) and is_named


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
        is_blind = not any(name.endswith((".png", ".npz", ".txt.gz")) for name in changed)
        if changed and is_blind and len(lost) <= len(seen.errors):
            return "content"
    if changed or len({name.partition(".")[0] for name in lost}) > len(seen.errors):
        return "SILENT"
    return "skipped"


@cache
def _made(folder: Path, make: Any) -> Path:
    made = folder / f"{len(list(folder.glob('*')))}" / "set"
    make(made)
    return made


@cache
def _expected(folder: Path, number: int) -> Seen:
    made = _made(folder, SCENES[number].make)
    return SCENES[number].do(shutil.copytree(made, folder / "copies" / str(number) / "set"))


def try_one(folder: Path, number: int, seed: str) -> tuple[str, str]:
    """Tries a scene with the damage of a seed; datasets are made once, in `folder`."""
    made, expected = _made(folder, SCENES[number].make), _expected(folder, number)
    return outcome_of(SCENES[number], made, expected, seed, folder / "work")
