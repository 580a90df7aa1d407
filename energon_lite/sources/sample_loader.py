"""Makes a sample of its bytes in a tar: finds its parts, decodes them, makes the type.

Everything is picklable, for any kind of worker process.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import PurePath
from types import ModuleType
from typing import Any, NamedTuple

from energon_lite.core.errors import DatasetFormatError, FatalSampleError, SkipSample, add_note
from energon_lite.core.sample_columns import Origin, SampleColumns, SampleForm
from energon_lite.core.samples import SAMPLE_TYPES, CrudeSample, Sample, SourceInfo, make_crude
from energon_lite.core.stacking import LOSS_WEIGHT, SERVICE_FIELDS, layout_of
from energon_lite.core.state import RestoreKey
from energon_lite.core.stream_context import current_context
from energon_lite.core.user_function import UserFunction
from energon_lite.decoding.images import UNDECODED
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.formats.field_access import FieldMap, is_reserved
from energon_lite.formats.nvmeta import META
from energon_lite.formats.shards import Block
from energon_lite.formats.tar import OneFileEach, TarError, key_of_members, split_name
from energon_lite.names.energon_modules import LazyFunction
from energon_lite.storage import files
from energon_lite.storage.local_paths import local_path

# Twice as quick as calling the class, which goes through a Python function.
_new_source = tuple.__new__
# Up to this mean size, samples of a block are decoded at once; longer ones would be copied twice.
SMALL_BYTES = 8 << 10
# The first samples of each source in a process, whose fields are compared with declared types.
_CHECKED = 100
# Parts whose bytes say about how many tokens they are.
_TEXT_EXTENSIONS = frozenset({"txt", "text", "transcript", "json", "jsn"})

# Makes a sample of its decoded parts and its service fields, which are named as in a sample; the
# loss weight is one of them where it is not 1.
SampleMaker = Callable[[dict[str, Any], dict[str, Any]], Any]
_PartPlan = tuple[bool, str, Callable[[bytes], Any] | None]


@dataclass(eq=False)
class PartFilter:
    """The parts that are read: those of some names, those that a function selects, or all."""

    wanted: Callable[[str], bool] | Collection[str] | None

    def __call__(self, part: str) -> bool:
        """Returns whether `part` is read."""
        if self.wanted is None:
            return True
        if callable(self.wanted):
            return bool(self.wanted(part))
        return part.lower() in map(str.lower, self.wanted)


class FieldMapMaker:
    """Makes typed samples by a field map."""

    def __init__(self, sample_type: type[Sample], field_map: FieldMap) -> None:
        self.sample_type = sample_type
        self.field_map = field_map

    def __call__(self, parts: dict[str, Any], service: dict[str, Any]) -> Sample:
        """Makes one sample."""
        try:
            for name, get in self.field_map.getters:  # a field map may name __key__, too
                service[name] = get(parts)
        except KeyError:
            self.field_map.access(parts)  # raises the error that names it
            raise
        return self.sample_type(**service)

    def one_field(self) -> tuple[str, SampleForm] | None:
        """Returns the part that becomes the only field that differs, and the form of the samples.

        None for other maps and types. Of the library's types it is known that their constructors do
        nothing but set the fields.
        """
        direct, kind = self.field_map.direct or {}, self.sample_type
        if len(direct) != 1 or "__key__" in direct.values() or kind not in SAMPLE_TYPES.values():
            return None
        ((part, name),) = direct.items()
        fields: dict[str, dataclasses.Field[Any]] = kind.__dataclass_fields__
        if fields[name].type != "str":
            return None
        others = set(layout_of(kind)[1]) - SERVICE_FIELDS - {name}
        return part, SampleForm(kind, name, [(other, fields[other].default) for other in others])


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

    def __call__(self, parts: dict[str, Any], service: dict[str, Any]) -> Sample:
        """Makes one sample; of the service fields the loader may set the key only."""
        key = service["__key__"]
        self.function.enter(current_context(), service["__restore_key__"])
        fields = self.function.function({**_raw(service), **parts})
        if not isinstance(fields, dict):
            raise DatasetFormatError(
                f"sample_loader returned {type(fields).__name__}; return a dict of fields"
            )
        return self.sample_type(**{**fields, **service, "__key__": fields.get("__key__", key)})


def _raw(service: dict[str, Any]) -> dict[str, Any]:
    """Returns what a function of the user gets beside the parts of a sample."""
    raw = {name: service[name] for name in ("__key__", "__restore_key__", "__sources__")}
    return {**raw, "__shard__": raw["__sources__"][0].shard_name}


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
        self.is_wanted = is_wanted

    def __call__(self, parts: dict[str, Any], service: dict[str, Any]) -> Any:
        """Makes one sample; service fields that it does not set are set here.

        Raises:
            SkipSample: The sample's key is not wanted.
            FatalSampleError: It is no sample.
        """
        key, restore_key = service["__key__"], service["__restore_key__"]
        if not self.is_wanted(key):
            raise SkipSample
        self.function.enter(current_context(), restore_key)
        sample = self.function.function({**_raw(service), **parts})
        if isinstance(sample, dict):
            return CrudeSample({**service, **sample, "__restore_key__": restore_key})
        if not isinstance(sample, Sample):
            raise FatalSampleError.from_sample_key(
                key,
                f"load_sample returned a {type(sample).__name__}; return a Sample, or a dict for "
                "cookers",
            )
        sample.__restore_key__ = restore_key
        for name in ("__subflavors__", "__sources__"):
            if getattr(sample, name) is None:
                setattr(sample, name, service[name])
        sample.__loss_weight__ = service.get(LOSS_WEIGHT, 1.0)
        return sample


@dataclass(eq=False)
class FileFunction:
    """A function of a Python file that lies beside a dataset; loaded on first use.

    Args:
        path: the file.
        name: the function.
    """

    path: PurePath
    name: str
    _function: Callable[[Any], Any] | None = field(default=None, init=False)

    @classmethod
    def of(cls, root: str | PathLike[str], text: str, default: str) -> FileFunction:
        """Returns the function that `file.py:function` names, of a file in `.nv-meta`.

        Args:
            root: the dataset's folder.
            text: what names it.
            default: the function, where only the file is named.
        """
        file, _, name = text.partition(":")
        return cls(local_path(root) / META / file, name or default)

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
        if not files.is_file(self.path):
            raise FileNotFoundError(f"{self.path}: named by dataset.yaml but not there")
        module = ModuleType(self.path.stem)
        module.__file__ = str(self.path)
        exec(compile(files.read_file(self.path), self.path, "exec"), vars(module))
        function = getattr(module, self.name, None)
        if not callable(function):
            raise DatasetFormatError(f"{self.path} has no function {self.name!r}")
        return function  # type: ignore[no-any-return]


class DecodedBlock(NamedTuple):
    """The samples of a block, decoded together, each of one file: columns of shape (N,).

    Attributes:
        keys: of the samples.
        shards: names of their shards.
        files: names of their files.
        values: of their one field.
    """

    keys: list[str]
    shards: list[str]
    files: list[str]
    values: list[Any]


@dataclass(eq=False)
class SampleLoader:
    """Makes samples of tar bytes.

    Args:
        root: folder of the dataset.
        wants: whether a part is read.
        decoder: how parts become values; None leaves bytes.
        maker: makes the sample.
        subflavors: the tag of all samples.
        loss_weight: factor for the loss of all samples.

    Attributes:
        kind: decides how `together` decodes a block; None if it never does.
        num_unchecked: samples to come whose fields are compared with their declared types.
    """

    _misfits = LazyFunction("energon_lite.sources.misfits:misfits")
    num_unchecked = _CHECKED

    root: PurePath
    wants: Callable[[str], bool]
    decoder: SampleDecoder | None
    maker: SampleMaker
    subflavors: dict[str, Any]
    loss_weight: float = 1.0

    def __post_init__(self) -> None:
        """Looks whether samples of one file can be made together, and by which part."""
        self.path = str(self.root)
        maker: Any = self.maker
        found = maker.one_field() if isinstance(maker, FieldMapMaker) else None
        if maker is make_crude and isinstance(self.wants, PartFilter) and self.wants.wanted is None:
            found = "", SampleForm(CrudeSample, "", ())
        self._one_part: str | None = found[0] if found else None
        self._form = found[1] if found else SampleForm(Sample, "", ())
        self._plans: dict[str, _PartPlan] = {}
        self.kind = self._kind()

    @property
    def origin(self) -> Origin:
        """The facts that its samples share."""
        return Origin(self.path, self.subflavors, self.loss_weight)

    @property
    def may_draw(self) -> bool:
        """Whether a function of the user, not marked `@stateless`, makes the samples."""
        function: UserFunction | None = getattr(self.maker, "function", None)
        return function is not None and function.may_draw

    def __getstate__(self) -> dict[str, Any]:
        """Leaves behind what it saw of samples."""
        return {**self.__dict__, "_plans": {}, "num_unchecked": _CHECKED}

    def __call__(
        self, data: memoryview, members: Any, shard: str, place: int, key: RestoreKey
    ) -> Any:
        """Makes one sample of a block; see `formats.shards.Block`.

        Raises:
            Exception: What reading, decoding or the user's loader raised, with shard and sample
                named in its notes.
        """
        try:
            sample_key, values, files = self._parts(data, members)
            made = self.maker(values, self._service(sample_key, files, shard, key))
            if self.num_unchecked and type(made) is not CrudeSample:
                self._check_types(made)
            return made
        except Exception as error:
            add_note(error, self.place_of(members, shard, place))
            raise

    def _check_types(self, made: Any) -> None:
        """Logs which fields of a sample are not of their declared types."""
        self.num_unchecked -= 1
        decoder = self.decoder  # another one, or none, may make anything
        is_ours = isinstance(decoder, SampleDecoder) and decoder.image_decode != UNDECODED
        for text in self._misfits(self.maker, made) if is_ours else ():
            files.warn_once(f"{self.root}: {text}. The sample is used as it is")

    def _service(
        self, sample_key: str, files: tuple[str, ...], shard: str, key: RestoreKey
    ) -> dict[str, Any]:
        """Returns the service fields of a sample."""
        service: dict[str, Any] = {
            "__key__": sample_key,
            "__restore_key__": key,
            "__subflavors__": self.subflavors.copy(),
            "__sources__": (_new_source(SourceInfo, (self.path, key[2], shard, files)),),
        }
        if self.loss_weight != 1:
            service[LOSS_WEIGHT] = self.loss_weight
        return service

    def _kind(self) -> tuple[Any, ...] | None:
        part, decoder = self._one_part, self.decoder
        is_text = None if part is None else self._is_text(part, 0)
        # What should be text and is not is made one by one, which compares the types.
        if part is None or (part and (is_text is None or (decoder and not is_text))):
            return None
        limit = decoder and (type(decoder), decoder.max_bytes)
        return self._form.kind, self._form.field, part, limit

    def _is_text(self, part: str, num_bytes: int) -> bool | None:
        """Returns whether a part becomes the text that it is; None if it does not stay bytes.

        None as well for a part that is not read.
        """
        if is_reserved(part):
            return None
        if self.decoder is None or self.decoder.is_text(part, num_bytes):
            return self.decoder is not None
        return False if self.decoder.decoder_of(part) is None else None

    def together(self, block: Block) -> DecodedBlock | None:
        """Decodes the samples of a block at once, if each is one short text (or bytes).

        None where the samples are to be made one by one, each with its error.
        """
        members, data = block.members, block.data
        if self.kind is None or type(members) is not OneFileEach:
            return None
        if len(data) > SMALL_BYTES * len(members):
            return None  # they would be copied twice
        names = members.names
        part = self._one_part or (split_name(names[0]) or ("", ""))[1]
        is_text = self._is_text(part, len(data))
        if is_text is None or part != part.lower():
            return None
        joined, end = "\0".join(names) + "\0", f".{part}\0"
        *keys, rest = joined.split(end)  # all dots are in the ends, so each name has one
        is_plain = len(keys) == len(names) and not rest and "/" not in joined and all(keys)
        if not is_plain or joined.count(".") != len(names) * end.count("."):
            return None
        raw = data.tobytes()
        values: list[Any] = [raw[a:b] for a, b in zip(members.starts, members.stops, strict=True)]
        try:
            values = [*map(bytes.decode, values)] if is_text else values
        except UnicodeDecodeError:
            return None
        return DecodedBlock(keys, block.shards, names, values)

    def made(
        self,
        block: DecodedBlock,
        rows: slice,
        keys: list[RestoreKey],
        origins: Mapping[str, Origin],
    ) -> SampleColumns:
        """Makes samples of rows of a block, which cannot fail.

        Args:
            block: what `together` returned.
            rows: which of its samples.
            keys: their restore keys.
            origins: of their sources, which have a loader of the same kind each.
        """
        columns = block.keys[rows], keys, block.values[rows], block.shards[rows], block.files[rows]
        return SampleColumns(self._form, origins, columns)

    def made_one(self, block: DecodedBlock, row: int, key: RestoreKey) -> Any:
        """Makes the sample of a row of a block; columns of one row would cost three times that."""
        name = block.files[row]
        fields = self._service(block.keys[row], (name,), block.shards[row], key)
        if self._form.kind is CrudeSample:
            return make_crude({name[len(block.keys[row]) + 1 :]: block.values[row]}, fields)
        fields[self._form.field] = block.values[row]
        return self._form.kind(**fields)

    def text_share(self, block: Block) -> float:
        """Returns the share of a block that the parts have that are read.

        NaN if some are no text, so that bytes say little about tokens, or there are none.
        """
        total = 0.0
        for members in block.members:
            for name, first, last in [] if isinstance(members, Exception) else members:
                _, part = split_name(name) or ("", "")
                is_read, part, _ = self._plan(part)
                if is_read:
                    is_text = part.rpartition(".")[2] in _TEXT_EXTENSIONS
                    total += last - first if is_text else math.nan
        return total / block.data.nbytes if total else math.nan

    def place_of(self, members: Any, shard: str, place: int) -> str:
        """Names a sample in errors."""
        sample_key = key_of_members(members)
        if place < 0 and not sample_key:
            return f"{self.root}"
        name = repr(sample_key) if sample_key else f"number {place}"
        return f"{self.root / shard}, sample {name}"

    def _parts(self, data: memoryview, members: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        """Returns the key of a sample, its decoded parts, and the names of their files."""
        if isinstance(members, Exception):
            raise copy.copy(members) from members  # one error may stand for all samples of a shard
        sample_key = lead = ""
        values: dict[str, Any] = {}
        files: tuple[str, ...] = ()
        for name, first, last in members:
            if sample_key and name.startswith(lead) and "/" not in name[len(lead) :]:
                part = name[len(lead) :]
            else:
                found = split_name(name)
                if found is None:
                    continue
                if sample_key:
                    raise TarError(f"holds parts of two samples, {sample_key!r}, {found[0]!r}")
                sample_key, part = found
                lead = sample_key + "."
            try:
                is_read, lower, decode = self._plans[part]
            except KeyError:
                is_read, lower, decode = self._plans[part] = self._plan(part)
            if is_read:
                raw = bytes(data[first:last])
                values[lower] = raw if decode is None else decode(raw)
                files += (name,)
        if not sample_key:
            raise TarError("holds no part of a sample")
        if len(values) != len(files):
            raise TarError(f"has two parts of one name, apart from capitals: {', '.join(files)}")
        return sample_key, values, files

    def _plan(self, part: str) -> _PartPlan:
        """Returns whether a part is read, its name in small letters, and its decoder."""
        lower = part.lower()
        decode = None if self.decoder is None else self.decoder.decoder_of(lower)
        is_wanted = self.wants(part) or self.wants(lower)
        return is_wanted and not is_reserved(part), lower, decode
