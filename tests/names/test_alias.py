"""`import megatron.energon` finds this library, and nothing else is disturbed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def run(code: str, *arguments: str, cwd: Path = REPO) -> str:
    result = subprocess.run(
        [sys.executable, *arguments, *(["-c", textwrap.dedent(code)] if code else [])],
        cwd=cwd, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_names_are_the_same_objects_under_both_names_and_none_is_shadowed():
    out = run("""
        import energon_lite
        energon_lite.as_energon()
        energon_lite.as_energon()  # a second time is harmless
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_regular", [False, True])
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


def test_a_script_runs_as_main_with_its_arguments_also_in_spawned_processes(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        from beside import NAME
        from megatron.energon.errors import SkipSample

        class Mine(SkipSample):
            pass

        def work(sample):
            return type(sample).__name__, sample.args

        if __name__ == "__main__":
            print(sys.argv, __file__, NAME)
            sample = Mine("hello")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(work, (sample,)))
    """)
    )
    out = run("", "-m", "energon_lite.as_energon", str(script), "--steps", "3")
    first, second = out.splitlines()
    assert first == f"{[str(script), '--steps', '3']} {script} beside"
    assert second == "('Mine', ('hello',))"
