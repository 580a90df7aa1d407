"""Packs of all samples that are held, by one of the packers that see them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from energon_lite.batching.best import pack_best
from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.lists import Lists

ALGORITHMS = {
    "best": pack_best,
    "first_fit_decreasing": first_fit_decreasing,
    "best_fit_decreasing": first_fit_decreasing,
    "first_fit": first_fit,
    "sequential": sequential,
}


class WindowPacker:
    """Packs a full buffer at once, then fills it anew; the pack with most room is held back.

    Packs come in the order of their oldest sample, so that long samples do not come first.
    `StreamingPacker`, which has the same methods, fills packs better from the same buffer.

    Args:
        capacity: what a pack can hold; a number, or one for each resource.
        algorithm: a name of `ALGORITHMS`.
        buffer_size: samples held at least; it grows to four packs' worth.
        max_samples: samples in one pack at most.
        align: lengths are rounded up to a multiple of this; a number, or one for each resource.
    """

    def __init__(
        self,
        capacity: int | Sequence[int],
        *,
        algorithm: str,
        buffer_size: int = 256,
        max_samples: int | None = None,
        align: Sequence[int] | int = 1,
    ) -> None:
        self._capacity = (capacity,) if isinstance(capacity, int) else tuple(capacity)
        self._align = (align,) * len(self._capacity) if isinstance(align, int) else tuple(align)
        self._algorithm = algorithm
        self._max_samples = max_samples
        self._buffer_size = buffer_size
        self._waiting: dict[int, tuple[int, ...]] = {}
        self._ready: list[list[int]] = []
        self._ready_lengths: dict[int, tuple[int, ...]] = {}
        self._totals = [0] * len(self._capacity)
        self.num_added = 0

    @property
    def num_held(self) -> int:
        """Samples that are in no pack given yet."""
        return len(self._waiting) + len(self._ready_lengths)

    @property
    def target_size(self) -> int:
        """Samples to hold before they are packed."""
        if not self.num_added:
            return self._buffer_size
        # Four packs' worth, by the resource of which a pack holds fewest.
        worth = min(
            -(-4 * capacity * self.num_added // total)
            for capacity, total in zip(self._capacity, self._totals, strict=True)
            if total
        )
        if self._max_samples is not None:
            worth = min(worth, 4 * self._max_samples)
        return max(self._buffer_size, worth)

    @property
    def is_full(self) -> bool:
        """Whether a pack can be given without reading on."""
        return bool(self._ready) or len(self._waiting) >= self.target_size

    def add(self, lengths: int | Sequence[int]) -> None:
        """Adds the next sample, of this length, or these."""
        lengths = (lengths,) if isinstance(lengths, int) else lengths
        self._waiting[self.num_added] = tuple(lengths)
        self.num_added += 1
        for r, (length, align) in enumerate(zip(lengths, self._align, strict=True)):
            self._totals[r] += -(-length // align) * align

    def next_pack(self) -> list[int]:
        """Returns the numbers of the next pack's samples, in the order they came.

        Raises:
            IndexError: No sample is held.
        """
        if not self._ready:
            self._pack(holds_back=self.is_full)
        pack = self._ready.pop(0)
        for number in pack:
            del self._ready_lengths[number]
        return pack

    def _pack(self, holds_back: bool) -> None:
        numbers = list(self._waiting)
        lengths = np.array(list(self._waiting.values()), dtype=np.int64)
        packs = self._packed(lengths)
        fills = (packs.sizes(lengths) / np.array(self._capacity)).max(axis=1)
        kept = -1
        if holds_back and len(packs) > 1:
            kept = len(packs) - 1 if self._algorithm == "sequential" else int(fills.argmin())
        found = [sorted(numbers[i] for i in pack) for j, pack in enumerate(packs) if j != kept]
        self._ready = sorted(found)
        if not holds_back:  # it is the end: what was left over comes last
            last = sorted(numbers[i] for i in packs[int(fills.argmin())])
            self._ready.sort(key=lambda pack: pack == last)
        for number in (number for pack in found for number in pack):
            self._ready_lengths[number] = self._waiting.pop(number)

    def _packed(self, lengths: Any) -> Lists:
        packer: Any = ALGORITHMS[self._algorithm]
        return packer(  # type: ignore[no-any-return]
            lengths, self._capacity, max_samples=self._max_samples, align=self._align
        )

    def held(self) -> list[int]:
        """Returns the numbers of the samples held, in the order they came."""
        return sorted((*self._waiting, *self._ready_lengths))

    def state(self) -> dict[str, Any]:
        """Returns what is held.

        Returns:
            `numbers` (n,), rising; `lengths` (n, R); `packs` (n,), which of the packs that are
            ready a sample is in, -1 for none; `added`; `totals` of the lengths, R of them.
        """
        held = {**self._waiting, **self._ready_lengths}
        numbers = sorted(held)
        in_pack = {number: i for i, pack in enumerate(self._ready) for number in pack}
        return {
            "numbers": np.array(numbers, dtype=np.int64),
            "lengths": np.array([held[n] for n in numbers]).reshape(-1, len(self._capacity)),
            "added": self.num_added,
            "totals": tuple(self._totals),
            "packs": np.array([in_pack.get(n, -1) for n in numbers], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state, also one that was JSON meanwhile.

        Raises:
            ValueError: It is not one of such a packer.
        """
        try:
            numbers = [int(number) for number in state["numbers"]]
            lengths = [tuple(int(length) for length in row) for row in state["lengths"]]
            packs = [int(pack) for pack in state["packs"]]
            # Of an edited blend, some packs may be left out.
            by_pack: dict[int, list[int]] = {pack: [] for pack in sorted(packs) if pack >= 0}
            for number, pack in zip(numbers, packs, strict=True):
                if pack >= 0:
                    by_pack[pack].append(number)
            ready = list(by_pack.values())
            added, totals = int(state["added"]), [int(total) for total in state["totals"]]
            held = dict(zip(numbers, lengths, strict=True))
            ready_lengths = {number: held.pop(number) for pack in ready for number in pack}
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the state of the packer is damaged ({error!r})") from None
        is_whole = sorted(set(numbers)) == numbers and all(0 <= n < added for n in numbers)
        if not is_whole or len(totals) != len(self._capacity):
            raise ValueError("the state of the packer is damaged, or of other resources")
        if max(totals) < added:  # each sample has a length above 0
            raise ValueError(f"the state of the packer has {added} samples of {totals} tokens")
        if any(len(row) != len(self._capacity) for row in lengths):
            raise ValueError("the state of the packer is of other resources")
        self._waiting, self._ready, self._ready_lengths = held, ready, ready_lengths
        self._totals, self.num_added = totals, added
