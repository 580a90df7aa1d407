"""What can be called in Energon 7.4.1 can be called here, with the same meaning of arguments."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import energon_lite
from energon_lite.names.energon_modules import ENERGON_MODULES
from energon_lite.names.later import REASONS

from .read_signatures import KINDS, default_of

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("energon_signatures.json").read_text())
PRESENT = [name for name in TABLE if name not in REASONS]

_IMMUTABLE = "datasets are immutable here; a loader's state has what they would save"
_INSIDE = "which samples a worker reads is arithmetic on the order, not part of the dataset class"
_STATELESS = "None looks for @stateless on the function; False and True are as in Energon"
_READ_AT_ONCE = "made of a path or of what the file holds; not of parsed parts"

# "Class.method", "Class.method(parameter)" or "Class.property", "*" for any class → why it is
# otherwise here.
EXCEPTIONS: dict[str, str] = {
    "*.save_state": _IMMUTABLE,
    "*.restore_state": _IMMUTABLE,
    "*.reset_state_own": _IMMUTABLE,
    "*.reset_state_deep": _IMMUTABLE,
    "*.len_worker": "samples belong to streams, not to workers",
    "*.worker_has_samples": "samples belong to streams, not to workers",
    "SavableDataset(worker_config)": "abstract; see docs/architecture.md for stages of one's own",
    "BlendDataset.dataset": "there are several; Energon's fails",
    "ConcatDataset.dataset": "there are several; Energon's fails",
    "*.shard_workers": _INSIDE,
    "*.slice_workers": _INSIDE,
    "*.split_samples_to_workers": _INSIDE,
    "*.config": "the settings are those of the dataset that is built",
    "AugmentTaskEncoder.encode_batch(batch_data)": "called batch, as in TaskEncoder",
    "AugmentTaskEncoder.encode_batch(batch)": "called so in TaskEncoder",
    "GroupBatchDataset.restore_sample(index)": "called restore_key, as in all other classes",
    "GroupBatchDataset.restore_sample(restore_key)": "called so in all other classes",
    "MapDataset(stateless_map_fn)": _STATELESS,
    "PackingDataset(final_packer_stateless)": _STATELESS,
    "PackingDataset(sample_encoder_stateless)": _STATELESS,
    "Metadataset(splits)": _READ_AT_ONCE,
    "MetadatasetV2(splits)": _READ_AT_ONCE,
    "BasicDataLoader": "the same class as SavableDataLoader, whose parameters are keywords",
    "JoinedWebdatasetFactory.load_sample": "the sides load, the joiner joins",
    "SavableDataLoader.next_id": "an inner counter",
}


def is_excepted(difference: str) -> str | None:
    """The entry of EXCEPTIONS that a difference falls under."""
    owner, dot, member = difference.partition(".")
    candidates = (difference, f"*{dot}{member}", owner.partition("(")[0] if not dot else "")
    return next((entry for entry in candidates if entry in EXCEPTIONS), None)


def ours(name: str) -> Any:
    if name in energon_lite.__all__:
        return getattr(energon_lite, name)
    module = next(m for m, names in ENERGON_MODULES.items() if name in names)
    return getattr(importlib.import_module(f"energon_lite.{module}"), name)


def differences(theirs: list[list[str]], function: Any, is_method: bool) -> dict[str, str]:
    """What calls of theirs would do otherwise here, by parameter ("" for the whole)."""
    parameters = list(inspect.signature(function).parameters.values())[is_method:]
    named = {p.name: p for p in parameters}
    kinds = {KINDS[p.kind] for p in parameters}
    positions = [p.name for p in parameters if KINDS[p.kind] in ("either", "positional")]
    found: dict[str, str] = {}
    for index, (name, kind, default) in enumerate(theirs):
        if name.startswith("_") and not name.startswith("__"):
            continue  # private
        if kind in ("*", "**"):
            if kind not in kinds:
                found[name] = f"no {kind}{name}"
        elif name not in named:
            if kind == "either" or "**" not in kinds:
                found[name] = f"missing; there are {list(named)}"
        elif kind == "either" and (len(positions) <= index or positions[index] != name):
            found[name] = f"is at another place than {index}: {positions}"
        elif default not in ("required", "object", default_of(named[name])):
            found[name] = f"default {default_of(named[name])} instead of {default}"
    known = {name for name, _, _ in theirs}
    for name, parameter in named.items():
        is_ours = name not in known and KINDS[parameter.kind] not in ("*", "**")
        if is_ours and default_of(parameter) == "required":
            found[name] = "is required here only"
    return found


def all_differences(name: str) -> dict[str, str]:
    row, value = TABLE[name], ours(name)
    found: dict[str, str] = {}
    if row["call"] is not None:
        for parameter, text in differences(row["call"], value, False).items():
            found[f"{name}({parameter})"] = text
    for method, theirs in row.get("methods", {}).items():
        here = getattr(value, method, None)
        if here is None:
            found[f"{name}.{method}"] = "no such method"
            continue
        member = inspect.getattr_static(value, method)
        bound = isinstance(member, staticmethod | classmethod)
        for parameter, text in differences(theirs or [], here, not bound).items():
            found[f"{name}.{method}({parameter})"] = text
    for attribute in row.get("properties", []):
        if not any(
            hasattr(c, attribute) or attribute in vars(c).get("__annotations__", ())
            for c in value.__mro__
        ):
            found[f"{name}.{attribute}"] = "no such property"
    return found


@pytest.mark.parametrize("name", PRESENT)
def test_calls_of_energon_mean_the_same_here(name):
    assert {k: v for k, v in all_differences(name).items() if is_excepted(k) is None} == {}


@pytest.mark.parametrize("name", [name for name in PRESENT if "through" in TABLE[name]])
def test_what_energon_takes_by_kwargs_is_taken_here(name, tmp_path):
    assert "sample_type" in TABLE[name]["through"]
    for keyword in TABLE[name]["through"]:
        with pytest.raises(FileNotFoundError):
            ours(name)(tmp_path / "nothing", batch_size=1, **{keyword: None})
    with pytest.raises(TypeError, match="'nonsense'; besides the named ones there are"):
        ours(name)(tmp_path, batch_size=1, nonsense=1)


def test_every_exception_is_one():
    used = {is_excepted(difference) for name in PRESENT for difference in all_differences(name)}
    assert EXCEPTIONS.keys() - used == set()


def test_every_name_of_energon_is_here_or_explained():
    top = [name for name in TABLE if name not in PRESENT and name not in REASONS]
    assert top == []
    assert len(PRESENT) > 75


def test_task_encoders_take_the_types_of_energon():
    from energon_lite import AugmentTaskEncoder, DefaultTaskEncoder, TaskEncoder

    for kind in (TaskEncoder, DefaultTaskEncoder, AugmentTaskEncoder):
        assert issubclass(type("Mine", kind[int, str, list, dict].__mro_entries__(()), {}), kind)
