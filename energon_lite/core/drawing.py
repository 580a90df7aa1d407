"""Which functions of a pipeline may draw from the global generators, and how they are seeded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from energon_lite.core.global_generators import StreamGenerators
from energon_lite.core.topology import Stream
from energon_lite.core.user_function import UserFunction


def generators_of(
    dataset: Any, stream: Stream, drawn: Sequence[str] = ()
) -> StreamGenerators | None:
    """Returns what a stream's hooks may draw from; None if all are marked `@stateless`.

    Args:
        dataset: the pipeline.
        stream: the stream.
        drawn: names of the generators that were drawn from so far.
    """
    drawing = list(_drawing(dataset))
    if not drawing:
        return None
    seed = dataset.worker_config.seed_offset if dataset.worker_config else 0
    return StreamGenerators(seed, stream, drawn, any(is_again for _, is_again in drawing))


def _drawing(
    dataset: Any, is_expanded: bool = False, is_held: bool = False
) -> Iterator[tuple[UserFunction, bool]]:
    """Yields the functions that may draw, and whether a resume may make their calls again.

    Args:
        dataset: a dataset of the pipeline.
        is_expanded: whether a generator hook lies above; its last input is made again.
        is_held: whether a buffer lies above; what it held is made again.
    """
    is_held = is_held or getattr(dataset, "holds_back", False)
    is_expanded = is_expanded or any(function.is_generator for function in dataset.functions)
    for function in dataset.functions:
        if function.may_draw:
            yield function, is_expanded or (is_held and function.is_stateless)
    for child in dataset.children:
        yield from _drawing(child, is_expanded, is_held)
