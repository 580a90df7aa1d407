"""Describes saved states of loaders, of the files that a trainer keeps them in.

Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from energon_lite.core.errors import StateError
from energon_lite.core.state import FORMAT, STATE_KEY, VERSION, checksum, digest
from energon_lite.extras.prepare.choose_shards import files_below
from energon_lite.loader.comparison import Comparison
from energon_lite.loader.resume import decompressed, states_of
from energon_lite.storage import files

_MARK = re.escape(FORMAT.encode())
_UP_TO_ZIP_END = re.compile(_MARK + rb".*?PK\x05\x06.{18}", re.DOTALL)
_LARGEST_STATE_BYTES = 64 << 20
_SAVE = (
    "Save `loader.save_state_rank()` of each rank, or `loader.state_dict()`, as JSON or in the "
    "checkpoint of the trainer"
)
_MAX_DEPTH = 8  # of a state in what a trainer saves
# Numbers of a rank, and texts of differences between a checkpoint and a pipeline, for two states.
_COUNTS = {
    "pass": "pass", "items_in_pass": "batches of the pass", "failed": "failed samples",
    "count": "batches since the topology last changed", "ended": "at the end of the pass",
}  # fmt: skip
_WORDS = {
    "Checkpoint has": "A has", "where this pipeline has": "where B has",
    "not in the checkpoint, here": "not in A, in B",
    "in the checkpoint, not here": "in A, not in B",
}  # fmt: skip


def checkpoint_info(paths: Sequence[Path]) -> dict[str, Any]:
    """Describes the states in some files: JSON, or what `torch.save` or DCP wrote.

    Args:
        paths: the files, or folders of them. A state may lie anywhere in them, as in a trainer's
            checkpoint.

    Returns:
        `files`, `world_size`, `num_streams`, `states` (of each: `file`, `rank`, `count`, ...) and
        `warnings`.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: A file or folder holds no state of this library, or a file one of
            Megatron-Energon.
    """
    paths = [file for path in paths for file in _files_with_states(path)]
    states = [_described(path, state) for path in paths for state in _states_in(path)]
    states.sort(key=lambda state: state["rank"])
    worlds = sorted({state["world_size"] for state in states})
    streams = sorted({state["num_streams"] for state in states})
    warnings = [f"rank {s['rank']} ({s['file']}): {s['problem']}" for s in states if s["problem"]]
    if len(worlds) > 1 or len(streams) > 1:
        warnings.append(f"states of different runs: {worlds} ranks, {streams} streams")
    missing = sorted(set(range(worlds[0])) - {state["rank"] for state in states})
    if missing:
        warnings.append(
            f"no state of rank {', '.join(map(str, missing))}: those of all {worlds[0]} ranks are "
            "needed to resume on another number of ranks"
        )
    return {
        "files": len(paths),
        "world_size": worlds[0],
        "num_streams": streams[0],
        "states": states,
        "warnings": warnings,
    }


def _files_with_states(path: Path) -> list[Path]:
    """Returns the file, or the files below a folder that have the mark of a state."""
    if not files.is_folder(path):
        return [path]
    names = [path / name for name in sorted(files_below(path))]
    # Checkpoints are larger than memory, and mapped.
    found = [
        file for file in names if files.is_file(file) and re.search(_MARK, files.map_file(file))
    ]
    if not found:
        raise StateError(
            f"{path}: none of the {len(names):,} files in it holds a state of a loader. {_SAVE} "
            "(of Hugging Face: Trainer(callbacks=[energon_lite.LoaderCallback()]))"
        )
    return found


def _states_in(path: Path) -> list[dict[str, Any]]:
    found = [state for part in _parts_with_states(_content(path), _MAX_DEPTH) for state in part]
    if not found:
        raise StateError(f"{path}: holds no state of a loader. {_SAVE}")
    return found


def _content(path: Path) -> Any:
    raw = files.map_file(path)
    if raw[:1] in (b"{", b"["):
        try:
            return json.loads(bytes(raw))
        except (ValueError, RecursionError) as error:
            raise StateError(f"{path}: no valid JSON ({error})") from None
    try:
        if path.suffix == ".distcp":
            # DCP stores the leaves of a dict: here the text of the state.
            return [{STATE_KEY: _plain_values(leaf)} for leaf in _archives_with_states(raw)]
        return _plain_values(files.real_path(path), is_archive=raw[:2] == b"PK")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, BadZipFile) as error:
        if re.search(rb"megatron\.energon", raw):
            raise StateError(
                f"{path}: a state of Megatron-Energon, which holds places in its own order of "
                "samples; these have no counterpart here. Train to the end of an epoch with "
                "Energon, or start the data from the beginning (docs/migrating.md)"
            ) from None
        first = str(error).split("\n")[0]
        raise StateError(
            f"{path}: neither JSON nor a torch file of plain values ({first:.200}). Nothing else "
            "is unpickled: save the state with json.dump"
        ) from None


def _plain_values(file: Path | io.BytesIO, is_archive: bool = False) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _archives_with_states(raw: bytes | memoryview) -> Iterator[io.BytesIO]:
    """Yields each torch file with a state in a file of DCP, where such files lie end to end."""
    for found in _UP_TO_ZIP_END.finditer(raw):
        window = raw[max(0, found.start() - _LARGEST_STATE_BYTES) : found.end()]
        with ZipFile(io.BytesIO(window)) as archive:
            start = min(member.header_offset for member in archive.infolist())
        yield io.BytesIO(window[start:])


def _parts_with_states(value: Any, depth: int) -> Iterator[list[dict[str, Any]]]:
    if isinstance(value, Mapping):
        if STATE_KEY in value or value.get("format") == FORMAT:
            yield states_of(value)
            return
        value = list(value.values())
    if isinstance(value, list | tuple) and depth > 0:
        for entry in value:
            yield from _parts_with_states(entry, depth - 1)


def _described(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a user may want to know of the state of one rank."""
    problem = ""
    if state.get("version") != VERSION:
        problem = f"of version {state.get('version')!r}, and this library reads {VERSION}"
    elif state.get("checksum") != checksum(state):
        problem = "was edited, or is corrupt: its checksum is another one"
    names = ("rank", "world_size", "num_streams", "pass", "count", "items_in_pass", "failed")
    numbers = {name: state.get(name) for name in names}
    wrong = [name for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong:
        raise StateError(f"{path}: the state's {wrong[0]!r} is {numbers[wrong[0]]!r:.80}")
    tables = {name: decompressed(state.get(name), name) for name in ("streams", "stats")}
    if not all(isinstance(table, Mapping) for table in tables.values()):
        raise StateError(f"{path}: the state's streams or statistics are no table")
    return {
        "file": path.name,
        **numbers,
        "ended": bool(state.get("ended")),
        "streams": len(tables["streams"]),
        "sources": {
            str(name): {key: row.get(key) for key in ("samples", "skipped")}
            for name, row in tables["stats"].items()
            if isinstance(row, Mapping)
        },
        "problem": problem,
    }


def states_at(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the states in files or folders, as they were saved; raises as `checkpoint_info`."""
    return [
        state for path in paths for file in _files_with_states(path) for state in _states_in(file)
    ]


def checkpoint_diff(first: Path, second: Path) -> dict[str, Any]:
    """Compares two checkpoints; the times that were measured are left aside.

    Args:
        first: a file or folder with the states of a run, here A.
        second: another one, here B.

    Returns:
        `a` and `b` (the paths), `settings` (texts), `places` and `counts`, which list what differs
        as `what`, `a` and `b`; None is for a value that is not there.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: One holds no state, an invalid one, or states of several runs.
    """
    (old_config, *old), (new_config, *new) = map(_run_contents, (first, second))
    found = Comparison(old_config, new_config)
    settings = [*found.edits, *found.forms, *found.others]
    for phrase, words in _WORDS.items():
        settings = [line.replace(phrase, words) for line in settings]
    places, counts = (
        [
            {"what": what, "a": a.get(what), "b": b.get(what)}
            for what in dict.fromkeys((*a, *b))
            if a.get(what) != b.get(what)
        ]
        for a, b in zip(old, new, strict=True)
    )
    return {
        "a": str(first), "b": str(second), "settings": settings, "places": places, "counts": counts,
    }  # fmt: skip


def _run_contents(path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Returns the configuration of a run, the places of its streams, and its counts."""
    states: dict[Any, dict[str, Any]] = {}
    counts: dict[str, Any] = {}
    streams: dict[str, Any] = {}
    for state in states_at([path]):
        other = states.setdefault(state.get("rank"), state)
        if other.get("checksum") != state.get("checksum"):
            raise StateError(
                f"{path}: has several states of rank {state['rank']}; name one of them"
            )
    for state in states.values():
        row = _described(path, state)
        if row["problem"]:
            raise StateError(f"{path}: the state of rank {row['rank']} {row['problem']}")
        counts |= {"ranks": row["world_size"], "streams": row["num_streams"]}
        counts |= {f"rank {row['rank']}: {words}": row[name] for name, words in _COUNTS.items()}
        for name, own in row["sources"].items():
            for key, number in filter(all, own.items()):
                what = f"source {name}: {key}"
                counts[what] = counts.get(what, 0) + number
        for index, snapshot in decompressed(state["streams"], "streams").items():
            if index not in streams or snapshot["items"] > streams[index]["items"]:
                streams[index] = snapshot  # of ranks that run one stream, the one that is ahead
    configs = (decompressed(state.get("config"), "config") for state in states.values())
    return next(filter(None, configs), None), _stream_places(streams), counts


def _stream_places(streams: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how far each source is in all streams together, and what else streams stand at."""
    places: dict[str, Any] = {}
    for index, snapshot in sorted(streams.items(), key=lambda pair: int(pair[0])):
        places[f"stream {index}: batches"] = snapshot["items"]
        for name, position in _positions(snapshot):
            what = f"source {name}: samples drawn"
            places[what] = places.get(what, 0) + position
    places["digest of all that streams save, buffers too"] = digest(dict(streams))[:8]
    return places


def _positions(snapshot: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    if snapshot.get("stage") == "source":
        yield snapshot["name"], snapshot["position"]
    inner = snapshot.get("inner") or ()
    for below in inner.values() if isinstance(inner, Mapping) else inner:
        yield from _positions(below)
