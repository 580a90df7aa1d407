"""Describes saved states of loaders, of the files that a trainer keeps them in.

Nothing is unpickled but tensors and plain values.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from energon_lite.core.errors import StateError
from energon_lite.core.state import FORMAT, STATE_KEY, VERSION, checksum
from energon_lite.extras.inspect.text import checkpoint_text
from energon_lite.extras.prepare.choose_shards import files_below
from energon_lite.extras.view.words import counted
from energon_lite.loader.resume import counts_in, decompressed, states_of
from energon_lite.storage import files

_MARK = re.escape(FORMAT.encode())
_UP_TO_ZIP_END = re.compile(_MARK + rb".*?PK\x05\x06.{18}", re.DOTALL)
_LARGEST_STATE_BYTES = 64 << 20
_SAVE = (
    "Save `loader.save_state_rank()` of each rank, or `loader.state_dict()`, as JSON or in the "
    "checkpoint of the trainer"
)
# Files of tensors alone, and how files with states begin: JSON, zip, pickle.
_NO_STATES, _BEGINNINGS = (".safetensors",), (b"{", b"[", b"PK", b"\x80")
_MAX_DEPTH = 8  # of a state in what a trainer saves

Progress = Callable[[str, int, int], None] | None


class Checkpoint(NamedTuple):
    """The states of a run at one step, as far as files have them.

    Attributes:
        path: their file, or the folder that has all of them.
        files: the files.
        states: as they were saved.
        unread: of a folder, what is wrong with files that seem to hold states.
    """

    path: Path
    files: list[Path]
    states: list[dict[str, Any]]
    unread: list[str]

    @property
    def place(self) -> tuple[int, ...]:
        """The place of the run: its pass, and slots of the pass; nothing if a state is corrupt."""
        names = ("pass", "base", "count", "world_size")
        rows: list[list[Any]] = [[state.get(name) for name in names] for state in self.states]
        if not all(type(value) is int for row in rows for value in row):
            return ()
        return max((number, base + count * size) for number, base, count, size in rows)


def checkpoint_info(paths: Sequence[Path], progress: Progress = None) -> dict[str, Any]:
    """Describes the states in some files: JSON, or what `torch.save` or DCP wrote.

    Args:
        paths: the files, or folders of them. A state may lie anywhere in them, as in a trainer's
            checkpoint. Of several checkpoints in a folder, the one that is furthest in its run is
            described.
        progress: called with what is done, and how many files are searched, of how many.

    Returns:
        `path` and `files` of the checkpoint, `world_size`, `num_streams`, `states` (of each:
        `file`, `rank`, `count`, ...), `warnings`, and `others`: `path`, `pass`, `slots` and `ranks`
        of the other checkpoints, from the furthest to the first.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: A file or folder holds no state of this library, or a file one of
            Megatron-Energon.
    """
    found = [checkpoints_at(path, progress) for path in paths]
    described = [one for one, *_ in found]
    states = [
        _described(file, state, counts)
        for one in described
        for file, state, counts in zip(one.files, one.states, counts_in(one.states), strict=True)
    ]
    states.sort(key=lambda state: state["rank"])
    worlds = sorted({state["world_size"] for state in states})
    streams = sorted({state["num_streams"] for state in states})
    notes = [f"rank {s['rank']} ({s['file']}): {s['problem']}" for s in states if s["problem"]]
    if len(worlds) > 1 or len(streams) > 1:
        notes.append(f"states of different runs: {worlds} ranks, {streams} streams")
    missing = sorted(set(range(worlds[0])) - {state["rank"] for state in states})
    if missing:
        notes.append(
            f"no state of rank {', '.join(map(str, missing))}: those of all {worlds[0]} ranks are "
            "needed to resume on another number of ranks"
        )
    notes += (f"not read: {text}" for one in described for text in one.unread)
    return {
        "path": ", ".join(str(one.path) for one in described),
        "files": len({file for one in described for file in one.files}),
        "world_size": worlds[0],
        "num_streams": streams[0],
        "states": states,
        "warnings": notes,
        "others": [_short(one) for _, *others in found for one in others],
    }


def _short(one: Checkpoint) -> dict[str, Any]:
    number, slots = one.place or (None, None)
    ranks = sorted({str(state.get("rank")) for state in one.states})
    return {"path": str(one.path), "pass": number, "slots": slots, "ranks": len(ranks)}


def checkpoint_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `checkpoint_info` found, for people."""
    others = report["others"]
    if others:
        yield f"{report['path']}, the furthest of {counted(1 + len(others), 'checkpoint')}"
    yield from checkpoint_text(report)
    if others:
        yield "\nOther checkpoints:"
    for one in others:
        place = "corrupt"
        if one["pass"] is not None:
            place = f"pass {one['pass']}, {one['slots']:,} batches of all ranks"
        yield f"  {one['path']}: {place}, {counted(one['ranks'], 'state')}"


