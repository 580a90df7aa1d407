"""Lists of samples that fill a pack together, chosen by their lengths."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from energon_lite import packing as packers
from energon_lite.batching.rules import Packing
from energon_lite.core.arrays import Int64Array
from energon_lite.core.dataset import Cursor
from energon_lite.core.errors import StateError
from energon_lite.core.keys import whole
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.batching import Collected
from energon_lite.stages.grouping import Grouping, GroupKey
from energon_lite.stages.measuring import MeasureCursor, MeasureDataset
from energon_lite.stages.overlong import Measure, Piece, left_out

# What a packer's state has of each sample held.
_COLUMNS = ("numbers", "lengths", "packs")


class Packer(Protocol):
    """What chooses the samples of a pack; `StreamingPacker` and `WindowPacker` do."""

    @property
    def is_full(self) -> bool:
        """Whether a pack can be given without reading on."""

    @property
    def num_held(self) -> int:
        """Samples that are in no pack given yet."""

    @property
    def num_added(self) -> int:
        """The number of the sample that is added next."""

    def add(self, lengths: int | tuple[int, ...]) -> None:
        """Adds the next sample."""

    def next_pack(self) -> list[int]:
        """Returns the numbers of the next pack's samples."""

    def held(self) -> list[int]:
        """Returns the numbers of the samples that are in no pack given yet, in their order."""

    def state(self) -> dict[str, Any]:
        """Returns what is held."""

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""


def new_packer(packing: Packing) -> Packer:
    """Returns what packs one group of one stream."""
    limits: dict[str, Any] = {
        "buffer_size": packing.buffer_size,
        "max_samples": packing.max_samples,
    }
    if len(packing.resources) == 1:
        limits.update(capacity=packing.tokens, align=packing.token_alignment)
    else:
        limits.update(capacity=packing.capacities, align=packing.alignments)
    if packing.algorithm == "streaming":
        streaming: Packer = packers.StreamingPacker(**limits)
        return streaming
    windowed: Packer = packers.WindowPacker(algorithm=packing.algorithm, **limits)
    return windowed


class FilledPacks(Collected):
    """Lists of samples that fill packs; of one group each.

    State: for each group the restore keys and lengths of the samples held, in their order. After a
    resume a sample is made again when it leaves.
    Length: at most that below.
    Keys: `("pack", slot, key, key, ...)`; that of a part of a sample that is too long for a pack is
    `("piece", start, stop, key)`.

    Args:
        dataset: the samples, measured; they must be replayable, as those held are saved as keys.
        packing: how they are packed.
        seed: of the run.
    """

    kind: ClassVar[str] = "pack"

    def __init__(self, dataset: MeasureDataset[Any], packing: Packing, seed: int = 0) -> None:
        super().__init__(dataset, "Packs")
        self.packing = packing
        self.grouping = Grouping(packing.group_by, seed, self.worker_config)
        self.group_function = self.grouping.function
        # Compiles it, if it was never used here, before there are worker processes.
        new_packer(packing)
        packers.compile_all()

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        inner: Any = self.dataset.cursor(stream)
        return FillCursor(self, inner)

    @property
    def samples_are_known(self) -> bool:
        """It is not: that depends on their lengths. `num_items` and `expected` take one a pack."""
        return False

    def restore_member(self, key: RestoreKey) -> Any:
        """Makes one sample of a pack again; the whole of it, of a piece."""
        return self.dataset.restore_sample(whole(key))

    def config(self) -> dict[str, JSON]:
        """Returns all that decides which samples share a pack."""
        packing = self.packing
        return {
            "stage": "pack",
            "capacity": dict(zip(packing.resources, packing.capacities, strict=True)),
            "algorithm": packing.algorithm,
            "packing_buffer_size": packing.buffer_size,
            "max_samples": packing.max_samples,
            "group_by": self.grouping.name,
            "overlong": packing.overlong,
            "align": list(packing.alignments),
            "drop_last": packing.drop_last,
            "end_of_data": packing.end_of_data,
            "of": self.dataset.config(),
        }


class _Held(NamedTuple):
    """A sample in a buffer, `SKIPPED` for one that has to be made again, and its lengths."""

    key: RestoreKey
    sample: Any
    lengths: Any  # a number, a tuple; of a sample that is alone what `sample_length` told


class _Group:
    """The buffer of one group."""

    def __init__(self, packing: Packing) -> None:
        self.packer = new_packer(packing)
        self.held: dict[int, _Held] = {}

    def add(self, key: RestoreKey, sample: Any, lengths: int | tuple[int, ...]) -> None:
        self.held[self.packer.num_added] = _Held(key, sample, lengths)
        self.packer.add(lengths)

    def take(self) -> list[_Held]:
        return [self.held.pop(number) for number in self.packer.next_pack()]

    def state(self) -> tuple[tuple[RestoreKey, ...], Int64Array, int, tuple[int, ...]]:
        """Returns the keys of what is held, a row of numbers for each, and two totals."""
        state = self.packer.state()
        rows = np.column_stack([state[name] for name in _COLUMNS if name in state])
        keys = tuple([held.key for held in self.held.values()])
        return keys, rows, state["added"], state["totals"]

    def restore(
        self,
        keys: tuple[RestoreKey, ...],
        rows: npt.ArrayLike,
        added: int,
        totals: tuple[int, ...],
    ) -> None:
        last = 1 + len(totals)
        shape = (len(keys), -1) if keys else (0, last + 1)
        rows = np.array(rows, dtype=np.int64).reshape(shape)
        self.packer.restore(
            {
                "numbers": rows[:, 0],
                "lengths": rows[:, 1:last],
                "packs": rows[:, last:].reshape(-1),
                "added": added,
                "totals": totals,
            }
        )
        lengths = [row[0] if len(row) == 1 else tuple(row) for row in rows[:, 1:last].tolist()]
        held = zip(self.packer.held(), keys, lengths, strict=True)
        self.held = {number: _Held(_checked(key), SKIPPED, own) for number, key, own in held}


