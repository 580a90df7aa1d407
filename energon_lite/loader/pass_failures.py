"""How many samples of a validation pass may fail: a share of it, so that small sets are held too.

The limit of a stream (`core.context`) lets 100 failures pass, for bursts in long runs. A small
validation set would lose half of its samples below that, and give another metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from energon_lite.core.dataset import SavableDataset
from energon_lite.core.errors import FatalSampleError
from energon_lite.core.stream_context import SKIP_ALLOWANCE, SkipRecord
from energon_lite.loader.turns import Delivery

# The part of a pass that may fail above `max_skip_rate`; one sample always may.
_ALLOWED_PART = 0.05


@dataclass
class PassFailures:
    """What a rank lost in the pass that is under way.

    Attributes:
        failed: samples that failed, of the batches given.
        drawn: samples drawn for these.
    """

    failed: int = 0
    drawn: int = 0

    @classmethod
    def of(cls, states: Sequence[dict[str, Any]]) -> PassFailures:
        """Returns what the ranks of some states lost."""
        return cls(
            *map(sum, zip((0, 0), *(s.get("failures", (0, 0)) for s in states), strict=True))
        )


class FailureLimit:
    """Ends a validation pass that lost too many samples; others have no limit here.

    A rank that alone lost more than the whole pass may stops at once, where no rank waits for it.
    What the ranks lost together is compared when the pass ends, if they can talk.

    Args:
        dataset: the pipeline.
        max_skip_rate: failures per sample; 1 for any number.
    """

    def __init__(self, dataset: SavableDataset[object], max_skip_rate: float) -> None:
        self._is_on = not (dataset.training or dataset.endless) and max_skip_rate < 1
        self._max_skip_rate = max_skip_rate
        self._num_samples = sum(facts.num_samples for facts in dataset.sources())
        self._last: SkipRecord | None = None

    def counted(self, counts: PassFailures, delivery: Delivery) -> PassFailures:
        """Returns the counts with a batch that is given, or the end of a stream."""
        if not self._is_on:
            return counts
        failed, drawn = counts.failed, counts.drawn + sum([row[1] for row in delivery.costs.rows])
        for record in delivery.skipped:
            if not record.on_purpose:
                failed += record.num_samples
                self._last = record
        return PassFailures(failed, drawn)

    def check(self, failed: int, drawn: int, *, is_whole: bool) -> None:
        """Compares failures with the samples of the pass.

        Args:
            failed: samples that failed.
            drawn: samples drawn.
            is_whole: whether these are of the whole pass, and not of a part of it.

        Raises:
            FatalSampleError: They are too many.
        """
        num_samples = drawn if is_whole else max(drawn, self._num_samples)
        above = min(SKIP_ALLOWANCE, max(1.0, _ALLOWED_PART * num_samples))
        allowed = int(self._max_skip_rate * num_samples + above)
        if failed <= allowed or not self._is_on:
            return
        last = "on other ranks"
        if self._last is not None:
            record = self._last
            last = f"the last here {record.sample_key!r} of {record.source}, stage {record.stage}"
            last += f": {record.error}"
        raise FatalSampleError(
            f"Of {num_samples:,} samples of this validation pass {failed:,} failed, and "
            f"max_skip_rate={self._max_skip_rate:g} allows {allowed:,} ({last}). What is left is "
            "another validation set. Repair the data or the code, raise SkipSample for samples "
            "that are not wanted, or give the loader a higher max_skip_rate."
        )
