"""Pure functions that balance the load of ranks: what packs cost, and which meet in a step.

The names (see balance.pyi) are imported when they are first used.
"""

from energon_lite.names.energon_modules import lazy_names, public_homes

__all__ = sorted(public_homes("balance.pyi"))

__getattr__ = lazy_names(__name__, public_homes("balance.pyi"))
