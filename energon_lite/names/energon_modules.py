"""Names that are imported on first use: ours, and those of Megatron-Energon 7.4, from tables."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from pkgutil import get_data
from types import ModuleType
from typing import Any

ROOT = __name__.split(".")[0]


@cache
def public_homes(file: str = "__init__.pyi") -> Mapping[str, str]:
    """Returns the module of every public name, from `from module import name` in a stub.

    Type checkers and editors read the same lines, so there is one list of what is public.
    """
    stub = get_data(ROOT, file)  # also where the package lies in a zip file
    assert stub is not None
    return {
        alias.asname or alias.name: node.module + f":{alias.name}" * bool(alias.asname)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def name_table(file: str) -> dict[str, list[str]]:
    """Reads a table of this folder: lines `KEY: NAME NAME ...`, continued by indented lines."""
    data = get_data(__package__ or "", file)  # also where the package is a zip file
    lines = (data or b"").decode().replace("\n ", " ").splitlines()
    rows = (line.rpartition(":") for line in lines if not line.startswith("#"))
    return {key: names.split() for key, _, names in rows}


@contextmanager
def uncollected() -> Iterator[None]:
    """Has garbage collection wait, while modules or datasets are made: they leave no garbage.

    Their objects would start searches of all those of torch, which take half as long as an import.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def import_name(home: str, name: str = "") -> Any:
    """Returns a name from its home, `module` or `module:name`, which is imported if necessary."""
    place, _, own_name = home.partition(":")
    with uncollected():
        return getattr(import_module(place), own_name or name)


class LazyFunction(staticmethod):  # type: ignore[type-arg]
    """A static method of a class that is a function of a module, which is imported on first use."""

    def __init__(self, home: str) -> None:
        """Stands for the function at `home`, which is `module:name`."""
        super().__init__(import_name)  # never called: `__get__` returns the function
        self.home = home

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Returns the function."""
        return import_name(self.home)


class Described:
    """Has a short `repr`; what writes it is imported on first use."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(import_name("energon_lite.extras.view.reprs:text_of")(self))


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `module`, which imports a name from its home on first use.

    Args:
        module: name of the module that gets the function.
        homes: name → the module that has it, with `:other_name` where it is called otherwise.
            Sub-modules need no entry.

    Raises:
        AttributeError: of the function returned: there is neither a name nor a sub-module.
    """

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is not None:
            value = import_name(home, name)
            setattr(sys.modules[module], name, value)
            return value
        inner = f"{module}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(inner)
            except ModuleNotFoundError as error:
                if error.name != inner:
                    raise
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return get


# Module of Energon -> the names that code imports from it.
ENERGON_MODULES = name_table("energon_modules.txt")

# The modules that are files here; `__getattr__ = energon_names(__name__)` adds the other names.
REAL_MODULES = frozenset(
    {"loader", "metadataset", "task_encoder", "task_encoder.base", "task_encoder.cooking"}
)

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
    if name in PUBLIC_MODULES:
        module.__dict__["__getattr__"] = partial(_name_of, f"{ROOT}.{PUBLIC_MODULES[name]}")
        return module
    homes = _homes(name)
    module.__dict__["__all__"] = sorted(homes)
    module.__dict__["__getattr__"] = lazy_names(module.__name__, homes)
    return module


# Public modules -> where they lie.
PUBLIC_MODULES = {name: f"extras.{name}" for name in ("cli", "prepare", "samplers", "transforms")}
PUBLIC_MODULES["length_index"] = "extras.lengths.length_index"
PUBLIC_MODULES["prepare.media"] = "extras.prepare.prepare_media"


def _name_of(home: str, name: str) -> Any:
    if name.startswith("__"):  # what Python itself looks for in all modules
        raise AttributeError(name)
    return import_name(home, name)


def add_modules() -> None:
    """Adds the modules that are no files to `sys.modules`.

    Not through a finder: an import of a module in `sys.modules` does not replace a name of the
    package (`energon_lite.edataclass` stays the decorator after `import energon_lite.edataclass`).
    """
    for name in (ENERGON_MODULES.keys() | PUBLIC_MODULES.keys()) - REAL_MODULES:
        sys.modules.setdefault(f"{ROOT}.{name}", make_module(name))


def _homes(module: str) -> dict[str, str]:
    names = ENERGON_MODULES[module]
    if module.startswith("tools."):
        command = f"{ROOT}.extras.cli.commands:{module.removeprefix('tools.')}"
        return {name: command + name.removeprefix("command") for name in names}
    if module == "cli.main":
        return {
            name: f"{ROOT}.extras.cli.commands:{name.removesuffix('_command')}" for name in names
        }
    return {name: home_of(name) for name in names}
