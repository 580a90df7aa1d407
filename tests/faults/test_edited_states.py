"""States edited by hand, with the checksum made again: refused, or resumed to data that exists."""

from __future__ import annotations

import copy
import gc
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import SavableDataset, WorkerConfig
from energon_lite.core.dataset import StreamRun
from energon_lite.core.errors import StateError
from energon_lite.core.state import STATE_KEY, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.loader.loader import get_savable_loader

from ..conftest import examples
from ..helpers import Ranks, signed, through_json, train, validation
from ..laws.test_laws import CASES, indexed_texts
from .test_signal_handlers import handling

# Generous: a hang lasts for ever.
DEADLINE_SEC = 60
ODD = [
    None, True, -1, 0, 1, 7, 1.5, 10**6, 10**12, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -(2**63),
    "x", "", "9" * 5000, [], [[]], {}, [1, 2], 1e308, float("nan"), float("inf"), "MISSING",
]  # fmt: skip
ALL_CASES = [case for cases in CASES.values() for case in cases]


@contextmanager
def deadline() -> Iterator[None]:
    def hang(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"hangs in {frame}")

    with handling(signal.SIGALRM, hang):
        signal.alarm(DEADLINE_SEC)
        yield


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values of plain JSON; of long lists, to the first ones."""
    keys = value if isinstance(value, dict) else range(min(len(value), 4))
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], (dict, list)):
            yield from places(value[key], (*path, key))


def edited(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at one place, or none."""
    changed = copy.copy(value)
    if len(path) > 1:
        changed[path[0]] = edited(value[path[0]], path[1:], new)
    elif new == "MISSING":
        del changed[path[0]]
    else:
        changed[path[0]] = new
    return changed


def drawn_edit(value: Any, draw: Callable[[Any], Any]) -> Any:
    return edited(value, draw(st.sampled_from(list(places(value)))), draw(st.sampled_from(ODD)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return indexed_texts(tmp_path_factory.mktemp("edited"))


@pytest.fixture(scope="module")
def datasets(texts: Path) -> Callable[[int], SavableDataset[Any]]:
    """The datasets of the laws, each made once."""
    return cache(lambda number: ALL_CASES[number](texts))


@examples(40)
@given(st.integers(0, len(ALL_CASES) - 1), st.integers(0, 6), st.data())
def test_an_edited_stream_is_refused_or_resumes(
    datasets: Callable[[int], SavableDataset[Any]], case: int, given: int, data: st.DataObject
) -> None:
    dataset, stream = datasets(case), Stream(1, 2)
    run = StreamRun(dataset, stream, max_skip_rate=1.0)
    list(islice(run, given))
    state = drawn_edit(through_json(run.snapshot().to_json()), data.draw)
    fresh = StreamRun(dataset, stream, max_skip_rate=1.0)
    with deadline():
        try:
            fresh.restore(Snapshot.from_json(through_json(state)))
            list(islice(fresh, 3))
        except StateError as error:
            assert len(str(error)) > 20  # noqa: PT017


RUNS = {
    "endless": lambda root: train(root, "skipping"),
    "finite": lambda root: train(root, "expanding", repeat=False),
    "validation": lambda root: validation(root),
}


def loader_of(texts: Path, kind: str = "endless", world_size: int = 1) -> Any:
    config = WorkerConfig(rank=0, world_size=world_size, num_workers=0)
    return get_savable_loader(RUNS[kind](texts)(config), max_skip_rate=1)


@pytest.fixture(scope="module")
def saved(texts: Path) -> dict[str, list[dict[str, Any]]]:
    """The states of two ranks of each kind of run."""
    found = {}
    for name, make in RUNS.items():
        run = Ranks(make(texts), 2, num_streams=4)
        run.steps(2)
        found[name] = run.save()
    return found


@examples(80)
@given(st.sampled_from(list(RUNS)), st.sampled_from([1, 2, 3]), st.data())
def test_an_edited_state_of_the_loader_is_refused_or_resumes(
    texts: Path, saved: dict[str, list[dict[str, Any]]], kind: str, world: int, data: st.DataObject
) -> None:
    states = saved[kind]
    path = data.draw(st.sampled_from([p for p in places(states[0]) if p[0] != "config"]))
    new = data.draw(st.sampled_from(ODD))
    both = data.draw(st.booleans())  # as somebody would who edits all files
    broken = [edited(s, path, new) if _has(s, path) and (both or not i) else s
              for i, s in enumerate(states)]  # fmt: skip
    with suppress(KeyError, TypeError):
        broken = [signed(state) for state in broken]
    loader = loader_of(texts, kind, world)
    with deadline():
        try:
            loader.restore_state_global(broken)
            batches = list(islice(loader, 3))
            loader.save_state_rank()
            loader.stats()
        except StateError as error:
            assert len(str(error)) > 20  # noqa: PT017
        else:
            assert all(batches)


def _has(state: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        if not (key in state if isinstance(state, dict) else key < len(state)):
            return False
        state = state[key]
    return True


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("num_streams",), 10**12), (("world_size",), 10**12), (("base",), 10**30),
        (("base",), 10**15), (("count",), 10**30), (("count",), 10**15), (("pass",), 10**30),
        (("items_in_pass",), 10**30), (("num_steps",), 10**30),
        (("emitted",), [{"base": 0, "counts": [-1, -1]}]),
        (("emitted",), [{"base": 0, "counts": [10**15, 10**15]}]),
        (("streams", "0", "items"), 10**30), (("streams", "0", "items"), 10**15),
        (("streams", "0", "inner", 0, "position"), 10**30),
        (("streams", "9" * 5000), {}), (("stats", "scales", 2), 10**400),
        (("stats", "scales", 1), 10**30),
    ],
)  # fmt: skip
def test_a_forged_number_is_refused_at_once(
    texts: Path, saved: dict[str, list[dict[str, Any]]], path: tuple[Any, ...], value: Any
) -> None:
    broken = [signed(edited(state, path, value)) if _has(state, path[:-1]) else state
              for state in saved["endless"]]  # fmt: skip
    loader = loader_of(texts)
    gc.collect()
    tracemalloc.start()
    with deadline(), pytest.raises(StateError):
        loader.restore_state_global(broken)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"ranks": ' + "[" * 900 + "]" * 900 + "}", "9" * 5000, "NaN", "{}", "[]", "",
     '{"config": {}, "ranks": [1]}', '{"config": {}, "ranks": 1}', 5, None, b"{}", ["{}"]],
)  # fmt: skip
def test_text_that_is_no_state_is_refused(texts: Path, text: Any) -> None:
    with pytest.raises(StateError, match="loader_state"):
        loader_of(texts).load_state_dict({STATE_KEY: text})


def test_a_deeply_nested_dict_is_refused(
    texts: Path, saved: dict[str, list[dict[str, Any]]]
) -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    states = [{**state, "streams": {"0": deep}} for state in saved["endless"]]
    with pytest.raises(StateError):
        loader_of(texts).restore_state_global(states)
