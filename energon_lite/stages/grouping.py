"""Which samples may share a pack or a batch: those of one group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from energon_lite.core.errors import FatalSampleError
from energon_lite.core.keys import leaves
from energon_lite.core.state import RestoreKey
from energon_lite.core.topology import WorkerConfig
from energon_lite.core.user_function import SKIPPED, FunctionRun, UserFunction
from energon_lite.stages.pack_samples import has_images

GroupKey = Any  # a text, number, bool, None, or a tuple of these


class Grouping:
    """Determines the group of a sample.

    Args:
        group_by: "source", "modality", a function of the user, or None for one group.
        seed: of the run.
        config: has the error handlers.
    """

    def __init__(self, group_by: Any, seed: int = 0, config: WorkerConfig | None = None) -> None:
        self.group_by = group_by
        self.function: UserFunction | None = None
        if callable(group_by):
            self.function = UserFunction(
                _Checked(group_by), name="group_by", seed=seed, config=config
            )

    @property
    def name(self) -> str | None:
        """Returns its name in a configuration."""
        return "function" if callable(self.group_by) else self.group_by

    def run(self) -> Callable[[RestoreKey, Any], GroupKey]:
        """Returns one stream's use: of key and sample the group, `SKIPPED` where that failed."""
        if self.function is not None:
            return _Run(self.function)
        return {None: _no_group, "source": _source, "modality": _modality}[self.group_by]


class _Checked:
    """The user's function, with its result checked."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.__wrapped__ = function

    def __call__(self, sample: Any) -> tuple[GroupKey]:
        group = self.__wrapped__(sample)
        parts = group if isinstance(group, tuple) else (group,)
        if not all(part is None or isinstance(part, (str, int, bool)) for part in parts):
            raise FatalSampleError.from_sample(
                sample,
                f"group_by returned {group!r:.80}, which a checkpoint cannot keep; return a text, "
                "number, bool, None or a tuple of these",
            )
        return (group,)


class _Run:
    def __init__(self, function: UserFunction) -> None:
        self._run = FunctionRun(function)

    def __call__(self, key: RestoreKey, sample: Any) -> GroupKey:
        found = self._run.call(key, sample)
        return found if found is SKIPPED else found[0]


def _no_group(key: RestoreKey, sample: Any) -> None:
    del key, sample


def _source(key: RestoreKey, sample: Any) -> str:
    del sample
    source: str = next(leaves(key))[0]
    return source


def _modality(key: RestoreKey, sample: Any) -> str:
    del key
    return "images" if has_images(sample) else "text"
