"""Energon's modules and names, from one table."""

from __future__ import annotations

import gc
import importlib
import pickle
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Optional

import pytest

import energon_lite
from energon_lite.names.energon_modules import (
    ENERGON_MODULES,
    REAL_MODULES,
    home_of,
    import_name,
    public_homes,
)
from energon_lite.names.later import REASONS, Later
from energon_lite.prepare.media import add_media_metadata
from energon_lite.prepare.run import prepare_like_energon
from energon_lite.sources.webdataset import BaseWebdatasetFactory, WebdatasetPreparator

PACKAGE = Path(energon_lite.__file__).parent


def test_every_module_has_its_names():
    for module, names in ENERGON_MODULES.items():
        found = importlib.import_module(f"energon_lite.{module}")
        for name in names:
            value = getattr(found, name)
            if isinstance(value, Later):
                assert name in REASONS, f"{module}.{name} is neither there nor explained"
                assert not hasattr(energon_lite, name) or getattr(energon_lite, name) is value
            elif hasattr(energon_lite, name) and name in energon_lite.__all__:
                assert getattr(energon_lite, name) is value, f"{module}.{name}"


def test_no_module_of_ours_is_hidden_by_one_of_the_table():
    files = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
    }
    packages = {name.removesuffix(".__init__") for name in files}
    assert packages & ENERGON_MODULES.keys() == REAL_MODULES


def test_existing_names_are_not_explained_as_missing():
    assert REASONS.keys() & public_homes().keys() == set()
    assert [name for name in REASONS if home_of(name) != "energon_lite.names.later"] == []


def test_the_stub_lists_what_is_public():
    assert set(energon_lite.__all__) == {*public_homes(), "__version__"}
    for name, home in public_homes().items():
        assert getattr(importlib.import_module(home), name) is getattr(energon_lite, name)


def test_import_of_the_library_imports_no_torch():
    code = "import sys, energon_lite; print('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False False\n"


def test_names_of_a_run_import_nothing_that_only_packing_or_preparing_or_joining_or_video_needs():
    code = """
        import sys
        from energon_lite import DefaultTaskEncoder, get_loader, get_train_dataset
        late = ["numba", "energon_lite.prepare.run", "energon_lite.batching.fit",
                "energon_lite.sources.joined", "energon_lite.stages.packing_stage",
                "energon_lite.metadataset.energon_api", "energon_lite.decoding.av_decoder",
                "energon_lite.decoding.media_metadata", "concurrent.futures.process"]
        print([name for name in late if name in sys.modules])
    """
    code = textwrap.dedent(code)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize("is_collecting", [False, True])
def test_import_of_a_name_leaves_garbage_collection_as_it_was(is_collecting):
    was_collecting = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        assert import_name("fractions:Fraction") is Fraction
        with pytest.raises(ModuleNotFoundError):
            import_name("energon_lite.nowhere:Name")
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if was_collecting else gc.disable)()


def test_functions_of_preparators_are_those_of_the_modules():
    assert BaseWebdatasetFactory.prepare_dataset is prepare_like_energon
    assert WebdatasetPreparator().add_media_metadata is add_media_metadata


def test_placeholders_import_annotate_and_compare_but_explain_themselves_when_used():
    from energon_lite.rng import WorkerRng
    from energon_lite.savable import Savable

    assert not isinstance(b"bytes", WorkerRng)
    assert pickle.loads(pickle.dumps(WorkerRng)) is WorkerRng

    class Mine(Savable[bytes]):
        old: Optional[WorkerRng] = None  # noqa: UP045
        rng: WorkerRng | None = None

    with pytest.raises(NotImplementedError, match="Savable: states are plain JSON"):
        Mine()
    with pytest.raises(NotImplementedError, match="WorkerRng: use `sample_rng"):
        WorkerRng.get  # noqa: B018


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="module 'energon_lite' has no attribute 'nothing'"):
        energon_lite.nothing  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        from energon_lite.flavors import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("energon_lite.flavors.nothing")
