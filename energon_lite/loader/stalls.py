"""What a thread does: stage, function, sample, shard, and its stack."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

from energon_lite.core.user_function import UserFunction
from energon_lite.sources.sample_loader import SampleLoader
from energon_lite.storage.shards import ShardReader
from energon_lite.storage.tar import key_of_members


def describe_thread(ident: int) -> str:
    """Returns what a thread does, with file and line of each call; no values of the data."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return "It has ended."
    where = next(filter(None, (_doing(f) for f, _ in traceback.walk_stack(frame))), "")
    return f"{where}\n{''.join(traceback.format_stack(frame))}"


def _doing(frame: FrameType) -> str:
    code = frame.f_code
    if code in (UserFunction.call.__code__, UserFunction.expand.__code__):
        names = frame.f_locals
        return f"It runs {names['self'].doing(names['key'], names['argument'])}."
    if code is SampleLoader.__call__.__code__:
        names = frame.f_locals
        sample = key_of_members(names["members"]) or names["place"]
        return f"It decodes sample {sample} of {names['self'].root / names['shard']}."
    if code in (ShardReader._extents.__code__, ShardReader._read_runs.__code__):
        names = frame.f_locals
        if "number" in names:
            reader = names["self"]
            return f"It reads {reader.root / reader.shards[names['number']]}."
    return ""
