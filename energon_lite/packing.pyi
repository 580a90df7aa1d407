from energon_lite.batching.fit import first_fit, first_fit_decreasing, sequential
from energon_lite.batching.fit import first_fit_decreasing as best_fit_decreasing
from energon_lite.batching.lists import Lists as Packs
from energon_lite.batching.rules import Packing
from energon_lite.batching.stream import StreamingPacker, pack_stream
from energon_lite.extras.samplers.best import lower_bound, pack_best

__all__ = [
    "Packing",
    "Packs",
    "StreamingPacker",
    "best_fit_decreasing",
    "first_fit",
    "first_fit_decreasing",
    "lower_bound",
    "pack_best",
    "pack_stream",
    "sequential",
]
