"""A task encoder over another one, whose hooks it has until a subclass overrides them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from energon_lite.task_encoder.base import (
    HOOKS,
    SETTINGS,
    AnyTaskEncoder,
    T_batch,
    T_encoded_sample,
    T_raw_batch,
    T_sample,
    TaskEncoder,
)
from energon_lite.task_encoder.builders import PipelineBuilders


class AugmentTaskEncoder(TaskEncoder[T_sample, T_encoded_sample, T_raw_batch, T_batch]):
    """Has all hooks and settings of another task encoder; a subclass overrides what it changes.

    In an override `super()` calls the hook of the other one. What the other one marks `@stateless`
    is so here; an own override is marked anew.

    Args:
        task_encoder: the other one.

    Raises:
        TypeError: The other one overrides a builder of pipelines, which would build its own.
    """

    def __init__(self, task_encoder: AnyTaskEncoder) -> None:
        self._task_encoder = task_encoder
        for name in sorted(name for name in vars(PipelineBuilders) if name.startswith("build_")):
            if task_encoder.overrides(name):
                raise TypeError(
                    f"{type(task_encoder).__name__} overrides {name}, which cannot be augmented: "
                    f"derive {type(self).__name__} from it instead"
                )
        for name in sorted({*HOOKS, *SETTINGS, "__default_failure_tolerance__"}):
            if getattr(type(self), name) is getattr(AugmentTaskEncoder, name):
                setattr(self, name, getattr(task_encoder, name))

    def overrides(self, hook: str) -> bool:
        """Whether a hook does more than the default, here or in the other task encoder."""
        if getattr(self, hook) == getattr(self._task_encoder, hook):
            return self._task_encoder.overrides(hook)
        return hook in vars(self) or (
            getattr(type(self), hook) is not getattr(AugmentTaskEncoder, hook)
        )

    @property
    def has_own_encode_sample(self) -> bool:
        """Whether the user wrote an `encode_sample`, here or in the other task encoder."""
        other = self._task_encoder
        return self.encode_sample != other.encode_sample or other.has_own_encode_sample


def _of_the_other(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(TaskEncoder, name))
    def hook(self: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(self._task_encoder, name)(*arguments, **named)

    hook.__doc__ = f"Calls `{name}` of the other task encoder."
    return hook


for _name in HOOKS:
    setattr(AugmentTaskEncoder, _name, _of_the_other(_name))
