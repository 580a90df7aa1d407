"""Samples that are buffered as rows come out as they would have stayed, whatever a hook does."""

from __future__ import annotations

import gc
import json
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.sample_columns import Origin, SampleColumns, SampleForm, SampleRows
from energon_lite.core.stacking import layout_of
from energon_lite.stages.token_lengths import MeasureCursor

from ..conftest import write_tar
from ..helpers import prepared, text_set


class Looks(DefaultTaskEncoder):
    """Measures samples, and does nothing else to them."""

    batching = Buckets(max_tokens=40, window=25)

    def sample_length(self, sample: TextSample) -> int:
        return 1 + len(sample.text) % 13


class MakesLists(Looks):
    """As a user's own `batch`, which is called with samples."""

    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        assert type(samples) is list
        return {"samples": [plain(sample) for sample in samples]}


class Replaces(MakesLists):
    def sample_length(self, sample: TextSample) -> int:
        sample.text += "!"
        return super().sample_length(sample)


class ReplacesSome(MakesLists):
    def sample_length(self, sample: TextSample) -> int:
        if sample.__key__.endswith("7"):
            sample.__loss_weight__ = 3.0
        return super().sample_length(sample)


class Tags(Looks):
    def sample_length(self, sample: TextSample) -> int:
        sample.__subflavors__["length"] = len(sample.text)
        return super().sample_length(sample)


class Retags(MakesLists):
    def sample_length(self, sample: TextSample) -> int:
        if "n" in sample.__subflavors__:
            sample.__subflavors__["n"] = float(sample.__subflavors__["n"])  # equal, of another type
        return super().sample_length(sample)


class Adds(MakesLists):
    """Keeps what it found on the sample, where its `batch` looks."""

    def sample_length(self, sample: TextSample) -> int:
        sample.tokens = len(sample.text)
        return super().sample_length(sample)

    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        known = [getattr(sample, "tokens", len(sample.text)) for sample in samples]
        return {"samples": [plain(sample) for sample in samples], "tokens": known}


class KeepsOne(MakesLists):
    """Changes each sample when it is called with the next one."""

    last: Any = None

    def sample_length(self, sample: TextSample) -> int:
        if self.last is not None:
            self.last.text += "?"
        self.last = sample
        return super().sample_length(sample)


class Refers(MakesLists):
    """Keeps what it knows of a sample as long as there is the sample."""

    def sample_length(self, sample: TextSample) -> int:
        found = vars(self).setdefault("found", {})
        found[sample.__key__] = weakref.ref(sample)
        return super().sample_length(sample)

    @stateless
    def batch(self, samples: list[TextSample]) -> Any:
        kept = vars(self).get("found", {})
        are_same = [kept[s.__key__]() in (s, None) for s in samples if s.__key__ in kept]
        return {"samples": [plain(sample) for sample in samples], "same": all(are_same)}


class SkipsSome(MakesLists):
    def sample_length(self, sample: TextSample) -> int:
        if sample.__key__.endswith("3"):
            raise SkipSample
        if sample.__key__.endswith("9"):
            raise ValueError("no length")
        return super().sample_length(sample)


class Groups(MakesLists):
    batching = Buckets(max_tokens=40, window=25, group_by=lambda sample: len(sample.text) % 2)


class ChangesBatches(Looks):
    @stateless
    def encode_batch(self, batch: TextSample) -> Any:
        for flavors in batch.__subflavors__ or []:
            flavors["seen"] = batch.__key__
        return plain(batch)


ENCODERS = [
    Looks, MakesLists, Replaces, ReplacesSome, Tags, Retags, Adds, KeepsOne, Refers, SkipsSome,
    Groups, ChangesBatches, lambda: DefaultLike(raw_batch_type=dict),
]  # fmt: skip


class DefaultLike(Looks):
    pass


def plain(item: Any) -> Any:
    """Returns an item with its type and all fields, also hidden ones."""
    if isinstance(item, dict):
        return {name: repr(value) for name, value in item.items()}
    names = layout_of(type(item))[1]
    return type(item), {name: repr(getattr(item, name)) for name in names}


@contextmanager
def samples_stay() -> Iterator[None]:
    """Buffers samples themselves."""
    taking = MeasureCursor.take_with_lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasureCursor, "take_with_lengths", lambda self, n, **_: taking(self, n))
        yield


def run_of(dataset: Any, num: int, state: Any = None) -> tuple[list[Any], list[Any]]:
    """Returns batches with what was counted, and the state after each."""
    loader = get_savable_loader(dataset, max_skip_rate=1)
    if state is not None:
        loader.restore_state_rank(state)
    found: list[Any] = []
    states: list[Any] = []
    try:
        for item in islice(loader, num):
            found.append(plain(item))
            states.append(json.loads(json.dumps(loader.save_state_rank())))
    except FatalSampleError as error:
        found.append(str(error))
    stats = {name: (s.samples, s.draws, s.skipped) for name, s in loader.stats().items()}
    return [*found, stats], states