class FillCursor(Cursor[list[Any]]):
    """A place among packs."""

    def __init__(self, spec: FilledPacks, inner: MeasureCursor[Any]) -> None:
        self._spec = spec
        self._inner = inner
        self._groups: dict[GroupKey, _Group] = {}
        self._full: _Group | None = None
        self._pack: list[_Held] = []
        self._again = Again(spec.restore_member)
        self._has_ended = False
        self._measure = Measure(spec.packing)
        self._has_one_group = spec.packing.group_by is None
        self._group_of = spec.grouping.run()

    def __next__(self) -> list[Any]:
        """Returns the samples of the next pack."""
        while not self._has_ended:
            # Only the group that a sample was added to can have become full.
            if self._full is not None:
                if self._full.packer.is_full:
                    return self._give(self._full.take())
                self._full = None
            try:
                sample = next(self._inner)
            except StopIteration:
                self._has_ended = True
                break
            if not self._put(self._inner.key, sample):
                return self._give([_Held(self._inner.key, sample, self._inner.length)])
        return self._give(self._rest())

    def _give(self, pack: list[_Held]) -> list[Any]:
        self.key = ("pack", current_context().batch_index, *(held.key for held in pack))
        again = self._again
        self._pack = pack
        return [again(key) if sample is SKIPPED else sample for key, sample, _ in pack]

    @property
    def cost(self) -> float:
        """What the pack given last costs, by the packing's cost model."""
        model, resources = self._spec.packing.cost, self._spec.packing.resources
        tokens = squares = tiles = 0
        for _, _, lengths in self._pack:
            if isinstance(lengths, dict):  # of one that is alone in its pack
                lengths = tuple(int(lengths[name]) for name in resources)
            own = lengths[0] if isinstance(lengths, tuple) else int(lengths)
            tokens += own
            squares += own * own
            tiles += lengths[1] if isinstance(lengths, tuple) else 0
        cost: float = model.token * tokens + model.token_squared * squares + model.tile * tiles
        return cost

    def _put(self, key: RestoreKey, sample: Any) -> bool:
        """Puts a sample into the buffer of its group; False if it is to go out alone."""
        length = self._inner.length
        if type(length) is int and 0 < length <= self._measure.longest:
            pieces: list[Piece] = [(key, length)]
        else:
            pieces = list(self._measure.pieces(key, sample, length))
            if not pieces:
                return self._spec.packing.overlong != "alone"
        found = None if self._has_one_group else self._group_of(key, sample)
        if found is SKIPPED:
            return True
        group = self._groups.get(found)
        if group is None:
            group = self._groups[found] = _Group(self._spec.packing)
        for piece_key, lengths in pieces:
            group.add(piece_key, sample, lengths)
        if group.packer.is_full:
            self._full = group
        return True

    def _rest(self) -> list[_Held]:
        """Returns a pack of what is held when the data have ended."""
        packing = self._spec.packing
        for group in self._groups.values():
            while group.packer.num_held:
                pack = group.take()
                is_last = packing.drop_last and not group.packer.num_held
                if packing.end_of_data == "pack" and not is_last:
                    return pack
                for key, sample, _ in pack:
                    left_out(key, sample, "left over at the end of the data")
        raise StopIteration

    def snapshot(self) -> Snapshot:
        """Returns what is held, and the place below."""
        groups = tuple((name, *group.state()) for name, group in self._groups.items())
        fields = {"ended": int(self._has_ended), "groups": groups}
        return Snapshot("pack", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        """Goes to the place of a snapshot."""
        snapshot.expect("pack", 1)
        groups: dict[GroupKey, _Group] = {}
        try:
            for name, *state in snapshot.field("groups"):
                groups[name] = _Group(self._spec.packing)
                groups[name].restore(*state)
        except (TypeError, ValueError) as error:
            raise StateError(f"The checkpoint's stage 'pack' is damaged: {error}") from error
        has_ended = bool(snapshot.count("ended"))
        self._inner.restore(snapshot.inner[0])
        self._groups, self._has_ended = groups, has_ended
        keys = [held.key for group in groups.values() for held in group.held.values()]
        self._again = Again(self._spec.restore_member, keys)
        # At most one, since packs are given as soon as they can be.
        self._full = next((g for g in groups.values() if g.packer.is_full), None)


def _checked(key: Any) -> RestoreKey:
    if not isinstance(key, tuple) or not key:
        raise ValueError(f"{key!r:.80} is no restore key")
    return key
