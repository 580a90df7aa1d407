"""`dataset.yaml` -> factory: which class, with which arguments, and what may be imported for it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import PurePath
from typing import Any, TypeVar

from energon_lite.core.errors import DatasetFormatError, did_you_mean
from energon_lite.core.samples import SAMPLE_TYPES, Sample
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import META, read_dataset_config
from energon_lite.names.energon_modules import import_name
from energon_lite.sources import dataset_classes, webdataset
from energon_lite.sources.dataset_classes import StandardWebdatasetFactory
from energon_lite.sources.sample_loader import FileFunction
from energon_lite.sources.source_factory import SourceFactory
from energon_lite.sources.webdataset import BaseWebdatasetFactory
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path
from energon_lite.storage.yaml import YamlMap, check_keys

T = TypeVar("T")

# Whether code that a dataset names may be run.
VARIABLE = "ENERGON_LITE_TRUST"
WAY_OUT = f"pass trust=True, or set {VARIABLE}=1 on a machine whose data you all trust"
_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")

# Names under these modules are ours, whichever class of Energon they were written for.
_OWN_MODULES = ("energon_lite", "megatron.energon")
_DATASET_CLASSES: dict[str, type[BaseWebdatasetFactory[Any]]] = {
    name: value
    for module in (webdataset, dataset_classes)
    for name, value in vars(module).items()
    if isinstance(value, type)
    and issubclass(value, BaseWebdatasetFactory)
    and not name.startswith("_")
}
# Energon's old classes, one for each sample type.
_LEGACY = {
    f"{name.removesuffix('Sample')}Webdataset": "energon_lite.extras.energon.legacy"
    for name in SAMPLE_TYPES
}
_CLASS_KEYS = ("__module__", "__class__")
_STANDARD_KEYS = (
    *_CLASS_KEYS, "sample_type", "field_map", "sample_loader", "part_filter", "subflavors",
    "split_part", "split_config", "parallel_shard_iters", "max_samples_per_sequence",
    "shuffle_over_epochs",
)  # fmt: skip
# What a dataset class may override in Energon, and would change nothing here, or fail.
_ORDER = "the order of samples is no method of a dataset class here; see docs/reference/order.md"
_NOT_CALLED = {
    "_load_sample_raw": "override load_sample",
    "build": "put stages over it in build_train_datasets of the task encoder",
    "shard_workers": _ORDER,
    "slice_workers": _ORDER,
    "split_samples_to_workers": _ORDER,
}


def load_factory(path: str | PathLike[str], **settings: Any) -> SourceFactory[Any]:
    """Opens a dataset of any format.

    Args:
        path: the folder or file.
        settings: for the factory; of a folder as in `folder_factory`.

    Raises:
        FileNotFoundError: The dataset is missing, or a folder is not prepared.
        DatasetFormatError: A file is wrong; names file, line and key.
    """
    root = files.absolute(local_path(path))
    factory: SourceFactory[Any] = format_of(root).factory(root, **settings)
    return factory


def folder_factory(
    root: PurePath,
    *,
    dataset_config: str | None = None,
    trust: bool | None = None,
    subflavors: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> SourceFactory[Any]:
    """Opens a prepared folder by its `dataset.yaml`.

    Args:
        root: the folder.
        dataset_config: name of the file in `.nv-meta`; `dataset.yaml` by default.
        trust: whether code that the dataset names (its `sample_loader.py`, classes of modules not
            imported yet) may be run; None: the value of `ENERGON_LITE_TRUST`.
        subflavors: tags that go over those of the file.
        kwargs: for the factory; what the file sets wins.

    Raises:
        FileNotFoundError: The folder is missing or not prepared.
        DatasetFormatError: The file is wrong; names file, line and key.
    """
    trust = is_trusted(trust)
    if root.suffix.lower() in (".yaml", ".yml") and not files.is_folder(root):
        raise DatasetFormatError(f"{root} is a metadataset; give the path of one of its datasets")
    config = read_dataset_config(root, dataset_config)
    where = config.file
    cls = _dataset_class(config, where, trust)
    if cls.__module__.startswith("energon_lite."):
        check_keys(config, _STANDARD_KEYS, "")
    arguments = {key: value for key, value in config.items() if key not in _CLASS_KEYS}
    if "sample_type" in arguments:
        arguments["sample_type"] = _sample_type(arguments["sample_type"], where, trust)
    elif cls is StandardWebdatasetFactory:
        raise DatasetFormatError(
            f"{where}: key 'sample_type' is missing: name the class of the samples, for example "
            "{__module__: energon_lite, __class__: TextSample}"
        )
    for name in ("sample_loader", "part_filter"):
        if isinstance(arguments.get(name), str):
            arguments[name] = _file_function(root, arguments[name], name, where, trust)
    tags = arguments.pop("subflavors", None) or {}
    if not isinstance(tags, dict):
        raise DatasetFormatError(f"{where}, subflavors: must be a map of tags, not {tags!r}")
    try:
        tags = {**tags, **(subflavors or {})}
        return cls(root, **{**kwargs, **arguments}, subflavors=tags)
    except (ValueError, TypeError) as error:
        if isinstance(error, TypeError) and not cls.__module__.startswith("energon_lite."):
            where = f"{where}, class {cls.__module__}.{cls.__name__}"
        located = _located(error, where, arguments, kwargs)
        if located is error:
            raise
        raise located from error


def _located(
    error: Exception, where: str, arguments: Mapping[str, Any], others: Mapping[str, Any]
) -> Exception:
    """Names `dataset.yaml` in an error about what it sets; others stay as they are."""
    text = str(error)
    if META in text:
        return error
    if isinstance(error, DatasetFormatError):
        return type(error)(f"{where}: {text}")
    is_of_file = isinstance(error, TypeError) and not any(f"{name}=" in text for name in others)
    is_of_file = is_of_file or any(name in text for name in arguments)
    return DatasetFormatError(f"{where}: {text}") if is_of_file else error


def _dataset_class(config: YamlMap, where: str, trust: bool) -> type[BaseWebdatasetFactory[Any]]:
    if "__class__" not in config:
        return StandardWebdatasetFactory
    name, module = config["__class__"], config.get("__module__", "energon_lite")
    own = _DATASET_CLASSES
    if name in _LEGACY:
        own = {**own, name: import_name(_LEGACY[name], name)}
    cls = _named_class(name, module, own, where, trust, BaseWebdatasetFactory)
    for base in cls.__mro__:
        for method, instead in _NOT_CALLED.items():
            if method in vars(base) and not base.__module__.startswith("energon_lite."):
                raise DatasetFormatError(
                    f"{where}: {module}.{base.__name__} overrides {method}, which is not called "
                    f"here as Energon does: {instead}"
                )
    return cls


def _sample_type(value: Any, where: str, trust: bool) -> type[Sample]:
    if not isinstance(value, dict) or "__class__" not in value:
        raise DatasetFormatError(
            f"{where}, sample_type: {value!r} should be "
            "{__module__: energon_lite, __class__: TextSample}, or another class"
        )
    if isinstance(value, YamlMap):
        check_keys(value, _CLASS_KEYS, "sample_type")
    module = value.get("__module__", "energon_lite")
    here = f"{where}, sample_type"
    return _named_class(value["__class__"], module, SAMPLE_TYPES, here, trust, Sample)


def load_joiner(
    module: str, name: str, is_class: bool, where: str, trust: bool | None
) -> Callable[..., Any]:
    """Finds the joiner that a metadataset names.

    Args:
        module: its module, which is imported only if the user trusts the metadataset.
        name: of the class or function.
        is_class: whether it is a class of samples.
        where: the place in the metadataset.
        trust: as in `load_factory`.

    Raises:
        DatasetFormatError: It is not there, or of another kind.
    """
    if is_class:
        return _named_class(name, module, SAMPLE_TYPES, where, is_trusted(trust), Sample)
    found = _named_object(name, module, SAMPLE_TYPES, where, is_trusted(trust))
    if not callable(found) or isinstance(found, type):
        hint = "; write __class__ for a class of samples" if callable(found) else ""
        raise DatasetFormatError(f"{where}: {module}.{name} must be a function{hint}")
    if not (is_trusted(trust) or _is_of_program(getattr(found, "__module__", None) or module)):
        raise DatasetFormatError(
            f"{where}: {module}.{name} is a function of Python or of an installed package, which "
            f"may do anything with samples. If you trust the authors, {WAY_OUT}; or import a "
            "joiner of your own and name it"
        )
    return found  # type: ignore[no-any-return]


def _is_of_program(module: str) -> bool:
    """Returns whether a module is neither of Python nor of an installed package."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts)
    return top not in sys.stdlib_module_names and top != "energon_lite" and not is_installed


