"""Who imports whom: units by row, folders without cycles, stages known by name in stages/ only."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from .source_tree import PACKAGE, REPO, Module, package_modules

# Bottom to top. A row is (units in order); a set in a row is units that do not know each other.
ROWS: list[list[str | frozenset[str]]] = [
    ["names", "core"],
    [frozenset({"order", "storage", "loss"}), "formats", "decoding"],
    ["batching", frozenset({"packing", "balance", "testing"}), "sources", "stages"],
    ["metadataset", "task_encoder"],
    ["pipeline", "loader"],
    # Around the core: nothing above this line imports anything below it.
    [
        "extras.",
        "extras.jsonl",
        "extras.transforms",
        "extras.samplers",
        "extras.stores",
        "extras.media",
        "extras.migration",
        "extras.remote",
        "extras.view",
    ],
    [
        "extras.prepare",
        "extras.cluster",
        "extras.joins",
        "extras.lengths",
        "extras.energon",
        "extras.inspect",
        "extras.preview",
        "extras.report",
        "extras.testing",
        "extras.trainers",
    ],
    ["extras.cli"],
    ["as_energon", "__main__"],
]

# The one module that may import each of these inside a function: optional packages, and packages
# that few runs need.
OPTIONAL: dict[str, str] = {
    "accelerate": "energon_lite/extras/trainers/accelerate_adapter.py",
    "mfusepy": "energon_lite/extras/inspect/mounting.py",
    "obstore": "energon_lite/extras/remote/object_stores.py",
    "numba": "energon_lite/core/compiled.py",  # slow to import
    "PIL": "energon_lite/decoding/images.py",
    "ray": "energon_lite/extras/cluster/ray_library.py",
    "plotly": "energon_lite/extras/report/report_page.py",
    "simplejpeg": "energon_lite/decoding/images.py",
    "webdataset": "energon_lite/decoding/part_formats.py",  # tenbin only; slow to import
}

MODULES = package_modules()
KNOWN = frozenset(module.name for module in MODULES)
INNER = [module for module in MODULES if module.name != PACKAGE]  # the root re-exports everything


def unit_of(name: str) -> str:
    """The part of the table that a module belongs to: energon_lite.core.state -> core."""
    _, first, second = [*name.split("."), "", ""][:3]
    return f"{first}.{second}" if first == "extras" else first


def units_below(unit: str) -> set[str]:
    """What the table allows `unit` to import, besides itself."""
    below: set[str] = set()
    for row in ROWS:
        for entry in row:
            members = entry if isinstance(entry, frozenset) else {entry}
            if unit in members:
                return below
            below |= members
    raise AssertionError(f"{PACKAGE}/{unit} has no place in ROWS; put it where it belongs")


def layer_errors(module: Module, known: frozenset[str]) -> list[str]:
    unit = unit_of(module.name)
    allowed = units_below(unit) | {unit}
    errors = []
    for imported in module.imports(known):
        if imported.target.split(".")[0] != PACKAGE:
            continue
        where = f"{module.relative_path}:{imported.line}"
        if imported.target == PACKAGE:
            errors.append(f"{where} imports {PACKAGE} itself; name the module that has it")
        elif unit_of(imported.target) not in allowed:
            errors.append(f"{where}: '{unit}' may not import '{unit_of(imported.target)}'")
    return errors


def find_cycle(modules: list[Module], known: frozenset[str]) -> list[str]:
    """Names along one cycle of imports at run time, or nothing."""
    graph = {
        m.name: {i.target for i in m.imports(known) if i.target in known and not i.for_types_only}
        for m in modules
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folder_of(module: Module) -> str:
    """The folder that a module lies in, dotted; a module of the root stands for itself."""
    name = module.name if module.is_package else module.name.rpartition(".")[0]
    return name if name != PACKAGE else module.name


def folders_in_cycles(modules: list[Module]) -> set[str]:
    """Folders that import each other, at run time or for types, over any number of steps."""
    folders = {module.name: folder_of(module) for module in modules}
    known = frozenset(folders)
    graph: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        if not module.is_package:  # __init__ is the face of a folder and may import what is in it
            targets = {i.target for i in module.imports(known)} & known - {PACKAGE}
            graph[folders[module.name]] |= {folders[t] for t in targets} - {folders[module.name]}

    def reachable(folder: str) -> set[str]:
        found: set[str] = set()
        remaining = [folder]
        while remaining:
            new = graph.get(remaining.pop(), set()) - found
            found |= new
            remaining += new
        return found

    return {name.removeprefix(f"{PACKAGE}.") for name in list(graph) if name in reachable(name)}


def test_modules_import_only_what_is_below_them() -> None:
    assert [error for module in INNER for error in layer_errors(module, KNOWN)] == []


def test_each_folder_has_its_tests_under_its_name() -> None:
    """So that `make test ONLY=samplers` runs those of one."""
    folders = {m.path.parent.name for m in MODULES if m.is_package} - {PACKAGE, "extras", "workers"}
    # The tests of `testing` are the laws of all datasets.
    assert {f for f in folders if not (REPO / "tests" / f).is_dir()} <= {"testing"}


def test_folders_do_not_import_each_other() -> None:
    assert folders_in_cycles(INNER) == set()


def test_no_import_cycle() -> None:
    assert find_cycle(MODULES, KNOWN) == []


def test_no_import_inside_a_function() -> None:
    hidden = [
        f"{module.relative_path}:{imported.line} imports {imported.target} inside a function"
        for module in MODULES
        for imported in module.imports(KNOWN)
        if imported.inside_function
        and OPTIONAL.get(imported.target.split(".")[0]) != module.relative_path
    ]
    assert hidden == []


def stage_tests(modules: Iterable[Module], stages: set[str]) -> Iterator[str]:
    """Places of `isinstance(x, Stage)`, also where the classes stand in a tuple of the module."""
    for module in modules:
        tuples = {
            target.id: node.value
            for node in module.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(module.tree):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "isinstance"):
                continue
            kinds: ast.expr = call.args[1]
            if isinstance(kinds, ast.Name):
                kinds = tuples.get(kinds.id, kinds)
            names = {node.id for node in ast.walk(kinds) if isinstance(node, ast.Name)}
            for name in sorted(names & stages):
                yield f"{module.relative_path}:{call.lineno}: {name}"


def test_stages_are_known_by_name_in_their_folder_only() -> None:
    inside = [m for m in MODULES if unit_of(m.name) == "stages"]
    stages = {
        node.name
        for module in inside
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Dataset")
    }
    assert "BatchDataset" in stages
    assert list(stage_tests([m for m in MODULES if m not in inside], stages)) == []


def test_every_allowed_optional_import_is_still_there() -> None:
    used = {
        (imported.target.split(".")[0], module.relative_path)
        for module in MODULES
        for imported in module.imports(KNOWN)
    }
    assert set(OPTIONAL.items()) - used == set()


# The checks themselves, on a small package that breaks each rule.


@pytest.fixture
def broken_package(tmp_path):
    files = {
        "__init__.py": "",
        "core/__init__.py": "",
        "core/errors.py": "from typing import TYPE_CHECKING\nfrom energon_lite.core import state\n"
        "if TYPE_CHECKING:\n    from energon_lite.loader import Loader\n",
        "core/state.py": "from .errors import StateError\nfrom ..order.slices import cut\n",
        "order/__init__.py": "",
        "order/slices.py": "import energon_lite.storage.tar\nfrom energon_lite import cut\n",
        "storage/__init__.py": "",
        "storage/tar.py": "def f():\n    from energon_lite.core import errors\n",
        "storage/deep/__init__.py": "from energon_lite.storage.deep import part",
        "storage/deep/part.py": "from energon_lite.core import state\nB = (Blend, int)\n"
        "isinstance(x, B) or isinstance(x, str) or isinstance(x, Blend | Mix)\n",
    }
    root = tmp_path / PACKAGE
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {module.name: module for module in package_modules(root)}


def test_checks_find_what_they_look_for(broken_package, monkeypatch) -> None:
    monkeypatch.setattr(Module, "relative_path", property(lambda self: self.name))
    known = frozenset(broken_package)
    errors = {name: layer_errors(m, known) for name, m in broken_package.items() if "." in name}

    assert errors["energon_lite.core.errors"] == [
        "energon_lite.core.errors:4: 'core' may not import 'loader'"
    ]
    assert errors["energon_lite.core.state"] == [
        "energon_lite.core.state:2: 'core' may not import 'order'"
    ]
    assert errors["energon_lite.order.slices"] == [
        "energon_lite.order.slices:1: 'order' may not import 'storage'",
        "energon_lite.order.slices:2 imports energon_lite itself; name the module that has it",
    ]
    errors_imports = list(broken_package["energon_lite.core.errors"].imports(known))
    assert [i.for_types_only for i in errors_imports] == [False, False, True]
    cycle = set(find_cycle(list(broken_package.values()), known))
    assert cycle == {"energon_lite.core.errors", "energon_lite.core.state"}
    tar_imports = list(broken_package["energon_lite.storage.tar"].imports(known))
    assert [i.inside_function for i in tar_imports] == [True]
    modules = list(broken_package.values())
    assert folders_in_cycles(modules) == {"core", "order", "storage"}
    assert list(stage_tests(modules, {"Blend", "Mix"})) == [
        f"energon_lite.storage.deep.part:3: {name}" for name in ("Blend", "Blend", "Mix")
    ]
