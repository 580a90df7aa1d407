"""Joins below other stages: planned packs, mixes, worker processes of any kind, resuming."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    Sample,
    TextSample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.stream_context import sample_rng
from energon_lite.extras.lengths.length_index import measure_lengths

from ..helpers import Ranks, blend_maker, ignore, text_of, text_set

ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=1, global_error_handler=ignore)
NUM_SAMPLES = 90
HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@edataclass
class Both(Sample):
    """A text, the text of another dataset, if it has one, and a number that is drawn."""

    text: str
    other: str | None
    drawn: int


def both(left: TextSample, right: TextSample | None) -> Both:
    """Joins two texts."""
    drawn = int(sample_rng().integers(1000))
    return Both.derive_from(left, text=left.text, other=right and right.text, drawn=drawn)


class Encoder(DefaultTaskEncoder):
    """Lists of what is in the samples."""

    @stateless
    def batch(self, samples: list[Any]) -> list[Any]:
        return [
            (s.__key__, s.text, getattr(s, "other", None), getattr(s, "drawn", None),
             s.__subflavors__, s.__loss_weight__)
            for s in samples
        ]  # fmt: skip


class Packs(Encoder):
    """Packs that are planned by a length index."""

    packing = Packing(capacity=160, lengths="index", overlong="alone")

    def sample_length(self, sample: Both) -> int:
        return len(sample.text) + len(sample.other or "")

    @stateless
    def pack_selected_samples(self, samples: list[Both]) -> Both:
        text = "|".join(f"{s.text}+{s.other}" for s in samples)
        return Both.derive_from(samples[0], text=text, other=None, drawn=0)


class SharedPacks(Packs):
    """Packs of one plan for all streams."""

    packing = Packing(
        capacity=160, lengths="index", overlong="alone", balance="global_window",
        balance_window=4, cost=CostModel(token=1),
    )  # fmt: skip


JOIN = f"""
join:
- path: texts
- {{path: half, nonmatch: none}}
joiner: {{__module__: {__name__}, __function__: both}}
"""
NESTED = f"""
blend:
- weight: 2
  loss_weight: 0.5
  subflavors: {{level: 1}}
  blend:
  - weight: 1
    loss_weight: 0.5
    join:
    - {{path: texts, subflavors: {{level: 2, primary: true}}}}
    - {{path: half, nonmatch: none}}
    joiner: {{__module__: {__name__}, __function__: both}}
  - path: half
