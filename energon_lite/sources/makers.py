"""How a sample is made of decoded parts; all picklable, for any kind of worker process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, FatalSampleError, SkipSample
from energon_lite.core.samples import CrudeSample, Sample, SourceInfo
from energon_lite.core.stacking import LOSS_WEIGHT
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.user_function import UserFunction
from energon_lite.storage.field_access import FieldMap
from energon_lite.storage.nvmeta import META


class ServiceFields(NamedTuple):
    """What each sample carries besides its own fields."""

    key: str
    restore_key: RestoreKey
    subflavors: dict[str, Any]
    sources: tuple[SourceInfo, ...]
    loss_weight: float

    def by_name(self) -> dict[str, Any]:
        """Returns them under the names that they have in a sample; a loss weight if it is not 1."""
        fields = {
            "__key__": self.key,
            "__restore_key__": self.restore_key,
            "__subflavors__": self.subflavors,
            "__sources__": self.sources,
        }
        return fields if self.loss_weight == 1 else {**fields, LOSS_WEIGHT: self.loss_weight}


# Makes a sample of its decoded parts and its service fields.
SampleMaker = Callable[[dict[str, Any], ServiceFields], Any]


class PartFilter:
    """Returns which parts are read.

    Args:
        wanted: names, a function, or None for all.
    """

    def __init__(self, wanted: Callable[[str], bool] | Collection[str] | None) -> None:
        self._wanted = wanted

    def __call__(self, part: str) -> bool:
        """Returns whether `part` is read."""
        if self._wanted is None:
            return True
        return bool(self._wanted(part)) if callable(self._wanted) else part in self._wanted


class FieldMapMaker:
    """Makes typed samples by a field map.

    Attributes:
        direct: where every field is one part as it is, the field of each part; the parts are then
            expected under the names of their fields. None for other maps.
    """

    def __init__(self, sample_type: type[Sample], field_map: FieldMap) -> None:
        self.sample_type = sample_type
        self.direct = field_map.direct
        self._access = field_map.access

    def __call__(self, parts: dict[str, Any], service: ServiceFields) -> Sample:
        """Makes one sample."""
        if self.direct is None:
            return self.of_parts(parts, service)
        if len(parts) < len(self.direct):
            # Some part is missing; this raises the error that names it.
            self._access({p: parts[field] for p, field in self.direct.items() if field in parts})
        return self._made(parts, service)

    def of_parts(self, parts: dict[str, Any], service: ServiceFields) -> Sample:
        """Makes one sample of parts under their own names, whatever the map."""
        return self._made(self._access(parts), service)

    def _made(self, parts: dict[str, Any], service: ServiceFields) -> Sample:
        fields = service.by_name()
        fields.update(parts)  # a field map may name __key__ too
        return self.sample_type(**fields)


class LoaderMaker:
    """Makes typed samples by a function of the user, which maps parts to fields."""

    def __init__(
        self,
        sample_type: type[Sample],
        loader: Callable[[dict[str, Any]], dict[str, Any]],
        seed: int,
    ) -> None:
        self.sample_type = sample_type
        self.function = UserFunction(loader, name="sample_loader", seed=seed)
        self.may_draw = self.function.may_draw

    def __call__(self, parts: dict[str, Any], service: ServiceFields) -> Sample:
        """Makes one sample; of the service fields the loader may set the key only."""
        self.function.enter(current_context(), service.restore_key)
        fields = self.function.function({"__key__": service.key, **parts})
        if not isinstance(fields, dict):
            raise DatasetFormatError(
                f"sample_loader returned {type(fields).__name__}; return a dict of fields"
            )
        key = fields.get("__key__", service.key)
        return self.sample_type(**{**fields, **service.by_name(), "__key__": key})


class CrudeMaker:
    """Makes crude samples: dicts of the parts with the service fields."""

    def __call__(self, parts: dict[str, Any], service: ServiceFields) -> CrudeSample:
        """Makes one sample."""
        return CrudeSample(**service.by_name(), __shard__=service.sources[0].shard_name, **parts)


class OwnMaker:
    """Makes samples by the `load_sample` of a dataset class of the user's.

    Args:
        load_sample: makes a sample of a dict of undecoded parts and service fields.
        is_wanted: whether the sample of a key is used.
        seed: of the run.
    """

    def __init__(
        self,
        load_sample: Callable[[dict[str, Any]], Any],
        is_wanted: Callable[[str], bool],
        seed: int,
    ) -> None:
        self.function = UserFunction(load_sample, name="load_sample", seed=seed)
        self.may_draw = self.function.may_draw
        self.is_wanted = is_wanted

    def __call__(self, parts: dict[str, Any], service: ServiceFields) -> Any:
        """Makes one sample; service fields that it does not set are set here.

        Raises:
            SkipSample: The sample's key is not wanted.
            FatalSampleError: It is no sample.
        """
        if not self.is_wanted(service.key):
            raise SkipSample
        self.function.enter(current_context(), service.restore_key)
        fields = service.by_name()
        shard = service.sources[0].shard_name
        raw = {name: fields[name] for name in ("__key__", "__restore_key__", "__sources__")}
        sample = self.function.function({**raw, "__shard__": shard, **parts})
        if isinstance(sample, dict):
            sample.update(__restore_key__=service.restore_key)
            return CrudeSample({**fields, **sample})
        if not isinstance(sample, Sample):
            raise FatalSampleError.from_sample_key(
                service.key,
                f"load_sample returned a {type(sample).__name__}; return a Sample, or a dict for "
                "cookers",
            )
        sample.__restore_key__ = service.restore_key
        for name in ("__subflavors__", "__sources__"):
            if getattr(sample, name) is None:
                setattr(sample, name, fields[name])
        sample.__loss_weight__ = service.loss_weight
        return sample


class FileFunction:
    """A function of a Python file that lies beside a dataset; loaded on first use.

    Args:
        path: the file.
        name: the function.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._function: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, root: str | PathLike[str], text: str, default: str) -> FileFunction:
        """Returns the function that `file.py:function` names, of a file in `.nv-meta`.

        Args:
            root: the dataset's folder.
            text: what names it.
            default: the function, where only the file is named.
        """
        file, _, name = text.partition(":")
        return cls(Path(root) / META / file, name or default)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the function behind: another process loads the file itself."""
        return {**self.__dict__, "_function": None}

    def __call__(self, argument: Any) -> Any:
        """Calls the function."""
        if self._function is None:
            self._function = self.load()
        return self._function(argument)

    def load(self) -> Callable[[Any], Any]:
        """Runs the file and returns the function.

        Raises:
            FileNotFoundError: The file is missing.
            DatasetFormatError: It has no such function.
        """
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: named by dataset.yaml but not there")
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        if spec is None or spec.loader is None:
            raise DatasetFormatError(f"{self.path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, self.name, None)
        if not callable(function):
            raise DatasetFormatError(f"{self.path} has no function {self.name!r}")
        return function  # type: ignore[no-any-return]
