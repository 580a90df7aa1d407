"""What every stage that makes lists of samples is tested with: one encoder, one case for each.

A case is a collector, streamed or planned, with settings under which it has something to decide.
`test_list_laws.py` runs every law over every case; what is particular to a collector is tested in
a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from energon_lite import (
    Buckets,
    DefaultTaskEncoder,
    ModalitySplit,
    PackedSamplesOutput,
    Packing,
    SavableDataset,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    sample_rng,
    stateless,
)
from energon_lite.balance import CostModel
from energon_lite.core.dataset import StreamRun
from energon_lite.core.topology import Stream
from energon_lite.extras.lengths.length_index import measure_lengths

from ..helpers import ignore, metadataset, number_of, text_set

NUM_SAMPLES = 60
ONE = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=ignore)
COST = CostModel(token=1, token_squared=0.05)


def length_of(number: int) -> int:
    """The tokens of sample `number`: 1 to 13, of which 16 are the limit everywhere here."""
    return 1 + 7 * number % 13


def group_of(sample: TextSample) -> str:
    return "text" if number_of(sample) % 4 == 1 else "images"


class Lists(DefaultTaskEncoder):
    """Makes each list a dict that says everything about it. The base of one class per collector.

    Args:
        length: tokens of a sample by its number.
        noisy: whether samples fail, are skipped and draw random numbers.
        settings: those of the collector, over those of the class.
    """

    resources = ("tokens",)

    def __init__(
        self, length: Callable[[int], Any] = length_of, noisy: bool = False, **settings: Any
    ) -> None:
        super().__init__()
        self.length, self.noisy, self.settings = length, noisy, settings
        self.calls: list[int] = []

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        number = number_of(sample)
        self.calls.append(number)
        if self.noisy and number % 11 == 4:
            raise SkipSample
        if self.noisy and number % 17 == 5:
            raise ValueError(f"cannot read {number}")
        return TextSample.derive_from(sample, text=f"{sample.text} {sample_rng().random():.6f}")

    def sample_length(self, sample: TextSample) -> Any:
        number = number_of(sample)
        if len(self.resources) == 1:
            return self.length(number)
        return {"tokens": self.length(number), "images": int(group_of(sample) == "images")}

    def slice_sample(self, sample: TextSample, start: int, stop: int) -> TextSample:
        return sample

    def listed(self, samples: list[TextSample]) -> dict[str, Any]:
        return {
            "__restore_key__": (),
            "numbers": [number_of(sample) for sample in samples],
            "texts": [sample.text for sample in samples],
            "weights": [getattr(sample, "__loss_weight__", None) for sample in samples],
            "keys": [sample.__restore_key__ for sample in samples],
            "slot": self.current_batch_index,
            "noise": sample_rng().random(),
        }

    @stateless
    def batch(self, samples: list[TextSample]) -> dict[str, Any]:
        return self.listed(samples)

    @stateless
    def pack_selected_samples(self, samples: list[TextSample]) -> dict[str, Any]:
        return self.listed(samples)


class Packs(Lists):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        both = self.settings.get("lengths") == "both"
        capacity: Any = {"tokens": 16, "images": 99} if both else 16
        self.packing = Packing(**{"capacity": capacity, "buffer_size": 8, **self.settings})
        self.resources = self.packing.resources


class LikeLengths(Lists):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.batching = Buckets(**{"max_tokens": 32, "window": 16, **self.settings})


class OneGroup(Lists):
    resources = ("tokens", "images")

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.batching = ModalitySplit(**{"window": 4, **self.settings})


class Grouped(Lists):
    @stateless
    def batch_group_criterion(self, sample: TextSample) -> tuple[Any, None]:
        return number_of(sample) % 8, None


class Selected(Lists):
    def select_samples_to_pack(self, samples: list[TextSample]) -> PackedSamplesOutput:
        ordered = sorted(samples, key=lambda sample: (length_of(number_of(sample)), sample.__key__))
        packs = [ordered[i : i + 3] for i in range(0, len(ordered), 3)]
        if len(samples) < 10:
            return PackedSamplesOutput(packs, [])
        return PackedSamplesOutput(packs[:2], ordered[6:])


@dataclass(frozen=True)
class Case:
    """One collector, streamed or planned.

    Attributes:
        encoder: the class of its task encoder.
        settings: of the collector.
        arguments: of `get_train_dataset`.
        others: settings with each of which a checkpoint is refused.
        policies: what else than an error a sample that is too long may be.
        in_step: whether all streams have lists of one group in each cycle.
    """

    name: str
    encoder: type[Lists]
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    others: tuple[dict[str, Any], ...] = ()
    policies: tuple[str, ...] = ()
    in_step: bool = False

    @property
    def is_planned(self) -> bool:
        return "lengths" in self.settings

    def __str__(self) -> str:
        return self.name

    def made(self, *, length: Any = length_of, noisy: bool = False, **settings: Any) -> Lists:
        """A task encoder with the settings of the case, or with others."""
        return self.encoder(length, noisy, **{**self.settings, **settings})

    def dataset(
        self,
        path: Any,
        encoder: DefaultTaskEncoder | None = None,
        config: WorkerConfig = ONE,
        **arguments: Any,
    ) -> SavableDataset[Any]:
        arguments = {
            "batch_size": None, "shuffle_buffer_size": 16, **self.arguments, **arguments,
        }  # fmt: skip
        encoder = encoder or self.made()
        return get_train_dataset(path, worker_config=config, task_encoder=encoder, **arguments)

    def one_pass(
        self,
        path: Any,
        encoder: DefaultTaskEncoder | None = None,
        num_streams: int = 1,
        **more: Any,
    ) -> tuple[list[Any], Any]:
        """All lists of a pass over the data, and the loader that returned them."""
        config = replace(ONE, num_streams=num_streams)
        dataset = self.dataset(path, encoder, config, repeat=False, **more)
        loader = get_savable_loader(dataset, max_skip_rate=1, watchdog_timeout_seconds=None)
        return list(loader), loader


BALANCE = {"balance": "quantile_sync", "balance_window": 4, "cost": COST}
SHARED = {"balance": "global_window", "balance_window": 2, "cost": COST}
PACKINGS: tuple[dict[str, Any], ...] = (
    {"capacity": 20}, {"algorithm": "best"}, {"align": 2}, {"max_samples": 2}, {"loss": "sample"},
)  # fmt: skip
PACK_POLICIES = ("drop", "truncate", "split", "alone")
PLAN = {"lengths": "tokens", "plan_window": 20}
PLAN_OF_GROUPS = {"group_by": "modality", "lengths": "both", "plan_window": 20}
SHARED_PLAN = {**SHARED, **PLAN}
BUCKETS: tuple[dict[str, Any], ...] = (
    {"window": 15}, {"align": 2}, {"group_by": "source"}, {"overlong": "drop"},
    {"longest_first": True}, {"max_tokens": 31},
)  # fmt: skip
SPLIT: dict[str, Any] = {
    "group_by": group_of, "shares": {"images": 3, "text": 1}, "max_surplus": 1.0,
}  # fmt: skip
SPLITS: tuple[dict[str, Any], ...] = ({"window": 5}, {"longest_first": True}, {"end": "pad"})
PLANNED_SPLIT = {"group_by": "modality", "lengths": "both"}
PADDED_PLAN = {**PLANNED_SPLIT, "end": "pad"}
DROPPED_PLAN = {**PLANNED_SPLIT, "end": "drop"}
BATCHES_OF_3 = {"batch_size": 3}

CASES = [
    Case("packs", Packs, {}, {}, PACKINGS, PACK_POLICIES),
    Case("packs of groups", Packs, {"group_by": group_of}, {}, ({"group_by": None},)),
    Case("packs by best fit", Packs, {"algorithm": "best"}, {}, ({"algorithm": "streaming"},)),
    Case("packs of parts", Packs, {"capacity": 8, "overlong": "split", "buffer_size": 20}),
    Case("packs in balance", Packs, BALANCE, {}, ({"balance_window": 5},), PACK_POLICIES),
    Case("selected packs", Selected, {}, {"packing_buffer_size": 10}),
    Case("planned packs", Packs, PLAN, {}, ({"plan_window": 21}, *PACKINGS), PACK_POLICIES),
    Case("planned packs of groups", Packs, PLAN_OF_GROUPS),
    Case("planned packs by best fit", Packs, {"algorithm": "best", **PLAN}),
    Case("planned packs of parts", Packs, {"capacity": 8, "overlong": "split", **PLAN}),
    Case("planned packs in balance", Packs, {**BALANCE, **PLAN}),
    Case("shared packs", Packs, SHARED_PLAN, {}, ({"balance_window": 3},), PACK_POLICIES),
    Case("shared packs by parts", Packs, SHARED_PLAN),  # of two streams
    Case("shared packs of groups", Packs, {**PLAN_OF_GROUPS, **SHARED}),
    Case("buckets", LikeLengths, {}, {}, BUCKETS, ("drop", "alone")),
    Case("buckets of a fixed size", LikeLengths, {"max_tokens": None}, BATCHES_OF_3, BUCKETS[:2]),
    Case("buckets of groups", LikeLengths, {"group_by": group_of}, {}, ({"group_by": None},)),
    Case("one group", OneGroup, SPLIT, BATCHES_OF_3, SPLITS, in_step=True),
    Case("one group, padded", OneGroup, {**SPLIT, "end": "pad"}, BATCHES_OF_3, in_step=True),
    Case("one group, dropped", OneGroup, {**SPLIT, "end": "drop"}, BATCHES_OF_3, in_step=True),
    Case("planned group", OneGroup, PLANNED_SPLIT, BATCHES_OF_3, SPLITS, in_step=True),
    Case("planned group, padded", OneGroup, PADDED_PLAN, BATCHES_OF_3, in_step=True),
    Case("planned group, dropped", OneGroup, DROPPED_PLAN, BATCHES_OF_3, in_step=True),
    Case("groups", Grouped, {}, BATCHES_OF_3),
]


def texts(folder: Path, num_samples: int = NUM_SAMPLES, length: Any = length_of) -> Path:
    """A set of texts with both length indexes."""
    root = text_set(folder, num_samples)
    for encoder, name in ((Packs(length), "tokens"), (OneGroup(length, **PLANNED_SPLIT), "both")):
        measure_lengths(root, encoder, name=name, num_workers=0)
    return root


def blend_of(*paths: Path, **keys: Any) -> dict[str, Any]:
    """A metadataset of folders, each a source of the folder's name; `keys` go to the second."""
    entries: list[dict[str, Any]] = [{"path": str(path), "name": path.name} for path in paths]
    entries[1].update(keys)
    return metadataset({"blend": entries})