def checkpoints_at(path: Path, progress: Progress = None) -> list[Checkpoint]:
    """Returns the checkpoints in a file or folder, the one that is furthest in its run first.

    Files belong together as long as no two of them have different states of one rank; else each
    folder in the folder is looked at, and so on.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: There is no state in it, or the file cannot be read.
    """
    if not files.is_there(path):
        raise FileNotFoundError(
            f"{path} does not exist. Give a file with a state, or a folder in which a trainer "
            "keeps checkpoints"
        )
    if not files.is_folder(path):
        states = _states_in(path)
        return [Checkpoint(path, [path] * len(states), states, [])]
    names = [path / name for name in sorted(files_below(path))]
    found, unread = [], list[str]()
    for number, file in enumerate(names, 1):
        # Checkpoints are larger than memory, and mapped.
        may_have = file.suffix not in _NO_STATES and files.is_file(file)
        if may_have and re.search(_MARK, raw := files.map_file(file)):
            try:
                found += [(file, state) for state in _states_in(file)]
            except StateError as error:
                # Programs and texts may name the format, too.
                unread += [str(error)] * bytes(raw[:2]).startswith(_BEGINNINGS)
        if progress is not None:
            progress("Searching files", number, len(names))
    if not found:
        if unread:
            raise StateError(unread[0])
        raise StateError(
            f"{path}: none of the {len(names):,} files in it holds a state of a loader. {_SAVE} "
            "(of Hugging Face: Trainer(callbacks=[energon_lite.LoaderCallback()]))"
        )
    groups = [
        Checkpoint(own, [file for file, _ in group], [state for _, state in group], unread)
        for own, group in _grouped(path, found)
    ]
    return sorted(groups, key=lambda one: (one.place, _by_number(one.path)), reverse=True)


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Returns what sorts step-9 before step-10."""
    parts = re.findall(r"(\d+)|(\D+)", str(path))
    return [(int(number or 0), text) for number, text in parts]


def _grouped(
    path: Path, found: list[tuple[Path, dict[str, Any]]]
) -> Iterator[tuple[Path, list[tuple[Path, dict[str, Any]]]]]:
    """Yields files and states that belong together, with the folder or file that has them."""
    of_rank = defaultdict(set)
    for _, state in found:
        of_rank[str(state.get("rank"))].add(state.get("checksum"))
    if all(len(checksums) == 1 for checksums in of_rank.values()) or path == found[0][0]:
        yield path, found
        return
    below = defaultdict(list)
    for file, state in found:
        below[path / file.relative_to(path).parts[0]].append((file, state))
    for own, group in below.items():
        yield from _grouped(own, group)


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
            raise StateError(f"{path}: no valid JSON ({error}); is the file cut?") from None
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
        # The first sentence: others of torch say how to load what runs code.
        first = re.split(r"[.\n]", str(error), maxsplit=1)[0] if raw else "the file is empty"
        raise StateError(
            f"{path}: neither JSON nor a torch file of plain values ({first:.200}). Nothing else "
            "is unpickled. If the file is cut, use another copy; else save the state with json.dump"
        ) from None


def _plain_values(file: Path | io.BytesIO, is_archive: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that others wrote
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


def _described(
    path: Path, state: Mapping[str, Any], counts: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Returns what a user may want to know of the state of one rank, which has these counts."""
    problem, streams = "", None
    if state.get("version") != VERSION:
        problem = f"of version {state.get('version')!r}, and this library reads {VERSION}"
    else:
        streams = decompressed(state.get("streams"), "streams")
        if state.get("checksum") != checksum(state):
            problem = "was edited, or is corrupt: its checksum is another one"
    names = ("rank", "world_size", "num_streams", "pass", "count", "items_in_pass", "failed")
    numbers = {name: state.get(name) for name in names}
    wrong = [name for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong:
        raise StateError(f"{path}: the state's {wrong[0]!r} is {numbers[wrong[0]]!r:.80}")
    if not isinstance(streams, Mapping | None):
        raise StateError(f"{path}: the state's streams are no table")
    return {
        "file": path.name,
        **numbers,
        "ended": bool(state.get("ended")),
        "streams": len(streams or ()),
        "sources": {
            name: {key: row[key] for key in ("samples", "skipped")} for name, row in counts.items()
        },
        "problem": problem,
    }


def states_at(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the states in files or folders, as they were saved.

    Of several checkpoints in a folder it is the one that is furthest; raises as `checkpoint_info`.
    """
    return [state for path in paths for state in checkpoints_at(path)[0].states]
