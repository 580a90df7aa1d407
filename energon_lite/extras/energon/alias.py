"""`import megatron.energon` finds this library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from multiprocessing import get_all_start_methods
from pathlib import Path
from pkgutil import get_data
from sysconfig import get_path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from energon_lite.core.topology import WorkerConfig
from energon_lite.names.energon_modules import ENERGON_MODULES, REAL_MODULES, ROOT, make_module

ENERGON = "megatron.energon"
# The version of Energon that has these names, for code that checks it.
ENERGON_VERSION = "7.4.1"


def as_energon() -> None:
    """Makes `import megatron.energon` and its sub-modules resolve to this library.

    Call it before anything imports `megatron.energon`; once is enough. The names are the same
    objects as here. Other packages below `megatron` (`megatron.core`) are found as before. From
    then on worker processes are forked, as Energon's are, if no `start_method` is set.

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
    sys.meta_path.insert(0, _Energon())
    megatron = import_module("megatron")
    aliases = {"": _energon_package()}
    for name in ENERGON_MODULES:
        is_real = name in REAL_MODULES
        aliases[f".{name}"] = (
            make_module(name, of=ENERGON) if is_real else import_module(f"{ROOT}.{name}")
        )
    sys.modules.update({ENERGON + name: module for name, module in aliases.items()})
    vars(megatron)["energon"] = aliases[""]
    if "fork" in get_all_start_methods():
        WorkerConfig.default_start_method = "fork"


def main_code(target: str) -> tuple[Any, dict[str, Any]]:
    """Returns the code of `SCRIPT` or `-m MODULE`, and the names that its `__main__` has.

    A launcher of torch starts the script or module that it is given as `as_energon` does.
    """
    name = target.removeprefix("-m ")
    if name == target:
        return compile(Path(target).read_bytes(), target, "exec"), {"__file__": target}
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name += ".__main__"
        spec = find_spec(name)
    if spec is None:
        sys.exit(f"there is no module {name} to run; check its name, and PYTHONPATH")
    code = cast(Any, spec.loader).get_code(name)
    sys.argv[0] = str(spec.origin)
    if name in ("torch.distributed.run", "torch.distributed.launch"):
        options = import_module("torch.distributed.run").get_args_parser().parse_args(sys.argv[1:])
        place = len(sys.argv) - len(options.training_script_args) - 1
        as_module = ["-m"] * options.module
        sys.argv[place:place] = [*["-m"] * (not as_module), "energon_lite.as_energon", *as_module]
    # Spawned processes run the module of this name again.
    like = SimpleNamespace(name=f"{ROOT}.as_energon", parent=spec.parent)
    return code, {"__file__": spec.origin, "__package__": spec.parent, "__spec__": like}


def install_command(folder: str | None = None) -> None:
    """Writes a command `energon`, for shell scripts, which is `energon-lite`.

    Args:
        folder: where; by default beside the Python that runs this.

    Raises:
        SystemExit: There is a command `energon` of another package.
    """
    command = Path(folder or get_path("scripts")).absolute() / "energon"
    if command.exists() and "energon_lite" not in command.read_text(errors="replace"):
        sys.exit(
            f"{command} is of Megatron-Energon, or of another package: nothing was written. Name a "
            "folder that comes before it on PATH, or `pip uninstall megatron-energon`"
        )
    command.parent.mkdir(parents=True, exist_ok=True)
    script = (get_data(ROOT, "names/energon_command.txt") or b"").decode()
    command.write_text(script.replace("PYTHON", sys.executable))
    command.chmod(0o755)
    sys.stdout.write(f"Wrote {command}, which runs energon-lite. To remove it: rm {command}\n")


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


class _Energon(metadata.Distribution):
    """The distribution `megatron-energon`, whichever is installed: its code is not used."""

    def find_spec(self, *args: Any) -> None:
        """Finds no module."""

    def find_distributions(self, context: metadata.DistributionFinder.Context) -> list[Any]:
        """Finds one distribution, by its name."""
        name = (context.name or "").lower().replace("_", "-").replace(".", "-")
        return [self] if name == "megatron-energon" else []

    def read_text(self, filename: str) -> str | None:
        """Returns the metadata."""
        text = f"Metadata-Version: 2.1\nName: megatron-energon\nVersion: {ENERGON_VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        """Returns a path itself."""
        return path


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