def keys_in(value: Any, names: set[str]) -> list[tuple[Any, ...]]:
    """The restore keys of samples of these sources, anywhere in a state."""
    if isinstance(value, dict):
        return [key for entry in value.values() for key in keys_in(entry, names)]
    if isinstance(value, (list, tuple)):
        if len(value) == 4 and isinstance(value[0], str) and value[0] in names:
            return [tuple(value)]
        return [key for entry in value for key in keys_in(entry, names)]
    return []


def state_of(run: StreamRun[Any]) -> Any:
    """The state of a stream as it comes out of a file."""
    return json.loads(json.dumps(run.snapshot().to_json()))


def stream_run(dataset: SavableDataset[Any], index: int = 0, number: int = 1) -> StreamRun[Any]:
    return StreamRun(dataset, Stream(index, number), max_skip_rate=1.0)


def corrupt_states(state: Any) -> Iterator[tuple[str, Any]]:
    """States with one list that is shorter, longer, or has one value that cannot be."""
    if isinstance(state, dict):
        for name, value in state.items():
            for where, broken in corrupt_states(value):
                yield f"{name}{where}", {**state, name: broken}
    elif isinstance(state, list):
        if state:
            yield " without its last", state[:-1]
            yield " with its last twice", [*state, state[-1]]
            yield " with an empty list first", [[], *state[1:]]
            for i in sorted({0, len(state) - 1}):
                for where, broken in corrupt_states(state[i]):
                    yield f"[{i}]{where}", [*state[:i], broken, *state[i + 1 :]]
    elif isinstance(state, int) and not isinstance(state, bool):
        yield "=-1", -1
        yield "=10**9", 10**9
        yield "='x'", "x"
