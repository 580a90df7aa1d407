"""Prints the signatures of an installed Megatron-Energon as JSON, for `energon_signatures.json`.

ENERGON_PYTHON tests/energon/read_signatures.py > tests/energon/energon_signatures.json
"""

from __future__ import annotations

import importlib
import inspect
import json
import warnings

# Not at the top level, but imported by code that uses Energon.
DEEPER = {
    "errors": ["FatalSampleError", "SampleException"],
    "epathlib": ["EPath"],
    "savable_loader": ["BasicDataLoader"],
    "flavors.vqa_and_ocr": ["VQAOCRSample"],
    "flavors.base_dataset": ["add_sample_restore_key", "set_sample_restore_key"],
    "metadataset.loader_interface": ["LoadedDataset", "LoadedDatasetList"],
    "source_info": ["add_source_info", "get_source_info"],
    "wrappers.base": ["get_sample_restore_key"],
}
KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def default_of(parameter: inspect.Parameter) -> str:
    """ "required", the value as text if it is plain, or "object"."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    is_plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return repr(value) if is_plain else "object"


def signature(function: object, is_method: bool = False) -> list[list[str]] | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return [[p.name, KINDS[p.kind], default_of(p)] for p in parameters[is_method:]]


def describe(value: object, is_ours: object) -> dict[str, object]:
    if not inspect.isclass(value):
        return {"call": signature(value)}
    methods: dict[str, object] = {}
    properties = []
    for name in dir(value):
        if name.startswith("_"):
            continue
        owner = next(c for c in value.__mro__ if name in vars(c))
        if not is_ours(owner):
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, property):
            properties.append(name)
        elif isinstance(member, staticmethod | classmethod):
            methods[name] = signature(getattr(value, name))
        elif inspect.isfunction(member):
            methods[name] = signature(member, is_method=True)
    return {"call": signature(value), "methods": methods, "properties": properties}


def through_kwargs(name: str, energon: object) -> list[str]:
    """The keywords that a function passes on by `**kwargs`, to the loader and its factories."""
    config = importlib.import_module("megatron.energon.dataset_config").get_dataset_from_config
    loader = importlib.import_module("megatron.energon.metadataset.dataset_loader").DatasetLoader
    classes = [c for c in energon.StandardWebdatasetFactory.__mro__ if "__init__" in vars(c)]
    own = {p for p, kind, _ in signature(getattr(energon, name)) or [] if kind != "**"}
    # What the loader sets itself would be there twice.
    own |= {"self", "training", "decoder", "shuffle_over_epochs", "cls", "args"}
    chain = [loader.get_dataset, config, *(c.__init__ for c in classes if c is not object)]
    rows = (signature(function) or [] for function in chain)
    return sorted({p for row in rows for p, kind, _ in row if kind != "**" and p not in own})


def main() -> None:
    warnings.simplefilter("ignore")
    energon = importlib.import_module("megatron.energon")
    names = {name: energon for name in energon.__all__ if name != "__version__"}
    for module, inner in DEEPER.items():
        names.update(dict.fromkeys(inner, importlib.import_module(f"megatron.energon.{module}")))

    def is_ours(owner: type) -> bool:
        return owner.__module__.startswith("megatron.")

    table = {name: describe(getattr(place, name), is_ours) for name, place in sorted(names.items())}
    for name in ("get_train_dataset", "get_val_dataset", "get_val_datasets"):
        table[name]["through"] = through_kwargs(name, energon)
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table.items())
    print("{\n" + rows + "\n}")


if __name__ == "__main__":
    main()
