"""Pure functions on arrays of lengths: which samples share a pack.

The names (see packing.pyi) are imported when they are first used: numba, which they need, takes
longer to import than all the rest, and most programs pack nothing.
"""

from energon_lite.names.energon_modules import lazy_names, public_homes

__all__ = sorted(public_homes("packing.pyi"))

__getattr__ = lazy_names(__name__, public_homes("packing.pyi"))
