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

import numpy as np
import pytest
import torch

import energon_lite
from energon_lite.extras.prepare.prepare_media import add_media_metadata
from energon_lite.extras.prepare.run import prepare_like_energon
from energon_lite.names.energon_modules import (
    ENERGON_MODULES,
    REAL_MODULES,
    home_of,
    import_name,
    public_homes,
)
from energon_lite.names.later import REASONS, Later
from energon_lite.sources.webdataset import BaseWebdatasetFactory, WebdatasetPreparator

from ..helpers import text_set

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
        late = ["numba", "energon_lite.extras.prepare.run", "energon_lite.batching.fit",
                "energon_lite.extras.joins.joined", "energon_lite.stages.packing_stage",
                "energon_lite.extras.energon.energon_api", "energon_lite.extras.media.av_decoder",
                "energon_lite.extras.media.media_metadata", "concurrent.futures.process"]
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
    from energon_lite.savable import Savable
    from energon_lite.wrappers.base import SampleIndex

    assert not isinstance(b"bytes", SampleIndex)
    assert pickle.loads(pickle.dumps(SampleIndex)) is SampleIndex

    class Mine(Savable[bytes]):
        old: Optional[SampleIndex] = None  # noqa: UP045
        index: SampleIndex | None = None

    with pytest.raises(NotImplementedError, match="Savable: states are plain JSON"):
        Mine()
    with pytest.raises(NotImplementedError, match="SampleIndex: your own stage"):
        SampleIndex.get_next  # noqa: B018


def test_records_of_states_have_attributes_and_survive_files(tmp_path):
    from energon_lite.savable_loader import SavableDataLoaderState, SavableDatasetCheckpoint

    inner = SavableDatasetCheckpoint(state={"x": torch.ones(2)}, offset=3)
    state = SavableDataLoaderState(worker_states=[inner], next_worker_id=1, micro_batch_size=2)
    with torch.serialization.safe_globals([SavableDataLoaderState, SavableDatasetCheckpoint]):
        torch.save({"state": state}, tmp_path / "s.pt")
        loaded = torch.load(tmp_path / "s.pt", weights_only=True)["state"]
    for found in (pickle.loads(pickle.dumps(state)), loaded):
        assert type(found) is SavableDataLoaderState
        assert (found.next_worker_id, found.worker_states[0].offset) == (1, 3)
    assert isinstance({}, SavableDataLoaderState)  # what loaders return
    assert not isinstance({}, SavableDatasetCheckpoint)
    with pytest.raises(AttributeError, match=r"no 'nothing'; it has .'worker_states'"):
        state.nothing  # noqa: B018


def test_a_stage_that_iterates_as_energons_do_is_refused_when_it_is_made(tmp_path):
    from energon_lite.wrappers.base import BaseWrapperDataset

    class Mine(BaseWrapperDataset):
        def __iter__(self):
            yield from self.dataset

    text_set(tmp_path, 3)
    dataset = energon_lite.get_train_dataset(tmp_path, batch_size=1)
    assert isinstance(dataset, BaseWrapperDataset)
    with pytest.raises(TypeError, match="Mine defines __iter__, which no loader calls here"):
        Mine(dataset, worker_config=None)


def test_an_index_of_lines_is_written_as_by_energon(tmp_path):
    from energon_lite.flavors.jsonl.ijsonl import (
        IJSONL_SUFFIX,
        IJsonlIndexReader,
        IJsonlIndexWriter,
    )

    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 22}\n')
    with IJsonlIndexWriter(path) as writer:
        for offset in (0, 9, 19):
            writer.append(offset)
    index = path.with_suffix(IJSONL_SUFFIX)
    assert index.read_bytes() == np.array([0, 9, 19], "<u8").tobytes()
    written = index.read_bytes()
    energon_lite.prepare_dataset(path)
    assert index.read_bytes() == written
    assert IJsonlIndexReader.count_samples(path) == 2
    assert IJsonlIndexReader.size(str(path)) == 19
    with IJsonlIndexReader(path) as reader:
        assert (len(reader), list(reader), reader[1]) == (3, [0, 9, 19], 9)
    IJsonlIndexWriter(tmp_path / "y.jsonl").close(finalize=False)
    assert not (tmp_path / "y.jsonl.idx").exists()
    (tmp_path / "y.jsonl").write_text("{}\n")
    for call in (IJsonlIndexReader, IJsonlIndexReader.count_samples, IJsonlIndexReader.size):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "y.jsonl")


def test_unknown_names_are_errors():
    with pytest.raises(AttributeError, match="module 'energon_lite' has no attribute 'nothing'"):
        energon_lite.nothing  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        from energon_lite.flavors import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("energon_lite.flavors.nothing")
