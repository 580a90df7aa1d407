"""What is odd about the parts of a dataset, found before training meets it."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_lite.decoding.sample_decoder import type_of_part
from energon_lite.storage.field_access import FieldMap, listing
from energon_lite.storage.sqlite import counts_of_groups, largest_sample

FIRST_DOT = "The key of a sample ends at the first dot of a file's name (`a.b.jpg` is part 'b.jpg')"
_ASKED = 500  # part names in a query
_DIGITS = re.compile(r"\d+")
_LEADING = re.compile(r"(^|\.)\d")  # of a piece between dots
# The annotations that take a value of each type, and those that refuse one.
_TAKEN_BY: dict[type, set[Any]] = {
    str: {str},
    int: {int, float, torch.Tensor},
    torch.Tensor: {torch.Tensor, np.ndarray},
}
_PLAIN = {str, int, float, list, torch.Tensor, np.ndarray, type(None)}


def odd_parts(
    index: Path,
    counts: Mapping[str, int],
    num_samples: int,
    field_map: FieldMap | None,
    sample_type: type[Any] | None,
) -> list[tuple[str, bool]]:
    """Lists parts that look like samples of their own, and parts of another type than their field.

    Args:
        index: the index database of the data.
        counts: number of members by part name.
        num_samples: number of samples.
        field_map: the fields and their parts; None for crude samples.
        sample_type: the class of the samples, for the types of its fields.

    Returns:
        What is odd, and whether a run would read wrong samples.
    """
    named = frozenset() if field_map is None else field_map.parts
    odd = _numbered(index, counts, num_samples, named)
    types_of = {} if sample_type is None else _annotations(sample_type)
    for name, paths in {} if field_map is None else field_map.paths.items():
        wanted = types_of.get(name, set())
        shown = " or ".join(
            sorted(kind.__name__ for kind in wanted - {type(None)} if wanted <= _PLAIN)
        )
        for path in paths:
            made = None if path.keys or path.part not in counts else type_of_part(path.part)
            if made is not None and shown and not wanted & _TAKEN_BY[made]:
                text = f"field {name!r} is of type {shown}, and its part {path.part!r} becomes "
                text += f"{made.__name__}; map it to another part, or use another sample type"
                odd.append((text, True))
    return odd


def missing_parts(index: Path, num_samples: int, field_map: FieldMap | None) -> list[str]:
    """Counts for each field the samples that have none of its parts."""
    found = {} if field_map is None else field_map.paths
    groups = [[path.part for path in paths] for paths in found.values()]
    lines = []
    for name, group, count in zip(found, groups, counts_of_groups(index, groups), strict=True):
        if count < num_samples:
            have = "has" if num_samples - count == 1 else "have"
            lines.append(
                f"{num_samples - count:,} of {num_samples:,} samples {have} no part "
                f"{' or '.join(map(repr, group))} (field {name!r}); a run skips them"
            )
    return lines


def _numbered(
    index: Path, counts: Mapping[str, int], num_samples: int, named: Collection[str]
) -> list[tuple[str, bool]]:
    """Finds parts of one sample that are rather samples of their own, with dots in their keys."""
    forms: dict[str, list[str]] = {}
    for part in counts.keys() - named:
        stem, dot, extension = part.rpartition(".")
        if dot and _DIGITS.search(stem):
            forms.setdefault(f"{_DIGITS.sub('0', stem)}.{extension}", []).append(part)
    suspects: set[str] = set()
    is_error = False
    for parts in forms.values():
        is_sure = len(parts) > num_samples
        has_several = len(parts) > 1 and sum(counts[part] for part in parts) > num_samples
        if is_sure or (has_several and _LEADING.search(parts[0])):
            suspects.update(parts)
            is_error |= is_sure
    if not suspects:
        return []
    key, found = largest_sample(index, sorted(suspects)[:_ASKED])
    parts = [part for part in found if part in suspects]
    names = listing([f"{key}.{part}" for part in parts])
    fixed = f"{key}.{parts[0]}".rpartition(".")[0].replace(".", "_")
    text = (
        f"sample {key!r} has {len(parts):,} parts that differ by numbers only: {names}. "
        f"{FIRST_DOT}; where these are samples of their own, write keys without dots ({fixed!r})"
    )
    return [(text, is_error)]


def _annotations(sample_type: type[Any]) -> dict[str, set[Any]]:
    """Returns the types that each field may have, without their arguments."""
    try:
        hints = typing.get_type_hints(sample_type)
    except (NameError, TypeError):  # a name that only type checkers import
        return {}
    found = {}
    for name, hint in hints.items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        found[name] = {typing.get_origin(kind) or kind for kind in kinds}
    return found
