"""The modules of Megatron-Energon 7.4 and their names, made from the tables of this folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from energon_lite.names.lazy import ROOT, lazy_names, name_table, public_homes

# Module of Energon -> the names that code imports from it.
ENERGON_MODULES = name_table("energon_modules.txt")

# The modules that are files here; `__getattr__ = energon_names(__name__)` adds the other names.
REAL_MODULES = frozenset({
    "cli", "loader", "metadataset", "task_encoder", "task_encoder.base", "task_encoder.cooking",
    "transforms",
})  # fmt: skip

# The homes of names that are not public here, or have another name.
_HOMES = {
    name: f"{module}:{ours}" if ours else module
    for module, names in name_table("homes.txt").items()
    for name, _, ours in (text.partition("=") for text in names)
}


def home_of(name: str) -> str:
    """Returns our module that has a name of Energon's, or the module of placeholders."""
    return public_homes().get(name) or _HOMES.get(name) or f"{ROOT}.names.later"


def energon_names(module: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module of this package that Energon has, too.

    Args:
        module: `__name__` of the module.
    """
    return lazy_names(module, _homes(module.removeprefix(f"{ROOT}.")))


def make_module(name: str, of: str = ROOT) -> ModuleType:
    """Creates the module `of.name`, whose names are imported on first use."""
    module = ModuleType(f"{of}.{name}", f"Names of `megatron.energon.{name}`.")
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    module.__path__ = []
    homes = _homes(name)
    module.__dict__["__all__"] = sorted(homes)
    module.__dict__["__getattr__"] = lazy_names(module.__name__, homes)
    return module


def add_modules() -> None:
    """Adds the modules that are no files to `sys.modules`.

    Not through a finder: an import of a module in `sys.modules` does not replace a name of the
    package (`energon_lite.edataclass` stays the decorator after `import energon_lite.edataclass`).
    """
    for name in ENERGON_MODULES.keys() - REAL_MODULES:
        sys.modules.setdefault(f"{ROOT}.{name}", make_module(name))


def _homes(module: str) -> dict[str, str]:
    names = ENERGON_MODULES[module]
    if module.startswith("tools."):
        command = module.removeprefix("tools.")
        return dict.fromkeys(names, f"{ROOT}.cli.commands:{command}")
    if module == "cli.main":
        return {name: f"{ROOT}.cli.commands:{name.removesuffix('_command')}" for name in names}
    return {name: home_of(name) for name in names}
