"""Finds what is odd about the parts of a dataset before training meets it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import PurePath

from energon_lite.extras.prepare.index_writer import counts_of_groups, largest_sample
from energon_lite.formats.field_access import FieldMap, is_reserved, listing, spelled

FIRST_DOT = "The key of a sample ends at the first dot of a file's name (`a.b.jpg` is part 'b.jpg')"
_ASKED = 500  # part names in a query
_DIGITS = re.compile(r"\d+")
_LEADING = re.compile(r"(^|\.)\d")  # of a piece between dots


def odd_parts(
    index: PurePath, counts: Mapping[str, int], num_samples: int, field_map: FieldMap | None
) -> tuple[list[str], list[str]]:
    """Finds parts that look like samples, and samples that lack a part of a field.

    Args:
        index: the index database of the data.
        counts: number of members by part name; empty where they are not known.
        num_samples: number of samples.
        field_map: the fields and their parts; None for crude samples.

    Returns:
        Why a run would read wrong samples, and what else is odd.
    """
    named = spelled(field_map.parts, counts) if field_map else []
    errors, warnings = _numbered(index, counts, num_samples, named)
    fields = field_map.paths if field_map and counts else {}
    groups = [[path.part for path in paths] for paths in fields.values()]
    found = counts_of_groups(index, [spelled(group, counts) for group in groups])
    for name, group, count in zip(fields, groups, found, strict=True):
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
