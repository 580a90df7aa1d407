"""The six laws, and that nothing is random: one function for each."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.keys import leaves
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.extras.testing.reference_run import END, LawError, ReferenceRun, global_seeds

# What one buffered sample may cost in a state, and how long a restore key may be.
_BYTES_PER_KEY = 256
_LONGEST_KEY = 16
# A finite pass is run to its end up to here, to count its samples.
_LONGEST_PASS = 100_000
# States that a stream refuses between two items; starting the stream over takes most of the time.
_REFUSALS_PER_ITEM = 4


def check_dataset(
    dataset: SavableDataset[Any],
    *,
    num_streams: Sequence[int] = (1, 3),
    max_items: int = 40,
    picklable: bool = True,
) -> None:
    """Checks the laws of datasets (docs/architecture.md) on the first items of every stream.

    *Resume*: restored at any place, a stream returns exactly the rest. *Independence*: cursors
    do not disturb each other or the dataset. *Partition*: a finite pass has each sample once.
    *Replay*: a restore key makes its item again. *Plain state*: short JSON. *Refusal*: a state that
    does not fit is refused and changes nothing. *Not random*: the user's own state of the global
    generators has no part, and stays as it is. Hooks that are not `@stateless` may draw from them.

    Args:
        dataset: small, so that it ends (or starts an epoch) within `max_items`; it must give at
            least one item.
        num_streams: numbers of streams to check; all streams of each are run.
        max_items: items of each stream after which its state is saved and restored; the time
            grows with the square of it.
        picklable: whether a pickled copy must give the same; False for hooks defined in a
            function, which worker processes of start method "fork" can do with.

    Raises:
        LawError: A law is broken.
        ValueError: No stream has an item, so that there is nothing to check.
    """
    config, pickled = copy.deepcopy(dataset.config()), b""
    if picklable:
        pickled = _pickled(dataset, "before iterating")
    for number in num_streams:
        refs = [ReferenceRun(dataset, Stream(i, number), max_items) for i in range(number)]
        if not any(ref.entries for ref in refs):
            raise ValueError(f"{refs[0].name} has no item; check_dataset needs at least one")
        for ref in refs:
            snapshots = _check_resume(ref)
            _check_plain_states(ref, snapshots)
            _check_refusal(ref, snapshots[len(ref.entries) // 2])
        _check_partition(refs)
        for ref in refs:
            _check_replay(ref)
            _check_not_random(ref)
        _check_independence(refs)
        _check_unchanged(refs, config, pickled)


def _check_resume(ref: ReferenceRun) -> list[Snapshot]:
    """Returns the places after 0, 1, 2, ... items; the last may be after the end."""
    law = "Resume"
    snapshots, states = [], []
    run = ref.run()
    for i in range(len(ref.entries) + 1 + ref.has_ended):
        with ref.during(law, f"saving after {i} items"):
            snapshots.append(run.snapshot())
            states.append(_text(snapshots[-1]))
            if run.snapshot() != snapshots[-1]:
                raise ref.error(law, f"after {i} items", "saving twice returns different states")
        ref.expect(law, f"saving after {i} items", run, i, i + 1 if i < len(ref.entries) else None)
    for k, state in enumerate(states):
        at = min(k, len(ref.entries))
        where = f"restored after {at} items" + (" and the end" if k > at else "")
        with ref.during(law, where):
            run = ref.restored(state)
            if (saved := _text(run.snapshot())) != state:
                raise ref.error(law, where, f"restored {state} and saves {saved}")
        ref.expect(law, where, run, at)
        # A chain of three: restored, one item, saved, restored, two items, saved, restored.
        chained, place = state, at
        for step in (1, 2):
            stop = min(place + step, len(ref.entries))
            with ref.during(law, f"{where}, then after {stop}"):
                run = ref.restored(chained)
                ref.expect(law, where, run, place, stop)
                chained, place = _text(run.snapshot()), stop
        with ref.during(law, f"{where}, then after {place}"):
            ref.expect(law, f"{where}, then after {place}", ref.restored(chained), place)
    for i, (snapshot, state) in enumerate(zip(snapshots, states, strict=True)):
        ref.compare(law, f"after {i} items", state, _text(snapshot), "what was saved has changed")
    return snapshots


def _check_independence(refs: list[ReferenceRun]) -> None:
    law = "Independence"
    # Two cursors of every stream, side by side, each a step behind the one before it.
    runs = [(ref, ref.run()) for ref in refs for _ in range(2)]
    longest = max(len(ref.entries) for ref in refs)
    for step in range(longest + len(runs)):
        for lag, (ref, run) in enumerate(runs):
            i = step - lag
            if 0 <= i < len(ref.entries):
                ref.expect(law, "beside other cursors", run, i, i + 1)


def _check_unchanged(refs: list[ReferenceRun], config: dict[str, JSON], pickled: bytes) -> None:
    law, dataset = "Independence", refs[0].dataset
    where = "after iterating"
    refs[0].compare(law, where, config, dataset.config(), "config() has changed at")
    if not pickled:
        return
    after = _pickled(dataset, where)
    # Equal objects may have different pickles, which depend on what is shared.
    if after != pickled:
        old, new = pickle.loads(pickled), pickle.loads(after)
        refs[0].compare(law, where, old, new, "the dataset has changed at")
    for ref in refs:
        ref.expect(law, "a pickled copy", ref.run(pickle.loads(pickled)), 0)


def _pickled(dataset: SavableDataset[Any], when: str) -> bytes:
    try:
        return pickle.dumps(dataset)
    except Exception as error:
        raise LawError(
            f"Independence: {type(dataset).__name__} cannot be pickled {when}: "
            f"{type(error).__name__}: {error}. Worker processes need it; hooks and classes must "
            "be found by name. Give picklable=False if you only ever fork."
        ) from error


def _check_partition(refs: list[ReferenceRun]) -> None:
    law = "Partition"
    first = refs[0]
    streams: dict[Any, int] = {}
    owners: dict[Any, tuple[int, Any]] = {}
    is_complete = not first.dataset.endless
    for ref in refs:
        stream = ref.stream.index
        drawn = ((entry.key, True) for entry in ref.entries)
        keys = drawn if ref.dataset.endless else _pass_keys(ref)
        for i, (key, is_item) in enumerate(keys):
            is_complete = is_complete and i < _LONGEST_PASS
            for atom in _atoms(key) if is_item else ():
                if atom in streams:
                    where = f"key {i}"
                    raise ref.error(law, where, f"{atom} came in stream {streams[atom]} before")
                streams[atom] = stream
            for leaf in leaves(key):
                # Parts of a long sample may be dealt to several streams; it was drawn once.
                owner = owners.setdefault(leaf[:-1], (stream, leaf[-1:]))
                if owner[1] != leaf[-1:]:
                    raise ref.error(
                        law, f"key {i}", f"{leaf} was drawn as {owner[1]} in stream {owner[0]} too"
                    )
    if is_complete and first.dataset.traits.each_once:
        sources = list(_leaves_below(first.dataset))
        expected = sum(s.num_items(ref.stream) for ref in refs for s in sources)
        may_drop = first.dataset.traits.drops
        if len(owners) > expected or (len(owners) < expected and not may_drop):
            raise first.error(
                law, "all streams",
                f"{len(owners)} samples were returned or counted as skipped, of {expected}",
            )  # fmt: skip


def _pass_keys(ref: ReferenceRun) -> Iterator[tuple[RestoreKey, bool]]:
    """Yields the keys of all items of a pass (True) and of all that was skipped (False)."""
    run = ref.run()
    for item in chain(run, [END]):
        if item is not END:
            yield run.key, True
        for record in run.context.take_records():
            yield record.restore_key, False


def _atoms(key: RestoreKey) -> Iterator[RestoreKey]:
    """Splits the key of a batch into those of its samples; keys of expanded items stay whole."""
    nested = [entry for entry in key if isinstance(entry, tuple)]
    if len(nested) > 1 or (nested and key[0] == "batch" and nested[0][0] != "batch"):
        yield from chain.from_iterable(map(_atoms, nested))
    else:
        yield key


def _leaves_below(dataset: SavableDataset[Any]) -> Iterator[SavableDataset[Any]]:
    """Yields the datasets at the bottom."""
    if not dataset.children:
        yield dataset
    for child in dataset.children:
        yield from _leaves_below(child)


def _check_replay(ref: ReferenceRun) -> None:
    law = "Replay"
    if not ref.dataset.can_restore_sample():
        return
    run = ref.run()
    with global_seeds(7):
        # Backwards, and in the middle of a running stream.
        for i in reversed(range(len(ref.entries))):
            key, item = ref.entries[i]
            with ref.during(law, f"item {i}, key {key}"):
                again = ref.dataset.restore_sample(key)
                ref.compare(law, f"item {i}, key {key}", item, again)
            forth = len(ref.entries) - 1 - i
            ref.expect(law, "iterated between replays", run, forth, forth + 1)
    try:
        ref.dataset.restore_sample(("no such stage", -1))
    except ValueError:
        return
    except Exception as error:
        what = f"raises {type(error).__name__}, not ValueError"
        raise ref.error(law, "a key of another dataset", what) from error
    raise ref.error(law, "a key of another dataset", "is not refused")


def _check_plain_states(ref: ReferenceRun, snapshots: list[Snapshot]) -> None:
    law = "Plain state"
    for i, snapshot in enumerate(snapshots):
        where, value = f"after {i} items", snapshot.to_json()
        plain = json.loads(json.dumps(value))
        ref.compare(law, where, value, plain, "the state is not JSON-serialisable:")
        with ref.during(law, f"pickling the snapshot {where}"):
            if pickle.loads(pickle.dumps(snapshot)) != snapshot:
                raise ref.error(law, where, "a pickled snapshot is another")
        num_keys, longest = _buffered_keys(value)
        if longest > _LONGEST_KEY:
            what = f"the state has a list of {longest} values; only restore keys may be buffered"
            raise ref.error(law, where, what)
        text = _text(snapshot)
        if len(text) > len(_text(snapshots[0])) + _BYTES_PER_KEY * (1 + num_keys):
            what = f"the state has {len(text)} bytes for {num_keys} buffered keys: {text}"
            raise ref.error(law, where, what)


def _buffered_keys(value: Any) -> tuple[int, int]:
    """Counts the lists of a state that have no list inside, and the entries of the longest."""
    entries = value.values() if isinstance(value, dict) else value
    inner = [_buffered_keys(entry) for entry in entries if isinstance(entry, (list, dict))]
    if isinstance(value, list) and not inner:
        return 1, len(value)
    return sum(number for number, _ in inner), max((longest for _, longest in inner), default=0)


def _check_refusal(ref: ReferenceRun, middle: Snapshot) -> None:
    law, num_items = "Refusal", len(ref.entries)
    run, place, before = None, 0, ""
    for number, (where, broken) in enumerate(_broken_states(json.loads(_text(middle)))):
        if run is None:
            run, place = ref.run(), min(2, num_items)
            ref.expect(law, "before", run, 0, place)
            before = _text(run.snapshot())
        try:
            run.restore(Snapshot.from_json(broken))
        except StateError:
            pass
        except Exception as error:
            what = f"raises {type(error).__name__}, not StateError: {error}"
            raise ref.error(law, where, what) from error
        else:
            # Fields that the state does not need may be missing: then nothing else comes.
            if not where.startswith("without"):
                raise ref.error(law, where, f"is restored: {json.dumps(broken)}")
            ref.expect(law, where, run, num_items // 2)
            run = None
            continue
        if _text(run.snapshot()) != before:
            raise ref.error(law, where, "is refused, but changes the state")
        if number % _REFUSALS_PER_ITEM == 0:
            stop = min(place + 1, num_items)
            ref.expect(law, f"{where}, refused; afterwards", run, place, stop)
            place, before = stop, _text(run.snapshot())
            if place == num_items:
                run = None


def _broken_states(state: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields states that differ from a good one by one thing, each with a name."""
    here = f"{path}{state['stage']}"
    yield f"with {here} as another stage", {**state, "stage": "no such stage"}
    for name in state:
        if name not in ("stage", "generators"):  # no hook may have drawn yet
            yield f"without {here}.{name}", {k: v for k, v in state.items() if k != name}
        if name not in ("stage", "inner"):
            for garbage in ("garbage", None, -1.5, {"no": "value"}):
                yield f"with {here}.{name}={garbage!r}", {**state, name: garbage}
    inner = state.get("inner", [])
    by_name = inner if isinstance(inner, dict) else dict(enumerate(inner))
    more = {**by_name, "one more": {"stage": "no such stage"}}
    for where, changed in [(f"with one more below {here}", more)] + [
        (where, {**by_name, name: broken})
        for name, entry in by_name.items()
        for where, broken in _broken_states(entry, f"{here}/")
    ]:
        below = changed if isinstance(inner, dict) else list(changed.values())
        yield where, {**state, "inner": below}


def _check_not_random(ref: ReferenceRun) -> None:
    law = "Not random"
    for seed in (1, 2):
        with global_seeds(seed) as read:
            before = read()
            ref.expect(law, f"with global generators seeded {seed}", ref.run(), 0)
            for name, old, new in zip(("torch", "numpy", "random"), before, read(), strict=True):
                what = f"the state of {name}'s global generator has changed at"
                ref.compare(law, "after iterating", old, new, what)


def _text(snapshot: Snapshot) -> str:
    return json.dumps(snapshot.to_json())
