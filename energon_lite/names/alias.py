"""`import megatron.energon` finds this library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from energon_lite.names.energon_modules import ENERGON_MODULES, REAL_MODULES, ROOT, make_module

ENERGON = "megatron.energon"
# The version of Energon that has these names, for code that checks it.
ENERGON_VERSION = "7.4.1"


def as_energon() -> None:
    """Makes `import megatron.energon` and its sub-modules resolve to this library.

    Call it before anything imports `megatron.energon`; once is enough. The names are the same
    objects as here. Other packages below `megatron` (`megatron.core`) are found as before.

    Raises:
        RuntimeError: Megatron-Energon itself is imported already.
    """
    there = sys.modules.get(ENERGON)
    if there is not None:
        if "__energon_lite__" not in vars(there):
            raise RuntimeError(
                f"{ENERGON} is already imported, from {getattr(there, '__file__', '?')}. Call "
                "energon_lite.as_energon() before the first import of it, or run the script with "
                "`python -m energon_lite.as_energon SCRIPT`."
            )
        return
    sys.meta_path.append(_NoMegatron)
    megatron = import_module("megatron")
    aliases = {"": _energon_package()}
    for name in ENERGON_MODULES:
        is_real = name in REAL_MODULES
        aliases[f".{name}"] = (
            make_module(name, of=ENERGON) if is_real else import_module(f"{ROOT}.{name}")
        )
    sys.modules.update({ENERGON + name: module for name, module in aliases.items()})
    vars(megatron)["energon"] = aliases[""]


def _energon_package() -> ModuleType:
    """Creates `megatron.energon` with the names of this package."""
    package = sys.modules[ROOT]
    alias = ModuleType(ENERGON, package.__doc__)
    alias.__spec__ = ModuleSpec(ENERGON, None, is_package=True)
    # Empty, as a file found through it would be imported a second time.
    alias.__path__ = []

    def get(name: str) -> object:
        value = sys.modules.get(f"{ENERGON}.{name}", alias)
        return getattr(package, name) if value is alias or name in package.__all__ else value

    vars(alias).update(
        __getattr__=get, __all__=package.__all__, __version__=ENERGON_VERSION, __energon_lite__=True
    )
    return alias


class _NoMegatron:
    """Finds a package `megatron` if no other finder does."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del target
        if name == "megatron":
            return ModuleSpec(name, None, is_package=True)  # a namespace package without folders
        if path or not name.startswith("megatron."):
            return None
        # A folder with one may have been added to sys.path since.
        found = PathFinder.find_spec("megatron")
        if found is None or found.submodule_search_locations is None:
            return None
        sys.modules["megatron"].__path__ = found.submodule_search_locations
        return PathFinder.find_spec(name, found.submodule_search_locations)
