"""Packs: samples chosen by their length or by a function, encoded, and put into one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from itertools import chain, islice
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, TypeVar

from energon_lite.batching.rules import Packing
from energon_lite.core.dataset import Cursor, SavableDataset, Traits, taken
from energon_lite.core.errors import FatalSampleError, pass_on
from energon_lite.core.keys import is_piece, leaves, whole
from energon_lite.core.sample_columns import Columns, samples_of
from energon_lite.core.stage import Stage, StageCursor
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.stream_context import current_context, replaying
from energon_lite.core.topology import Stream, WorkerConfig
from energon_lite.core.user_function import (
    DEFAULT_FAILURE_TOLERANCE,
    SKIPPED,
    FunctionRun,
    UserFunction,
    unskipped,
)
from energon_lite.names.energon_modules import import_name
from energon_lite.stages.collect import ListDataset
from energon_lite.stages.loss_weights import set_loss_weight
from energon_lite.stages.map import (
    FunctionConfig,
    MapCursor,
    MapDataset,
    WrappedFunction,
    as_user_function,
)
from energon_lite.stages.pack_lists import PackLists, SelectedLists
from energon_lite.stages.packed_sample import slice_sample
from energon_lite.stages.token_lengths import MeasureDataset

T = TypeVar("T")

Slicer = Callable[[Any, int, int], Any]

# Imported by the pipelines that ask for them.
_PLANNED_PACKS = "energon_lite.stages.planned_packs:PlannedPacks"
_BALANCED_LISTS = "energon_lite.stages.balanced_lists:BalancedLists"


class PackingDataset(MapDataset[T]):
    """Packs: several samples in one item.

    State: that of `PackLists`, `PlannedPacks`, or `SelectedLists`.
    Length: at most the number of samples, as it is unknown how many share a pack.
    Keys: `("pack", slot, key, key, ...)` of the samples that are in it.

    Args:
        dataset: the samples; must be replayable, as some are buffered.
        buffer_size: samples to choose from; None for that of `pre_packer`, if it is a `Packing`.
        pre_packer: a `Packing`, by whose settings samples are chosen by their length; or a function
            of a list of samples, which returns lists of them, or a `PackedSamplesOutput`.
        final_packer: makes one item of a list of samples; may be a generator function.
        sample_length: with a `Packing`: returns a sample's tokens, or a dict of resources.
        sample_encoder: what is to be done with a sample once it is in a pack; no generator.
        slicer: with a `Packing` that truncates or splits: returns tokens `start` to `stop` of an
            encoded sample.
        sample_encoder_stateless: whether its result depends on the sample only; None to see whether
            `@stateless` marks it.
        final_packer_stateless: the same for `final_packer`.
        packer_config: as `map_fn_config` of `MapDataset`.
        drop_last: with a function: whether what is buffered at the end of the data is dropped.
        pre_packer_failure_tolerance: failures in a row that end the run; 0 for any number.
        sample_encoder_failure_tolerance: the same.
        final_packer_failure_tolerance: the same.
        pack_columns: makes several packs at once, as `final_packer` makes them one by one, for a
            batch of them; None if nothing does.
        packs_per_batch: of a batch above, which is to have packs of one group; it counts where
            all streams plan together.
        worker_config: by default that of the dataset.

    Raises:
        ValueError: A setting is out of range, or something below cannot be run again.
        TypeError: A `Packing` without `sample_length`.
    """

    config_name: ClassVar[str] = "packer_config"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buffer_size: int | None,
        pre_packer: Packing | Callable[[list[Any]], Any] | UserFunction,
        final_packer: Callable[[list[Any]], T] | UserFunction,
        *,
        sample_length: Callable[[Any], Any] | UserFunction | None = None,
        sample_encoder: Callable[[Any], Any] | UserFunction | None = None,
        slicer: Slicer = slice_sample,
        sample_encoder_stateless: bool | None = None,
        final_packer_stateless: bool | None = None,
        packer_config: FunctionConfig = None,
        drop_last: bool = False,
        pre_packer_failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        sample_encoder_failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        final_packer_failure_tolerance: int = DEFAULT_FAILURE_TOLERANCE,
        pack_columns: Callable[[list[list[Any]]], Columns] | None = None,
        packs_per_batch: int = 1,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        config = worker_config or dataset.worker_config
        lists: ListDataset[list[Any]]
        if isinstance(pre_packer, Packing):
            if buffer_size is not None:
                pre_packer = dataclasses.replace(pre_packer, buffer_size=buffer_size)
            lists = _by_length(dataset, pre_packer, sample_length, config, packs_per_batch)
        elif buffer_size is None:
            raise ValueError("buffer_size=None goes with a Packing only; say how many to buffer")
        else:
            select = as_user_function(
                pre_packer, "select_samples_to_pack", config, None, pre_packer_failure_tolerance
            )
            lists = SelectedLists(dataset, buffer_size, select, drop_last)
        encoder = sample_encoder and as_user_function(
            sample_encoder,
            "postencode_sample",
            config,
            sample_encoder_stateless,
            sample_encoder_failure_tolerance,
        )
        packer = as_user_function(
            final_packer,
            "pack_selected_samples",
            config,
            final_packer_stateless,
            final_packer_failure_tolerance,
        )
        members = PackMembers(lists, encoder, slicer)
        super().__init__(members, packer, map_fn_config=packer_config, worker_config=config)
        self.pack_columns = pack_columns

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[T]:
        """Returns a fresh cursor."""
        return _PackCursor(self, inner) if self.pack_columns else super().open(inner, stream)


class _PackCursor(MapCursor[T]):
    def take(self, n: int) -> tuple[list[T] | Columns, list[RestoreKey]]:
        found, keys = taken(self.inner, n)
        if not keys:
            raise StopIteration
        packs, since = samples_of(found), perf_counter()
        try:
            columns: Columns = self.spec.pack_columns(packs)
        except Exception as error:
            pass_on(error)
            # One of them failed: it is named and counted where packs are made singly.
            items, keys = unskipped(self._run.call_timed(keys, packs), keys)
            return items, keys
        current_context().spend(keys[0], perf_counter() - since)
        self._run.failures, self.key = 0, keys[-1]
        return columns, keys


def _by_length(
    dataset: SavableDataset[Any],
    packing: Packing,
    sample_length: Callable[[Any], Any] | UserFunction | None,
    config: WorkerConfig | None,
    packs_per_batch: int,
) -> ListDataset[list[Any]]:
    if sample_length is None:
        raise TypeError("a Packing needs sample_length, a function that returns a sample's tokens")
    length = as_user_function(sample_length, "sample_length", config)
    if packing.lengths is not None:  # a length that is not that of the index is refused
        length = copy.copy(length)
        length.may_draw = False
    measured = MeasureDataset(dataset, length, packing, config)
    packs: ListDataset[list[Any]]
    if packing.lengths is None:
        packs = PackLists(measured, packing, packs_per_batch)
    else:
        packs = import_name(_PLANNED_PACKS)(measured, packing, packs_per_batch)
    if packing.balance == "quantile_sync":
        packs = import_name(_BALANCED_LISTS)(packs)
    return packs


class _Piece(NamedTuple):
    """A part of a sample, still to be cut out."""

    sample: Any
    start: int
    stop: int


class _Cut(WrappedFunction):
    """A slicer as a function of one argument."""

    def __call__(self, piece: _Piece) -> Any:
        return self.function(*piece)


class PackMembers(Stage[list[Any]]):
    """The samples of each pack: encoded, cut where a part is wanted, with their loss weights.

    A sample that fails here is missing in its pack.

    State: none.
    Length: as below, without packs of which nothing is left.
    Keys: as below, of the samples that are left.

    Args:
        dataset: lists of samples.
        encoder: what is to be done with each; None for nothing.
        slicer: returns tokens `start` to `stop` of an encoded sample.
    """

    name = "pack_members"

    def __init__(
        self,
        dataset: ListDataset[list[Any]],
        encoder: UserFunction | None = None,
        slicer: Slicer = slice_sample,
    ) -> None:
        super().__init__(dataset)
        if encoder is not None and encoder.is_generator:
            raise ValueError(
                f"{encoder.where} is a generator, but works on samples that were chosen for a pack "
                "by their length; expand samples in preencode_sample"
            )
        self.encoder = encoder
        self.cut = UserFunction(
            _Cut(slicer), name="slice_sample", config=self.worker_config, is_stateless=True
        )

    def open(self, inner: Cursor[Any], stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _MemberCursor(self, inner)

    def loss_weights(self) -> dict[str, float]:
        """Returns the loss weights of sources that have one, by source."""
        return {f.name: f.loss_weight for f in self.dataset.sources() if f.loss_weight != 1}

    def own_traits(self, below: Traits) -> Traits:
        """Adds whether the encoder is stateless."""
        is_stateless = self.encoder is None or self.encoder.is_stateless
        return dataclasses.replace(below, replayable=below.replayable and is_stateless)

    def restore_sample(self, restore_key: RestoreKey) -> list[Any]:
        """Makes the samples of a pack again."""
        samples: list[Any] = self.dataset.restore_sample(restore_key)
        encoder, keys = self.encoder, [*restore_key[2:]]
        with replaying():
            encode = (lambda own, inputs: [*map(encoder.call, own, inputs)]) if encoder else None
            return _encoded_members(keys, samples, encode, self.cut.call, self.loss_weights())

    def own_settings(self) -> dict[str, JSON]:
        """Returns the encoder."""
        encoder: JSON = None
        if self.encoder is not None:
            encoder = {"stage": self.encoder.name, "seeded": self.encoder.restore_seeds}
        return {"encoder": encoder}


def _encoded_members(
    keys: list[RestoreKey],
    samples: list[Any],
    encode: Callable[[list[RestoreKey], list[Any]], list[Any]] | None,
    cut: Callable[[RestoreKey, _Piece], Any],
    weights: dict[str, float],
) -> list[Any]:
    """Returns encoded samples, or parts of them, as packs have them.

    Args:
        keys: their restore keys.
        samples: the samples; `SKIPPED`, here and in the result, in place of those that failed.
        encode: what is to be done with them first; None for nothing.
        cut: cuts a part out.
        weights: loss weights by source.
    """
    are_parts = tuple in {type(key[-1]) for key in keys}  # some or all of them
    if encode is not None and keys:
        samples = encode([*map(whole, keys)] if are_parts else keys, samples)
    for i, key in enumerate(keys) if are_parts else ():
        if is_piece(key) and samples[i] is not SKIPPED:
            samples[i] = cut(key, _Piece(samples[i], key[1], key[2]))
        elif is_piece(key) and key[1] > 0:  # the sample was counted with its first part
            current_context().release(key[-1], -1)
    for key, sample in zip(keys, samples, strict=True) if weights else ():
        if sample is not SKIPPED:
            _weigh(sample, key, weights)
    return samples


class _MemberCursor(StageCursor[list[Any]]):
    key: RestoreKey = ()

    def __init__(self, spec: PackMembers, inner: Cursor[list[Any]]) -> None:
        super().__init__(spec, inner)
        self._encode = FunctionRun(spec.encoder).call_timed if spec.encoder else None
        self._cut = FunctionRun(spec.cut).call
        self._weights = spec.loss_weights()

    __next__ = Cursor.__next__

    def take(self, n: int) -> tuple[list[list[Any]] | Columns, list[RestoreKey]]:
        """Returns what is left of the next `n` packs, and the restore keys of the packs."""
        draws = self.spec.encoder is not None and self.spec.encoder.may_draw
        found, keys = taken(self.inner, 1 if draws else n)  # in turn with the hooks below
        if not keys:
            raise StopIteration
        packs = samples_of(found)
        flat = [key for of_pack in keys for key in of_pack[2:]]
        members = [*chain.from_iterable(packs)]
        samples = iter(_encoded_members(flat, members, self._encode, self._cut, self._weights))
        made: list[list[Any]] = []
        own_keys: list[RestoreKey] = []
        for pack, (kind, slot, *own) in zip(packs, keys, strict=True):
            members, own = unskipped([*islice(samples, len(pack))], own)
            if members:
                made.append(members)
                own_keys.append((kind, slot, *own))
        self.key = own_keys[-1] if own_keys else self.key
        return made, own_keys


def _weigh(sample: Any, key: RestoreKey, weights: dict[str, float]) -> None:
    """Writes its source's loss weight on a sample that does not have it yet."""
    weight = weights.get(next(leaves(key))[0])
    if weight is not None and not set_loss_weight(sample, weight):
        raise FatalSampleError.from_sample(
            sample,
            f"{type(sample).__name__} has no place for its source's loss weight {weight}; make it "
            "a Sample (derive_from), a dict or a plain dataclass, or give it a field `loss_weight`",
        )