TEXTS = st.lists(
    st.tuples(
        st.sampled_from([b"", b"abc", "zwölf".encode(), b"\xff\xfe", b"x" * 900, b"hello you"]),
        st.sampled_from([False] * 9 + [True]),
    ),
    min_size=1,
    max_size=60,
)


@given(
    sets=st.lists(TEXTS, min_size=1, max_size=3),
    encoder=st.sampled_from(ENCODERS),
    num_streams=st.integers(1, 2),
    repeats=st.booleans(),
    tags=st.sampled_from(["{}", "{n: 1}", "{n: 1, m: [2]}"]),
)
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_batches_and_states_are_those_of_buffered_samples(
    sets, encoder, num_streams, repeats, tags
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        entries = ""
        for name, samples in zip("abc", sets, strict=False):
            root = folder / name
            root.mkdir()
            members = [
                (f"{name}{i:03d}.{part}", value)
                for i, (value, has_more) in enumerate([*samples, (b"well", False)])
                for part in (("jpg", "txt") if has_more else ("txt",))
            ]
            write_tar(root / "a.tar", members)
            prepared(root, "TextSample", {"text": "txt"})
            entries += f"    - {{path: {name}, loss_weight: {len(samples)}, subflavors: {tags}}}\n"
        path, end = folder / "blend.yaml", "" if repeats else "    until: all_once\n"
        path.write_text(
            "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
            f"  train:\n{end}    blend:\n{entries}"
        )
        config = WorkerConfig(
            rank=0, world_size=1, num_workers=0, num_streams=num_streams,
            global_error_handler=lambda *seen: None,
        )  # fmt: skip

        def dataset() -> Any:
            return get_train_dataset(
                path, batch_size=None, shuffle_buffer_size=5, max_samples_per_sequence=7,
                worker_config=config, task_encoder=encoder(), repeat=repeats,
            )  # fmt: skip

        found, states = run_of(dataset(), 10)
        with samples_stay():
            expected, other_states = run_of(dataset(), 10)
        assert found == expected
        assert [s["streams"] for s in states] == [s["streams"] for s in other_states]
        # A sample that is re-created is not measured again, so its hook does not know it.
        changes = encoder in (Replaces, ReplacesSome, Tags, Retags, KeepsOne, Refers)
        for place in () if changes else range(0, len(states), 3):
            left = found[place + 1 : len(states)]
            rest, _ = run_of(dataset(), len(left), states[place])
            assert rest[:-1] == left


def training(root: Path, encoder: Any) -> Any:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    return get_train_dataset(
        root, batch_size=None, shuffle_buffer_size=20, worker_config=config, task_encoder=encoder
    )


@pytest.mark.parametrize(("encoder", "num_expected"), [(Looks, 0), (Replaces, 20)])
def test_samples_that_a_hook_only_looked_at_are_not_kept(tmp_path, encoder, num_expected) -> None:
    loader = get_savable_loader(training(text_set(tmp_path / "a", 100), encoder()))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    gc.collect()
    alive = [found for found in gc.get_objects() if type(found) is TextSample]
    num_alive = sum(str(tmp_path) in str(sample.__sources__) for sample in alive)
    assert (num_alive >= num_expected) if num_expected else num_alive < 5


def test_batch_is_made_of_rows_without_samples(tmp_path, monkeypatch) -> None:
    batch, made = SampleColumns.batch, []
    monkeypatch.setattr(SampleColumns, "batch", lambda self: made.append(1) or batch(self))
    loader = get_savable_loader(training(text_set(tmp_path / "a", 100), Looks()))
    assert len(list(islice(loader, 30))) == len(made) == 30


@pytest.mark.parametrize("other", [(), ("row",), ["row"], None])
def test_what_is_no_row_stays_as_it_is_among_rows(other) -> None:
    columns = SampleColumns(
        SampleForm(TextSample, "text", []),
        {"a": Origin("/a", {}, 1.0)},
        [["k"], [("a", 0, 5, 6)], ["text"], ["shard"], ["k.txt"]],
    )
    rows = SampleRows()
    (row,) = rows.of(columns)
    gc.collect()  # which finds out that the restore key is no container
    gc.collect()
    assert not gc.is_tracked(row)
    first, second = rows.columns([row, other])
    assert plain(first) == plain(columns.samples()[0])
    assert second is other
    assert rows.columns([]) == []
    assert rows.sample(other) is other
