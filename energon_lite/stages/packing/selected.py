"""Lists of samples that a function of the user puts into packs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from energon_lite.core.dataset import Cursor, SavableDataset
from energon_lite.core.errors import FatalSampleError, StateError
from energon_lite.core.state import JSON, RestoreKey, Snapshot
from energon_lite.core.stream_context import Again, current_context
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction, describe_input
from energon_lite.stages.batching import Collected
from energon_lite.stages.overlong import left_out


@dataclass
class PackedSamplesOutput:
    """What `select_samples_to_pack` may give instead of a list of packs.

    Attributes:
        packs: lists of samples.
        pushback: samples to be looked at again, with those read next.
    """

    packs: list[list[Any]]
    pushback: list[Any] = field(default_factory=list)


class SelectedPacks(Collected):
    """Lists of samples that a function chose from a full buffer.

    When no pack is left, the buffer is filled up and given to the function. Samples that it puts
    neither into a pack nor back are left out, and counted.

    State: the restore keys of the samples in the buffer and of those in packs not given yet.
    Length: at most that below.
    Keys: `("pack", slot, key, key, ...)`.

    Args:
        dataset: the samples; they must be replayable, as those held are saved as keys.
        buffer_size: samples of a full buffer.
        select: gives packs, lists of samples, or a `PackedSamplesOutput`.
        drop_last: whether what is held when the data end is left out.
    """

    kind: ClassVar[str] = "pack"

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buffer_size: int,
        select: UserFunction,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, "Packs")
        if buffer_size < 1:
            raise ValueError(f"packing_buffer_size={buffer_size} must be at least 1")
        if select.is_generator:
            raise ValueError(f"{select.where} is a generator; return the list of packs")
        self.buffer_size = buffer_size
        self.select = select
        self.drop_last = drop_last

    def cursor(self, stream: Stream) -> Cursor[list[Any]]:
        """Returns a fresh cursor."""
        return _SelectCursor(self, self.dataset.cursor(stream))

    @property
    def samples_are_known(self) -> bool:
        """It is not: the function decides it. `num_items` and `expected` take one a pack."""
        return False

    def config(self) -> dict[str, JSON]:
        """Returns the size of the buffer."""
        return {
            "stage": "select_packs",
            "packing_buffer_size": self.buffer_size,
            "drop_last": self.drop_last,
            "of": self.dataset.config(),
        }


# A restore key and its sample; `SKIPPED` for one that has to be made again.
_Held = tuple[RestoreKey, Any]


class _SelectCursor(Cursor[list[Any]]):
    def __init__(self, spec: SelectedPacks, inner: Cursor[Any]) -> None:
        self._spec = spec
        self._inner = inner
        self._run = FunctionRun(spec.select)
        self._held: list[_Held] = []
        self._packs: list[list[_Held]] = []
        self._again = Again(spec.restore_member)

    def __next__(self) -> list[Any]:
        while True:
            is_last = not self._fill()
            if not self._packs:
                if not self._held:
                    raise StopIteration
                if is_last and self._spec.drop_last:
                    self._lose(self._held, "left over at the end of the data")
                    self._held = []
                    continue
                self._select(is_last)
                continue
            pack = self._packs.pop(0)
            self.key = ("pack", current_context().batch_index, *(key for key, _ in pack))
            return self._samples(pack)

    def _fill(self) -> bool:
        """Reads until the buffer is full, packs not given included; False at the end."""
        num_held = len(self._held) + sum(map(len, self._packs))
        for _ in range(self._spec.buffer_size - num_held):
            try:
                sample = next(self._inner)
            except StopIteration:
                return False
            self._held.append((self._inner.key, sample))
        return True

    def _samples(self, held: Iterable[_Held]) -> list[Any]:
        again = self._again
        return [again(key) if sample is SKIPPED else sample for key, sample in held]

    def _select(self, is_last: bool) -> None:
        """Asks the user's function for packs of what is held."""
        keys = [key for key, _ in self._held]
        samples = self._samples(self._held)
        self._held = []
        found = self._run.call(("select", *keys), samples)
        if found is SKIPPED:
            return
        packs, pushback = self._parts(found)
        unused = dict(enumerate(zip(keys, samples, strict=True)))
        places = {id(sample): i for i, sample in enumerate(samples)}
        by_key = {key: i for i, key in enumerate(keys)}

        def taken(sample: Any) -> _Held:
            # A function may have made a new sample of one that it got.
            own_key = getattr(sample, "__restore_key__", None)
            place = places.get(id(sample), by_key.get(own_key) if own_key else None)
            if place is None or unused.pop(place, None) is None:
                name = describe_input(sample)[0] or repr(sample)[:80]
                raise FatalSampleError.from_sample_key(
                    name,
                    f"{self._spec.select.where} gave it "
                    + ("but did not get it" if place is None else "twice")
                    + "; put each sample that it gets into one pack, or into `pushback`",
                )
            return keys[place], sample

        self._packs = [[taken(sample) for sample in pack] for pack in packs if len(pack)]
        self._held = [taken(sample) for sample in pushback]
        self._lose(unused.values(), "select_samples_to_pack put it into no pack")
        if not self._packs and self._held and not unused:
            self._give_up(is_last)

    def _parts(self, found: Any) -> tuple[list[list[Any]], list[Any]]:
        packs, pushback = found, []
        if isinstance(found, PackedSamplesOutput):
            packs, pushback = found.packs, found.pushback
        if not isinstance(packs, (list, tuple)) or not all(
            isinstance(pack, (list, tuple)) for pack in packs
        ):
            raise FatalSampleError(
                f"{self._spec.select.where} gave {packs!r:.80}; return a list of lists of samples"
            )
        return list(packs), list(pushback)

    def _give_up(self, is_last: bool) -> None:
        """Ends what would go on for ever: the function took nothing of a full buffer."""
        if not is_last:
            raise FatalSampleError(
                f"{self._spec.select.where} pushed all {len(self._held)} samples of a full buffer "
                "back and made no pack; give it a larger packing_buffer_size, or let it make one"
            )
        self._lose(self._held, "pushed back at the end of the data")
        self._held = []

    def _lose(self, lost: Iterable[_Held], why: str) -> None:
        for key, sample in lost:
            left_out(key, sample, why)

    def snapshot(self) -> Snapshot:
        fields = {
            "held": tuple(key for key, _ in self._held),
            "packs": tuple(tuple(key for key, _ in pack) for pack in self._packs),
        }
        return Snapshot("select_packs", fields, (self._inner.snapshot(),))

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.expect("select_packs", 1)
        held, packs = snapshot.field("held"), snapshot.field("packs")
        lists = (held, *packs) if isinstance(packs, tuple) else (None,)
        if not all(isinstance(keys, tuple) and all(map(_is_key, keys)) for keys in lists):
            raise StateError("The checkpoint's stage 'select_packs' has no lists of restore keys.")
        self._inner.restore(snapshot.inner[0])
        self._held = [(key, SKIPPED) for key in held]
        self._again = Again(self._spec.restore_member, (held, *packs))
        # An edited blend may have left none of a pack's samples.
        self._packs = [[(key, SKIPPED) for key in pack] for pack in packs if pack]


def _is_key(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) > 0
