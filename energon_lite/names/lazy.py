"""Names of a module that are imported on first use."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pkgutil import get_data
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
            place, _, other_name = home.partition(":")
            value = getattr(import_module(place), other_name or name)
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
