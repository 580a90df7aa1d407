"""Finds what is odd about the parts of a dataset before training meets it."""

from __future__ import annotations

import re
import typing
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from energon_lite.decoding.sample_decoder import type_of_part
from energon_lite.extras.prepare.index_writer import counts_of_groups, largest_sample
from energon_lite.formats.field_access import FieldMap, is_reserved, listing

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
_PLAIN = {str, int, float, list, torch.Tensor, np.ndarray}


def odd_parts(
    index: PurePath,
    counts: Mapping[str, int],
    num_samples: int,
    field_map: FieldMap | None,
    sample_type: type[Any] | None,
) -> tuple[list[str], list[str]]:
    """Finds parts that look like samples, are of another type than their field, or are missing.

    Args:
        index: the index database of the data.
        counts: number of members by part name; empty where they are not known.
        num_samples: number of samples.
        field_map: the fields and their parts; None for crude samples.
        sample_type: the class of the samples, for the types of its fields.

    Returns:
        Why a run would read wrong samples, and what else is odd.
    """
    errors, warnings = _numbered(index, counts, num_samples, field_map.parts if field_map else ())
    fields = field_map.paths if field_map and counts else {}
    try:
        hints = typing.get_type_hints(sample_type) if sample_type else {}
    except (NameError, TypeError):  # a name that only type checkers import
        hints = {}
    groups = [[path.part for path in paths] for paths in fields.values()]
    for name, group, count in zip(fields, groups, counts_of_groups(index, groups), strict=True):
        kinds = typing.get_args(hints.get(name, Any) | None)
        wanted = {typing.get_origin(kind) or kind for kind in kinds} - {type(None)}
        whole = [path.part for path in fields[name] if not path.keys and path.part in counts]
        for part in whole if wanted <= _PLAIN else ():
            made = type_of_part(part)
            if made is not None and not wanted & _TAKEN_BY[made]:
                shown = " or ".join(sorted(kind.__name__ for kind in wanted))
                errors.append(
                    f"field {name!r} is of type {shown}, and its part {part!r} becomes "
                    f"{made.__name__}; map it to another part, or use another sample type"
                )
        if count < num_samples:
            warnings.append(
                f"{num_samples - count:,} of {num_samples:,} samples: no part "
                f"{' or '.join(map(repr, group))} (field {name!r}); a run skips them"
            )
    if reserved := [part for part in counts if is_reserved(part)]:
        warnings.append(
            f"parts {listing(reserved)} are not read: names in double underscores are those of "
            "fields that the pipeline sets. Rename them if samples need them"
        )
    return errors, warnings


def _numbered(
    index: PurePath, counts: Mapping[str, int], num_samples: int, named: Collection[str]
) -> tuple[list[str], list[str]]:
    """Finds parts of one sample that are rather samples of their own, with dots in their keys."""
    unnamed = {part: count for part, count in counts.items() if part not in named}
    forms = _forms(unnamed)
    sure = [parts for parts in forms if len(parts) > num_samples]
    numbered = (parts for parts in forms if _LEADING.search(parts[0]))
    likely = [parts for parts in numbered if sum(counts[part] for part in parts) > num_samples]
    suspects = {*chain(*sure, *likely), *numbered_parts(unnamed, 3)}
    if not suspects:
        return [], []
    key, found = largest_sample(index, sorted(suspects)[:_ASKED])
    text = dotted_keys(key, [part for part in found if part in suspects])
    return ([text], []) if sure else ([], [text])


def _forms(parts: Iterable[str]) -> list[list[str]]:
    """Groups parts that differ by numbers before their last dot only."""
    forms = defaultdict(list)
    for part in parts:
        stem, _, extension = part.rpartition(".")
        if _DIGITS.search(stem):
            forms[_DIGITS.sub("0", stem), extension].append(part)
    return [*forms.values()]


def numbered_parts(counts: Mapping[str, int], least: int = 2) -> set[str]:
    """Returns parts that are rather the ends of keys with dots.

    They differ by numbers only, and are more than the samples that have one of them: the pictures
    of a sample are numbered in the same way in each.

    Args:
        counts: number of members by part name.
        least: number of such parts.
    """
    return {
        part
        for parts in _forms(counts)
        if len(parts) >= least and len(parts) > max(counts[part] for part in parts)
        for part in parts
    }


def dotted_keys(key: str, parts: Sequence[str], limit: int = 10) -> str:
    """Describes parts of a sample that are rather samples of their own."""
    fixed = f"{key}.{parts[0]}".rpartition(".")[0].replace(".", "_")
    return (
        f"sample {key!r} has {len(parts):,} parts that differ by numbers only: "
        f"{listing((f'{key}.{part}' for part in parts), limit)}. {FIRST_DOT}; where these are "
        f"samples of their own, write keys without dots ({fixed!r})"
    )
