"""Decodes some samples of a dataset, as a run would do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_lite.core.errors import describe
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.extras.prepare.index_writer import read_offsets
from energon_lite.extras.prepare.indexing import ShardResult
from energon_lite.formats.field_access import FieldMap
from energon_lite.formats.tar import sample_headers
from energon_lite.sources.misfits import misfits
from energon_lite.sources.sample_loader import FieldMapMaker, PartFilter, SampleLoader
from energon_lite.storage import files

# How many shards, samples of each, and bytes of a sample are read.
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 8, 4, 64 << 20


def odd_values(
    shards: Sequence[ShardResult], field_map: FieldMap, sample_type: type[Any]
) -> list[str]:
    """Decodes a few samples that have a part for each field.

    Returns:
        Which fields get values of another type than they declare, and how samples fail.
    """
    texts, failures, num_tried = list[str](), list[str](), 0
    maker = FieldMapMaker(sample_type, field_map)
    for shard in shards[:: -(-len(shards) // _SHARDS)]:
        path = shard.shard.path
        loader = SampleLoader(path.parent, PartFilter(field_map.parts), SampleDecoder(), maker, {})
        loader.num_unchecked = 0  # the differences are reported here
        file = files.open_bytes(path)
        _, offsets = read_offsets(shard.rows)
        for place in range(0, shard.samples, -(-shard.samples // _SAMPLES)):
            start, stop = offsets[place : place + 2]
            data = file.read(start, min(stop, start + _SAMPLE_BYTES))
            headers = sample_headers(data, 0, len(data)) if len(data) == stop - start else []
            names = {found[1].lower() for head in headers if (found := head.key_and_part())}
            ways = field_map.paths.values()
            if not all(any(path.part in names for path in paths) for paths in ways):
                continue  # such samples are counted elsewhere
            num_tried += 1
            members = [(head.name, head.data, head.data + head.size) for head in headers]
            try:
                key = ("", 0, place, place)
                made = loader(memoryview(data), members, path.name, place, key)
                texts += misfits(maker, made)
            except Exception as error:  # what decoders raise is not known
                failures.append(describe(error))
    if failures:
        texts.append(
            f"{len(failures)} of {num_tried} samples that were tried would be skipped, the first "
            f"for {failures[0]}"
        )
    return list(dict.fromkeys(texts))
