"""Lists of samples whose lengths were measured, under rules for the lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from energon_lite.batching.rules import LengthRules
from energon_lite.core.state import JSON, RestoreKey
from energon_lite.core.user_function import SKIPPED
from energon_lite.stages.collect import CollectDataset, Unit, UnitsOf
from energon_lite.stages.grouping import Grouping
from energon_lite.stages.measuring import MeasureDataset
from energon_lite.stages.overlong import Measure


class MeasuredLists(CollectDataset[list[Any]]):
    """Lists of samples of one group, chosen by length.

    State, Length, Keys: those of `CollectDataset`.

    Args:
        dataset: the samples, measured; they must be replayable, as buffered ones are saved as keys.
        name: of the stage, in states and configurations.
        rules: for the lengths of samples, and what must be equal in a list.
        settings: what decides which samples share a list, besides the group.
        what: what buffers samples, for the error if they cannot be re-created.
        seed: of the run.
    """

    def __init__(
        self,
        dataset: MeasureDataset[Any],
        name: str,
        rules: LengthRules,
        settings: Mapping[str, JSON],
        what: str,
        seed: int = 0,
    ) -> None:
        group_by = rules.group_by
        self.grouping = Grouping(
            "source" if isinstance(group_by, Mapping) else group_by, seed, dataset.worker_config
        )
        super().__init__(dataset, name, {"group_by": self.grouping.name, **settings}, what)
        self.rules = rules
        self.num_lengths = len(rules.resources)
        self.group_function = self.grouping.function
        self.seed = seed

    def group_number(self, key: RestoreKey, sample: Any, group: Any) -> Any:
        """Returns what stands for a group; by default the group itself."""
        return group

    def units(self, inner: Any) -> UnitsOf:
        """Returns what turns measured samples into whole ones or parts."""
        measure, group_of = Measure(self.rules, self.kind), self.grouping.run()
        longest, has_one_group = measure.longest, self.rules.group_by is None

        def units(key: RestoreKey, sample: Any) -> Iterable[Unit]:
            length = inner.length
            is_plain = type(length) is int and 0 < length <= longest
            if has_one_group and is_plain:
                return ((key, None, (length,)),)
            pieces = [(key, (length,))] if is_plain else list(measure.pieces(key, sample, length))
            group = None if has_one_group or not pieces else group_of(key, sample)
            if group is SKIPPED:
                return ()
            if not has_one_group and pieces:
                group = self.group_number(key, sample, group)
            return [(part, group, lengths) for part, lengths in pieces]

        return units
