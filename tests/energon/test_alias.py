"""`import megatron.energon` finds this library, and nothing else is disturbed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..programs import run_program

REPO = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    result = run_program("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_names_are_the_same_objects_under_both_names_and_none_is_shadowed():
    out = run("""
        import sys
        import energon_lite
        energon_lite.as_energon()
        finders = list(sys.meta_path)
        energon_lite.as_energon()  # a second time is harmless
        assert sys.meta_path == finders
        import megatron.energon
        import megatron.energon.edataclass, energon_lite.edataclass, energon_lite.as_energon
        from megatron.energon.flavors.webdataset import DefaultDecoderWebdatasetFactory
        from megatron.energon.task_encoder.base import Batch, TaskEncoder, stateless
        import megatron.energon.wrappers.repeat_dataset as repeat
        import energon_lite.wrappers.repeat_dataset as ours

        assert megatron.energon.edataclass is energon_lite.edataclass
        assert callable(energon_lite.edataclass)
        assert callable(energon_lite.as_energon)
        assert stateless is energon_lite.stateless
        assert Batch is energon_lite.Batch is megatron.energon.Batch
        assert repeat.RepeatDataset is ours.RepeatDataset is energon_lite.RepeatDataset
        assert Batch.__module__ == "energon_lite.core.samples"
        assert megatron.energon.flavors.base_dataset.Sample is energon_lite.Sample
        assert megatron.energon.task_encoder.TaskEncoder is TaskEncoder
        for unknown in ("megatron.energon.nothing", "megatron.core", "megatron.energon.core"):
            try:
                __import__(unknown)
            except ModuleNotFoundError as error:
                print(error)
    """)
    assert out.splitlines() == [
        "No module named 'megatron.energon.nothing'",
        "No module named 'megatron.core'",
        "No module named 'megatron.energon.core'",
    ]


@pytest.mark.parametrize(("when", "is_regular"), [("before", False), ("after", True)])
def test_another_megatron_continues_to_work(tmp_path, when, is_regular):
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("parallel_state = 5\n")
    if is_regular:
        (tmp_path / "megatron/__init__.py").write_text("")
    lines = [f"import sys; sys.path.insert(0, {str(tmp_path)!r})", "energon_lite.as_energon()"]
    out = run("\n".join([
        "import energon_lite",
        *(lines if when == "before" else reversed(lines)),
        "import megatron.energon",
        "from megatron.core import parallel_state",
        "import megatron.core",
        "from megatron import core, energon",
        "assert energon.SkipSample is energon_lite.SkipSample",
        "print(parallel_state)",
    ]))  # fmt: skip
    assert out == "5\n"


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_real_energon_is_refused_if_imported_and_else_passed_over(tmp_path, is_imported):
    (tmp_path / "megatron/energon").mkdir(parents=True)
    (tmp_path / "megatron/energon/__init__.py").write_text("" if is_imported else "1 / 0")
    out = run(f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        import {"megatron.energon, " * is_imported}energon_lite
        try:
            energon_lite.as_energon()
        except RuntimeError as error:
            print(error)
        from megatron.energon import {"__file__" if is_imported else "SkipSample"} as found
        print(found)
    """)
    assert ("already imported, from" in out) == ("before the first import" in out) == is_imported
    assert ("<class 'energon_lite.core.errors.SkipSample'>" in out) != is_imported