def _named_class(
    name: Any, module: Any, own: Mapping[str, type], where: str, trust: bool, base: type[T]
) -> type[T]:
    found = _named_object(name, module, own, where, trust)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise DatasetFormatError(
            f"{where}: {module}.{name} is no subclass of {base.__name__}; correct the name"
        )
    return found


def _named_object(name: Any, module: Any, own: Mapping[str, type], where: str, trust: bool) -> Any:
    """Finds a class or function; imports a module only if the user trusts the dataset."""
    if not isinstance(name, str) or not isinstance(module, str) or not module:
        raise DatasetFormatError(f"{where}: __module__ and __class__ must be text")
    if not all(part.isidentifier() for part in module.split(".")):
        raise DatasetFormatError(f"{where}: {module!r:.80} is no name of a module; correct it")
    if module.split(".")[0] == "energon_lite" or module.startswith(_OWN_MODULES):
        if name in own:
            return own[name]
        raise DatasetFormatError(
            f"{where}: {module} has no class {name!r}.{did_you_mean(name, own)}"
        )
    if module not in sys.modules:
        is_there = importlib.util.find_spec(module.partition(".")[0]) is not None
        if is_there and not trust:
            raise DatasetFormatError(
                f"{where}: {module}.{name} would have to be imported. Import {module} "
                f"yourself first; or, if you trust this dataset's authors, {WAY_OUT}"
            )
        try:
            importlib.import_module(module)
        except ImportError as error:
            if name in own:  # Energon takes its own class of that name, too
                return own[name]
            raise DatasetFormatError(
                f"{where}: module {module} cannot be imported ({error}). Install it, put its "
                "folder on PYTHONPATH, or correct __module__"
            ) from error
    found = getattr(sys.modules[module], name, None)
    if found is None:
        raise DatasetFormatError(f"{where}: module {module} has no {name!r}; correct the name")
    return found


def _file_function(root: PurePath, text: str, name: str, where: str, trust: bool) -> FileFunction:
    if not trust:
        raise DatasetFormatError(
            f"{where}, {name}: {text!r} is code that lies in the dataset. If you trust its "
            f"authors, {WAY_OUT}; or write a field_map"
        )
    found = FileFunction.of(root, text, name)
    found.load()
    return found


def is_trusted(trust: bool | None) -> bool:
    """Returns the caller's choice, or where it is None that of the environment.

    Raises:
        ValueError: The environment variable is neither a yes nor a no.
    """
    if trust is not None:
        return trust
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text not in (*_ON, *_OFF):
        raise ValueError(f"{VARIABLE}={text!r}: set it to 1 to trust all datasets, or to 0")
    if text in _ON:
        files.warn_once(f"{VARIABLE} is set: code that datasets name is run without asking")
    return text in _ON
