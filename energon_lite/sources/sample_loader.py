"""From the tar bytes of one sample to the sample: find its parts, decode them, make the type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from energon_lite.core.errors import add_note
from energon_lite.core.samples import SourceInfo
from energon_lite.core.state import RestoreKey
from energon_lite.sources.makers import SampleMaker, ServiceFields
from energon_lite.storage.decoding import SampleDecoder
from energon_lite.storage.tar import TarError, key_of_members, split_name

# Twice as quick as calling the class, which goes through a Python function.
_new_source = tuple.__new__


class SampleLoader:
    """Makes samples of tar bytes.

    Args:
        root: folder of the dataset.
        wants: whether a part is read.
        decoder: how parts become values; None leaves bytes.
        maker: makes the sample.
        subflavors: the tag of all samples.
        loss_weight: factor for the loss of all samples.
    """

    def __init__(
        self,
        root: Path,
        wants: Callable[[str], bool],
        decoder: SampleDecoder | None,
        maker: SampleMaker,
        subflavors: dict[str, Any],
        loss_weight: float = 1.0,
    ) -> None:
        self.root = root
        self.decoder = decoder
        self.subflavors = subflavors
        self.loss_weight = loss_weight
        self._path = str(root)
        self._wants = wants
        self._maker = maker
        fields = list((getattr(maker, "direct", None) or {}).values())
        self._is_single = len(fields) == 1 and fields != ["__key__"]
        self._sample_type: Any = getattr(maker, "sample_type", None)
        self._plans: dict[str, tuple[str | None, Callable[[bytes], Any] | None]] = {}

    @property
    def may_draw(self) -> bool:
        """Whether a function of the user, not marked `@stateless`, makes the samples."""
        return bool(getattr(self._maker, "may_draw", False))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the plans behind: they are built again as parts come."""
        return {**self.__dict__, "_plans": {}}

    def __call__(
        self, data: memoryview, members: Any, shard: str, place: int, key: RestoreKey
    ) -> Any:
        """Makes one sample of a block; see `storage.shards.Block`.

        Raises:
            Exception: What reading, decoding or the user's loader raised, with shard and sample
                named in its notes.
        """
        try:
            if self._is_single and type(members) is list and len(members) == 1:
                ((name, first, last),) = members
                sample_key, _, part = name.partition(".")
                field, decode = self._plans.get(part, (None, None))
                if field is not None and sample_key and "/" not in name:
                    # One file that fills the one field, as in most texts: no detours.
                    raw = data[first:last].tobytes()
                    source = _new_source(SourceInfo, (self._path, key[2], shard, (name,)))
                    return self._sample_type(
                        __key__=sample_key,
                        __restore_key__=key,
                        __subflavors__=self.subflavors.copy(),
                        __sources__=(source,),
                        __loss_weight__=self.loss_weight,
                        **{field: raw if decode is None else decode(raw)},
                    )
            return self._make(data, members, shard, key)
        except Exception as error:
            sample_key = key_of_members(members)
            name = repr(sample_key) if sample_key else f"number {place}"
            add_note(error, f"{self.root / shard}, sample {name}")
            raise

    def _make(self, data: memoryview, members: Any, shard: str, key: RestoreKey) -> Any:
        if isinstance(members, Exception):
            raise copy.copy(members)  # one error may stand for all samples of a shard
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
                target, decode = self._plans[part]
            except KeyError:
                target, decode = self._plans[part] = self._plan(part)
            if target is not None:
                raw = data[first:last].tobytes()
                values[target] = raw if decode is None else decode(raw)
                files += (name,)
        if not sample_key:
            raise TarError("holds no part of a sample")
        sources = (SourceInfo(self._path, key[2], shard, files),)
        service = ServiceFields(sample_key, key, self.subflavors.copy(), sources, self.loss_weight)
        return self._maker(values, service)

    def _plan(self, part: str) -> tuple[str | None, Callable[[bytes], Any] | None]:
        """Returns under which name a part's value goes (None: it is not read), and its decoder."""
        if not self._wants(part):
            return None, None
        fields = getattr(self._maker, "direct", None)
        target = part if fields is None else fields[part]
        return target, None if self.decoder is None else self.decoder.decoder_of(part)
