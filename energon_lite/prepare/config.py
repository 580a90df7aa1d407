"""The `dataset.yaml` that `prepare` writes, checked before the tars are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.core.samples import SAMPLE_TYPES, Sample
from energon_lite.storage.field_access import FieldMap, check_fields
from energon_lite.storage.sqlite import count_samples_with, has_sample_with
from energon_lite.storage.yaml import dump_yaml

CRUDE = "CrudeWebdataset"
SAMPLE_LOADER = "sample_loader.py"
_MODULE = "megatron.energon"
# Energon has this class, but not at its top level.
_MODULES = {"VQAOCRSample": "megatron.energon.flavors.vqa_and_ocr"}


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """A field of a sample type, as a user is asked for it."""

    name: str
    type_name: str
    is_required: bool


def sample_type_names() -> tuple[str, ...]:
    """Returns the names that `sample_type` may have."""
    return (*sorted(SAMPLE_TYPES), CRUDE)


def sample_type_of(name: str) -> type[Sample] | None:
    """Finds a sample type by name; None for crude samples.

    Raises:
        ValueError: There is none of this name.
    """
    if name == CRUDE:
        return None
    if name not in SAMPLE_TYPES:
        raise ValueError(
            f"unknown sample type {name!r}.{did_you_mean(name, sample_type_names())} "
            "For a class of your own, write dataset.yaml by hand"
        )
    return SAMPLE_TYPES[name]


def fields_of(name: str) -> list[FieldSpec]:
    """Returns the fields of a sample type that a field map may name, none for crude samples.

    Raises:
        ValueError: There is no sample type of this name.
    """
    kind = sample_type_of(name)
    if kind is None:
        return []
    return [
        FieldSpec(
            item.name,
            item.type if isinstance(item.type, str) else item.type.__name__,
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING,
        )
        for item in dataclasses.fields(kind)
        if item.init and not item.name.startswith("__")
    ]


def check_config(
    sample_type: str | None, field_map: Mapping[str, str | list[str]] | None
) -> FieldMap | None:
    """Checks that a field map fits its sample type.

    Returns:
        The field map, or None where there is none to write.

    Raises:
        ValueError: The type is unknown, or type and map do not go together.
        DatasetFormatError: A field is unknown, missing, or its access string is malformed.
    """
    if sample_type is None:
        if field_map is not None:
            raise ValueError("a field map needs a sample type (sample_type, --sample-type)")
        return None
    kind = sample_type_of(sample_type)
    if kind is None:
        if field_map:
            raise ValueError(f"{CRUDE} has no field map: a cooker makes its samples")
        return None
    if not field_map:
        names = ", ".join(spec.name for spec in fields_of(sample_type))
        raise ValueError(f"{sample_type} needs a field map (field_map, --field-map) for: {names}")
    parsed = FieldMap.parse(field_map, "field map")
    check_fields(parsed, kind, "field map")
    return parsed


def check_parts(field_map: FieldMap, parts: Collection[str], root: str) -> None:
    """Checks that the data has at least one alternative of each field.

    Raises:
        DatasetFormatError: Names the field, what it asks for, and the parts that are there.
    """
    for name, ways in field_map.paths.items():
        wanted = [way.part for way in ways]
        if not any(part in parts for part in wanted):
            raise DatasetFormatError(
                f"{root}: field {name!r} is mapped to {','.join(map(str, ways))!r}, but no sample "
                f"has a part {' or '.join(map(repr, wanted))}.{did_you_mean(wanted[0], parts)}"
            )


def check_samples(field_map: FieldMap, index: Path, num_samples: int, root: str) -> None:
    """Checks that the data has a sample that can be made: one with a part for each field.

    Args:
        field_map: the fields and their parts.
        index: the index database of the data.
        num_samples: samples in it.
        root: the dataset, for the error text.

    Raises:
        DatasetFormatError: Counts the samples that have the parts of each field.
    """
    groups = {name: [way.part for way in ways] for name, ways in field_map.paths.items()}
    if has_sample_with(index, list(groups.values())):
        return
    counts = "; ".join(
        f"{name!r} ({' or '.join(parts)}) is in {count_samples_with(index, parts):,}"
        for name, parts in groups.items()
    )
    raise DatasetFormatError(
        f"{root}: none of {num_samples:,} samples has the parts of all fields: {counts}. Files of "
        "a sample have the same name up to the first dot and follow each other in the tar"
    )


def config_text(sample_type: str, field_map: FieldMap | None, by_loader: bool = False) -> str:
    """Returns the content of `dataset.yaml`: a field map, a sample loader, or a dataset class."""
    if field_map is None and not by_loader:
        return dump_yaml({"__module__": _MODULE, "__class__": sample_type})
    reference = {"__module__": _MODULES.get(sample_type, _MODULE), "__class__": sample_type}
    if field_map is not None:
        return dump_yaml({"sample_type": reference, "field_map": field_map.to_mapping()})
    functions = {name: f"{SAMPLE_LOADER}:{name}" for name in ("sample_loader", "part_filter")}
    return dump_yaml({"sample_type": reference, **functions})


def loader_text(sample_type: str, parts: Iterable[str]) -> str:
    """Returns a `sample_loader.py` for the user to edit."""
    lines = [
        f'        "{spec.name}": parts["TODO"],  # {spec.type_name}'
        f"{'' if spec.is_required else ', or leave it out'}"
        for spec in fields_of(sample_type)
    ]
    return "\n".join(
        [
            f'"""Makes the fields of {sample_type}. TODO: name the parts that they come from."""',
            "\n",
            "def sample_loader(parts):",
            "    return {  # parts are decoded",
            *lines,
            "    }",
            "\n",
            "def part_filter(part):",
            f"    return part in {tuple(parts)!r}  # others are not read",
            "",
        ]
    )