- weight: 1
  subset: {{range: ["0%", "50%"]}}
  join:
    left: {{path: texts}}
    right: {{path: half, nonmatch: skip}}
  joiner: {{__module__: {__name__}, __function__: both}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts` has 90 samples, `half` the first 45 of these, in other shards."""
    root = tmp_path_factory.mktemp("joined")
    text_set(root / "texts", NUM_SAMPLES, 4)
    text_set(root / "half", NUM_SAMPLES // 2, 3)
    return root


def split_of(join: str) -> str:
    return HEAD + "splits:\n  train:\n" + "".join(f"    {row}\n" for row in join.splitlines())


@pytest.mark.parametrize("encoder", [Packs, SharedPacks])
def test_packs_of_joined_samples_are_planned_and_resume_on_other_ranks(root, encoder):
    make = blend_maker(root, JOIN, encoder, batch_size=1, repeat=False)
    (root / "meta.yaml").write_text(split_of(JOIN))
    measure_lengths(root / "meta.yaml", encoder(), name="index", num_workers=0)
    whole = Ranks(make, 1, num_streams=2).rest()
    texts = [text for pack in whole.values() for text in pack[0][1].split("|")]
    assert sorted(texts) == sorted(
        f"{text_of(i)}+{text_of(i) if i < NUM_SAMPLES // 2 else None}" for i in range(NUM_SAMPLES)
    )
    before = Ranks(make, 2, num_streams=2)
    found = before.steps(2)
    found |= Ranks(make, 1, num_workers=2, states=before.save()).rest()
    assert found == whole


class TokenPacks(DefaultTaskEncoder):
    packing = Packing(capacity=200)

    @stateless
    def encode_sample(self, sample: Both) -> dict[str, Any]:
        service = {name: getattr(sample, name) for name in ("__key__", "__sources__")}
        return {**service, "input_ids": list(sample.text.encode())}

    def sample_length(self, sample: dict[str, Any]) -> int:
        return len(sample["input_ids"])


def test_sources_of_packed_joins_have_an_entry_per_sample(root: Path) -> None:
    make = blend_maker(root, JOIN, TokenPacks, batch_size=2)
    for batch in islice(get_savable_loader(make(ONE)), 10):
        assert len(batch.__key__) == len(batch.source_names) > 2
        for key, own in zip(batch.__key__, batch.__sources__, strict=True):
            folders = ["texts", "half"] if int(key) < NUM_SAMPLES // 2 else ["texts"]
            assert [Path(info.dataset_path).name for info in own] == folders


def test_nested_blends_over_joins_resume_on_other_ranks_with_weights_and_tags(root: Path) -> None:
    make = blend_maker(root, NESTED, Encoder, shuffle_buffer_size=4)
    whole = Ranks(make, 1, num_streams=6).slots(36)
    before = Ranks(make, 3, num_streams=6)
    found = before.slots(12)
    after = Ranks(make, 2, states=before.save())
    assert {**found, **after.slots(24)} == whole
    rows = [row for rows in whole.values() for row in rows]
    inner = [row for row in rows if row[4].get("primary")]
    assert len(inner) > 5
    assert {(row[4]["level"], row[5]) for row in inner} == {(1, 0.25)}
    quarter = [row for row in rows if row[3] is not None and not row[4]]
    assert {int(row[0]) for row in quarter} <= set(range(NUM_SAMPLES // 4 + 1))


def broken(left: TextSample, right: Any) -> Any:
    raise ValueError("this row cannot be joined")


def none(left: TextSample, right: Any) -> Any:
    return None


@pytest.mark.parametrize(("name", "message"), [
    ("broken", r"this row cannot be joined"),
    ("none", r"the joiner returned a NoneType; return a Sample"),
])  # fmt: skip
def test_errors_of_a_joiner_name_it_and_the_sample(root: Path, name: str, message: str) -> None:
    path = root / f"{name}.yaml"
    path.write_text(split_of(JOIN.replace("__function__: both", f"__function__: {name}")))
    loader = get_savable_loader(get_train_dataset(path, worker_config=ONE, batch_size=None))
    with pytest.raises(Exception, match=message) as caught:
        next(iter(loader))
    chain = [caught.value, caught.value.__cause__]
    notes = " ".join(note for e in chain for note in getattr(e, "__notes__", ()))
    assert "joiner of" in notes
    assert "sample '" in notes


class Crude(DefaultTaskEncoder):
    """Has no cooker: joins are typed, also those of crude samples."""

    cookers: ClassVar = []


def of_crude(left: dict[str, Any], right: dict[str, Any]) -> TextSample:
    """Joins crude samples, which are dicts."""
    keys = {name: left[name] for name in ("__key__", "__restore_key__", "__subflavors__")}
    return TextSample(**keys, text=left["txt"] + right["txt"])


def test_crude_datasets_are_joined_by_a_function(root: Path, tmp_path: Path) -> None:
    for name in ("texts", "half"):
        text_set(tmp_path / name, 6)
        config = tmp_path / name / ".nv-meta" / "dataset.yaml"
        config.write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    path = tmp_path / "meta.yaml"
    path.write_text(split_of(JOIN.replace("both", "of_crude")))
    dataset = get_train_dataset(path, worker_config=ONE, batch_size=None, repeat=False)
    found = list(get_savable_loader(dataset))
    assert sorted(sample.text for sample in found) == sorted(2 * text_of(i) for i in range(6))
    assert {len(sample.__sources__) for sample in found} == {2}
    path.write_text(
        split_of(JOIN).replace(f"__module__: {__name__}, __function__: both",
                               "__module__: energon_lite, __class__: TextSample")
    )  # fmt: skip
    with pytest.raises(DatasetFormatError, match="crude"):
        next(iter(get_savable_loader(get_train_dataset(path, worker_config=ONE, batch_size=1))))
