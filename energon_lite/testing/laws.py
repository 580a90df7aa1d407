"""The six laws, and that nothing is random: one function for each."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from energon_lite.core.compare import first_difference
from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import StateError
from energon_lite.core.keys import leaves
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.topology import Stream
from energon_lite.testing.trial import END, LawError, Trial, global_seeds

# What one held-back sample may cost in a state, and how long a restore key may be.
_BYTES_PER_KEY = 256
_LONGEST_KEY = 16
# A finite pass is run to its end up to here, to count its samples.
_LONGEST_PASS = 100_000


def check_dataset(
    dataset: SavableDataset[Any],
    *,
    num_streams: Sequence[int] = (1, 3),
    max_items: int = 40,
    picklable: bool = True,
) -> None:
    """Checks the laws of datasets (docs/architecture.md) on the first items of every stream.

    *Resume*: restored at any place, a stream goes on with exactly the rest. *Independence*: cursors
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
        ValueError: No stream gives an item, so that there is nothing to check.
    """
    config, pickled = copy.deepcopy(dataset.config()), b""
    if picklable:
        pickled = _pickled(dataset, "before iterating")
    for number in num_streams:
        trials = [Trial(dataset, Stream(i, number), max_items) for i in range(number)]
        if not any(trial.entries for trial in trials):
            raise ValueError(f"{trials[0].name} gives no item; check_dataset needs at least one")
        for trial in trials:
            states = _check_resume(trial)
            _check_plain_states(trial, states)
            _check_refusal(trial, states)
        _check_partition(trials)
        for trial in trials:
            _check_replay(trial)
            _check_not_random(trial)
        _check_independence(trials)
        _check_unchanged(trials, config, pickled)


def _check_resume(trial: Trial) -> list[str]:
    """Returns the states after 0, 1, 2, ... items, as JSON text; the last may be after the end."""
    law = "Resume"
    states = []
    run = trial.run()
    for i in range(len(trial.entries) + 1):
        with trial.during(law, f"saving after {i} items"):
            states.append(_text(run.snapshot()))
            if _text(run.snapshot()) != states[-1]:
                raise trial.error(law, f"after {i} items", "saving twice gives different states")
        if i < len(trial.entries):
            trial.expect(law, f"saving after {i} items", run, i, i + 1)
    if trial.has_ended:
        trial.expect(law, "while saving", run, len(trial.entries))
        states.append(_text(run.snapshot()))
    for k, state in enumerate(states):
        at = min(k, len(trial.entries))
        where = f"restored after {at} items" + (" and the end" if k > at else "")
        with trial.during(law, where):
            run = trial.restored(state)
            if (saved := _text(run.snapshot())) != state:
                raise trial.error(law, where, f"restored {state} and saves {saved}")
        trial.expect(law, where, run, at)
        # A chain of three: restored, one item, saved, restored, two items, saved, restored.
        chained, place = state, at
        for step in (1, 2):
            stop = min(place + step, len(trial.entries))
            with trial.during(law, f"{where}, then after {stop}"):
                run = trial.restored(chained)
                trial.expect(law, where, run, place, stop)
                chained, place = _text(run.snapshot()), stop
        with trial.during(law, f"{where}, then after {place}"):
            trial.expect(law, f"{where}, then after {place}", trial.restored(chained), place)
    return states


def _check_independence(trials: list[Trial]) -> None:
    law = "Independence"
    # Two cursors of every stream, side by side, each a step behind the one before it.
    runs = [(trial, trial.run()) for trial in trials for _ in range(2)]
    longest = max(len(trial.entries) for trial in trials)
    for step in range(longest + len(runs)):
        for lag, (trial, run) in enumerate(runs):
            i = step - lag
            if 0 <= i < len(trial.entries):
                trial.expect(law, "beside other cursors", run, i, i + 1)


def _check_unchanged(trials: list[Trial], config: dict[str, JSON], pickled: bytes) -> None:
    law, dataset = "Independence", trials[0].dataset
    difference = first_difference(config, dataset.config())
    if difference:
        raise trials[0].error(law, "after iterating", f"config() has changed at {difference}")
    if not pickled:
        return
    after = _pickled(dataset, "after iterating")
    # Equal objects may have different pickles, which depend on what is shared.
    if after != pickled:
        difference = first_difference(pickle.loads(pickled), pickle.loads(after))
        if difference:
            what = f"the dataset has changed at {difference}"
            raise trials[0].error(law, "after iterating", what)
    for trial in trials:
        trial.expect(law, "a pickled copy", trial.run(pickle.loads(pickled)), 0)


def _pickled(dataset: SavableDataset[Any], when: str) -> bytes:
    try:
        return pickle.dumps(dataset)
    except Exception as error:
        raise LawError(
            f"Independence: {type(dataset).__name__} cannot be pickled {when}: "
            f"{type(error).__name__}: {error}. Worker processes need it; hooks and classes must "
            "be found by name. Give picklable=False if you only ever fork."
        ) from error


def _check_partition(trials: list[Trial]) -> None:
    law = "Partition"
    first = trials[0]
    given: dict[Any, int] = {}
    owners: dict[Any, tuple[int, Any]] = {}
    is_complete = not first.dataset.endless
    for trial in trials:
        stream = trial.stream.index
        keys: Iterator[tuple[RestoreKey, bool]]
        keys = ((entry.key, True) for entry in trial.entries)
        if not trial.dataset.endless:
            keys = _pass_keys(trial)
        for i, (key, is_item) in enumerate(keys):
            is_complete = is_complete and i < _LONGEST_PASS
            for atom in _atoms(key) if is_item else ():
                if atom in given:
                    where = f"key {i}"
                    raise trial.error(law, where, f"{atom} came in stream {given[atom]} before")
                given[atom] = stream
            for leaf in leaves(key):
                # Parts of a long sample may be dealt to several streams; it was drawn once.
                owner = owners.setdefault(leaf[:-1], (stream, leaf[-1:]))
                if owner[1] != leaf[-1:]:
                    raise trial.error(
                        law, f"key {i}", f"{leaf} was drawn as {owner[1]} in stream {owner[0]} too"
                    )
    if is_complete and first.dataset.traits.each_once:
        sources = list(_leaves_below(first.dataset))
        expected = sum(s.num_items(trial.stream) for trial in trials for s in sources)
        may_drop = first.dataset.traits.drops
        if len(owners) > expected or (len(owners) < expected and not may_drop):
            raise first.error(
                law, "all streams",
                f"{len(owners)} samples were given or counted as skipped, of {expected}",
            )  # fmt: skip


def _pass_keys(trial: Trial) -> Iterator[tuple[RestoreKey, bool]]:
    """Yields the keys of all items of a pass (True) and of all that was skipped (False)."""
    run = trial.run()
    has_ended = False
    while not has_ended:
        has_ended = next(run, END) is END
        if not has_ended:
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


def _check_replay(trial: Trial) -> None:
    law = "Replay"
    if not trial.dataset.can_restore_sample():
        return
    run = trial.run()
    with global_seeds(7):
        # Backwards, and in the middle of a running stream.
        for i in reversed(range(len(trial.entries))):
            key, item = trial.entries[i]
            with trial.during(law, f"item {i}, key {key}"):
                again = trial.dataset.restore_sample(key)
                difference = first_difference(item, again)
                if difference:
                    raise trial.error(law, f"item {i}, key {key}", f"differs at {difference}")
            forth = len(trial.entries) - 1 - i
            trial.expect(law, "iterated between replays", run, forth, forth + 1)
    try:
        trial.dataset.restore_sample(("no such stage", -1))
    except ValueError:
        return
    except Exception as error:
        what = f"raises {type(error).__name__}, not ValueError"
        raise trial.error(law, "a key of another dataset", what) from error
    raise trial.error(law, "a key of another dataset", "is not refused")


def _check_plain_states(trial: Trial, states: list[str]) -> None:
    law = "Plain state"
    run = trial.run()
    for i in range(len(trial.entries) + 1):
        snapshot = run.snapshot()
        value = snapshot.to_json()
        difference = first_difference(value, json.loads(json.dumps(value)))
        if difference:
            raise trial.error(law, f"after {i} items", f"the state is not plain JSON: {difference}")
        with trial.during(law, f"pickling the snapshot after {i} items"):
            if pickle.loads(pickle.dumps(snapshot)) != snapshot:
                raise trial.error(law, f"after {i} items", "a pickled snapshot is another")
        num_keys, longest = _held_keys(value)
        if longest > _LONGEST_KEY:
            what = f"the state has a list of {longest} values; only restore keys may be held"
            raise trial.error(law, f"after {i} items", what)
        limit = len(states[0]) + _BYTES_PER_KEY * (1 + num_keys)
        if len(states[i]) > limit:
            what = f"the state has {len(states[i])} bytes for {num_keys} held keys: {states[i]}"
            raise trial.error(law, f"after {i} items", what)
        if i < len(trial.entries):
            next(run)


def _held_keys(value: JSON) -> tuple[int, int]:
    """Counts the lists of a state that have no list inside, and the entries of the longest."""
    if isinstance(value, dict):
        inner = [_held_keys(entry) for entry in value.values()]
    elif isinstance(value, list):
        inner = [_held_keys(entry) for entry in value if isinstance(entry, (list, dict))]
        if not inner:
            return 1, len(value)
    else:
        inner = []
    return sum(number for number, _ in inner), max((longest for _, longest in inner), default=0)


def _check_refusal(trial: Trial, states: list[str]) -> None:
    law = "Refusal"
    start = min(2, len(trial.entries))
    middle = json.loads(states[len(trial.entries) // 2])
    for where, broken in _broken_states(middle):
        run = trial.run()
        trial.expect(law, "before", run, 0, start)
        try:
            run.restore(Snapshot.from_json(broken))
        except StateError:
            pass
        except Exception as error:
            what = f"raises {type(error).__name__}, not StateError: {error}"
            raise trial.error(law, where, what) from error
        else:
            # What the state does not need may be missing: then nothing else comes.
            if not where.startswith("without"):
                raise trial.error(law, where, f"is restored: {json.dumps(broken)}")
            trial.expect(law, where, run, len(trial.entries) // 2)
            continue
        trial.expect(law, f"{where}, refused; afterwards", run, start)


def _broken_states(state: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields states that differ from a good one by one thing, each with a name."""
    here = f"{path}{state['stage']}"
    yield f"with {here} as another stage", {**state, "stage": "no such stage"}
    for name in state:
        # States from before hooks were seeded lack "generators", those from before edited blends
        # went on inside a generator hook "input".
        if name not in ("stage", "generators", "input"):
            yield f"without {here}.{name}", {k: v for k, v in state.items() if k != name}
        if name not in ("stage", "inner"):
            for garbage in ("garbage", None, -1.5, {"no": "value"}):
                yield f"with {here}.{name}={garbage!r}", {**state, name: garbage}
    inner = state.get("inner", [])
    yield f"with one more below {here}", {**state, "inner": [*inner, {"stage": "no such stage"}]}
    for i, entry in enumerate(inner):
        for where, broken in _broken_states(entry, f"{here}/"):
            yield where, {**state, "inner": [*inner[:i], broken, *inner[i + 1 :]]}


def _check_not_random(trial: Trial) -> None:
    law = "Not random"
    for seed in (1, 2):
        with global_seeds(seed) as read:
            before = read()
            trial.expect(law, f"with global generators seeded {seed}", trial.run(), 0)
            for name, old, new in zip(("torch", "numpy", "random"), before, read(), strict=True):
                if first_difference(old, new):
                    what = f"the state of {name}'s global generator has changed"
                    raise trial.error(law, "after iterating", what)


def _text(snapshot: Snapshot) -> str:
    return json.dumps(snapshot.to_json())
