"""Pure functions on arrays of lengths: which samples share a pack.

The names are looked up when they are first used: numba, which they need, takes longer to import
than all the rest, and most programs pack nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from energon_lite.packing.bounds import lower_bound
    from energon_lite.packing.compiled import compile_all
    from energon_lite.packing.fit_best import best_fit_decreasing
    from energon_lite.packing.fit_first import first_fit, first_fit_decreasing
    from energon_lite.packing.fit_next import sequential
    from energon_lite.packing.packs import Packs
    from energon_lite.packing.planned import pack_planned
    from energon_lite.packing.portfolio import pack_best
    from energon_lite.packing.settings import Packing
    from energon_lite.packing.streaming import StreamingPacker, pack_stream
    from energon_lite.packing.windowed import WindowPacker

__all__ = [
    "Packing",
    "Packs",
    "StreamingPacker",
    "WindowPacker",
    "best_fit_decreasing",
    "compile_all",
    "first_fit",
    "first_fit_decreasing",
    "lower_bound",
    "pack_best",
    "pack_planned",
    "pack_stream",
    "sequential",
]

_MODULES = {
    "Packing": "settings",
    "Packs": "packs",
    "StreamingPacker": "streaming",
    "WindowPacker": "windowed",
    "best_fit_decreasing": "fit_best",
    "compile_all": "compiled",
    "first_fit": "fit_first",
    "first_fit_decreasing": "fit_first",
    "lower_bound": "bounds",
    "pack_best": "portfolio",
    "pack_planned": "planned",
    "pack_stream": "streaming",
    "sequential": "fit_next",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