MAIN = """
import multiprocessing, sys
from importlib.metadata import version
from {beside} import NAME
from megatron.energon.errors import SkipSample

class Mine(SkipSample):
    pass

def work(sample):
    return type(sample).__name__, sample.args, version("Megatron_Energon")

if __name__ == "__main__":
    print(sys.argv, __file__, NAME)
    sample = Mine("hello")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work, (sample,)))
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node", "1"]
AS = ["-m", "energon_lite.as_energon"]


@pytest.mark.parametrize(
    ("launcher", "is_module"),
    [
        pytest.param(AS, True, marks=pytest.mark.soak), (TORCHRUN + AS, False),
        (AS + TORCHRUN, True), pytest.param(AS + TORCHRUN, False, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_a_script_or_module_runs_as_main_with_its_arguments_also_in_spawned_processes(
    tmp_path, is_module, launcher
):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("import megatron.energon\n")
    (package / "beside.py").write_text("NAME = 'beside'\n")
    script = package / "__main__.py"
    script.write_text(MAIN.replace("{beside}", ".beside" if is_module else "beside"))
    what = ["-m", "pack"] if is_module else [str(script)]
    result = subprocess.run(
        [sys.executable, "-W", "error", *launcher, *what, "--steps", "3"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    first, second = result.stdout.splitlines()
    assert first == f"{[str(script), '--steps', '3']} {script} beside"
    assert second == "('Mine', ('hello',), '7.4.1')"


def test_the_version_is_that_of_the_code_which_is_imported(tmp_path):
    """An installed Megatron-Energon is passed over, so that its version would be wrong."""
    info = tmp_path / "megatron_energon-6.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: megatron-energon\nVersion: 6.0.1\n")
    out = run(f"""
        import sys; sys.path.insert(0, {str(tmp_path)!r})
        from importlib.metadata import distributions, entry_points, files, requires, version
        import energon_lite
        print(version("megatron-energon"))
        energon_lite.as_energon()
        print(version("megatron-energon"), version("megatron_energon"), files("megatron-energon"))
        print(requires("megatron-energon"), "energon_lite" in str(list(distributions())))
        print(version("pytest") != "7.4.1", len(entry_points()) > 0)
    """)
    assert out.splitlines() == ["6.0.1", "7.4.1 7.4.1 None", "None False", "True True"]


def test_a_command_is_written_but_never_over_another_one(tmp_path):
    command = tmp_path / "bin/energon"
    for _ in range(2):  # over one of ours
        out = run_program(*AS, "--install-command", command.parent).stdout
        assert out == f"Wrote {command}, which runs energon-lite. To remove it: rm {command}\n"
    found = subprocess.run([command, "prepare", "--help"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "--split-ratio" in found.stdout
    command.write_text("#!/usr/bin/python\nfrom megatron.energon.cli.main import main\n")
    result = run_program(*AS, "--install-command", command.parent)
    assert result.returncode == 1
    assert f"{command} is of Megatron-Energon" in result.stderr
    assert "nothing was written" in result.stderr
    assert "megatron.energon" in command.read_text()


@pytest.mark.parametrize("words", [["-m"], ["-m", "nothing_there"]])
def test_what_cannot_run_is_refused(words):
    result = run_program(*AS, *words)
    assert result.returncode == 1
    assert ("no module" if len(words) > 1 else "usage: python") in result.stderr.lower()


@pytest.mark.processes
def test_workers_are_forked_whatever_the_global_start_method(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        import sys

        from megatron.energon import (
            DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, prepare_dataset,
        )
        from tests.helpers import text_set


        class Encoder(DefaultTaskEncoder):
            def __init__(self):
                super().__init__()
                self.function = lambda sample: sample  # which no other method can send

            def encode_sample(self, sample):
                return self.function(sample)


        if __name__ == "__main__":
            multiprocessing.set_start_method(sys.argv[2])
            one = {"rank": 0, "world_size": 1, "num_workers": 1}
            path = text_set(__import__("pathlib").Path(sys.argv[1]), 4)
            dataset = get_train_dataset(
                path, task_encoder=Encoder(), batch_size=2, worker_config=WorkerConfig(**one)
            )
            print(len(next(iter(get_loader(dataset))).text))
            config = WorkerConfig(**one, start_method="spawn")
            try:
                next(iter(get_loader(dataset, worker_config=config)))
            except TypeError:
                print("refused")
    """)
    )
    for method in ("spawn", "forkserver"):
        folder = str(tmp_path / method)
        result = run_program(*AS, script, folder, method)
        assert result.stdout.splitlines() == ["2", "refused"], result.stderr


def test_records_of_states_are_dataclasses_with_energons_names() -> None:
    out = run("""
        import dataclasses
        import pickle
        import energon_lite
        energon_lite.as_energon()
        from megatron.energon.flavors.webdataset.sample_loader import SliceState
        from megatron.energon.wrappers.group_batch_dataset import Bucket
        for record in (SliceState(index=2, current=17), Bucket(batch_size=3, samples=[1])):
            names = [field.name for field in dataclasses.fields(record)]
            print(type(record).__module__, names, pickle.loads(pickle.dumps(record)) == record)
    """)
    assert out.splitlines() == [
        "megatron.energon.flavors.webdataset.sample_loader ['index', 'current'] True",
        "megatron.energon.wrappers.group_batch_dataset ['batch_size', 'samples'] True",
    ]
