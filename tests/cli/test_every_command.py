"""What holds for each command: options, exit codes, JSON, progress bars."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.extras.cli import app

from ..conftest import REPO, write_texts
from .test_cli import COMMANDS, TYPED

# Arguments with which each command works in the folder `place`; the first is what it reads.
WORKS: dict[str, list[str]] = {
    "prepare": ["data", *TYPED, "--force-overwrite"],
    "prepare-media": ["data", "--media-metadata-by-extension", "--num-workers=1"],
    "info": ["data"],
    "lint": ["data", "--num-workers=1"],
    "preview": ["data", "--terminal"],
    "lengths": ["data", "--with=lengths_of_texts:of", "--num-workers=1"],
    "plan": ["data", "--steps=9"],
    "checkpoint info": ["."],
    "report": ["stats.jsonl"],
    "bench": ["data", "--seconds=1", "--num-workers=0"],
    "mount": ["data", "files"],
}


def flags_of(name: str) -> set[str]:
    return {flag for parameter in COMMANDS[name].params for flag in parameter.opts}


WITH_JSON = [name for name in WORKS if "--json" in flags_of(name)]
WITH_BAR = [name for name in WORKS if "--progress" in flags_of(name)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_texts(folder / "data", samples_per_shard=5)
    (folder / "files").mkdir()
    (folder / "lengths_of_texts.py").write_text("def of(sample):\n    return len(sample.text)\n")
    states = json.loads((REPO / "tests/golden/state-v7.json").read_text())["plain"]["states"]
    (folder / "a.json").write_text(json.dumps(states))
    for name in ("prepare", "lengths"):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert CliRunner().invoke(app, [name, *WORKS[name]]).exit_code == 0
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    data = get_train_dataset(folder / "data", batch_size=2, worker_config=config)
    loader = get_savable_loader(data)
    next(iter(loader))
    loader.stats().write_to(folder / "stats.jsonl", 1)
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def run(name: str, *arguments: str) -> Any:
    found = CliRunner().invoke(app, [*name.split(), *arguments], input="")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "Traceback" not in found.output
    return found


def test_the_table_has_every_command() -> None:
    assert set(WORKS) == set(COMMANDS)
    assert set(WORKS) - set(WITH_JSON) == {"preview", "mount"}  # a page, and files
    assert set(WITH_BAR) >= {"prepare", "lint", "lengths", "plan", "bench"}


@pytest.mark.parametrize("name", WORKS)
def test_wrong_options_exit_with_two_and_print_nothing_on_stdout(place, name) -> None:
    wrong = [(*WORKS[name], "--no-such-option"), ()]
    numbers = re.findall(r"(--[\w-]+) (?:<int|<float|INTEGER|FLOAT)", run(name, "--help").stdout)
    assert len(numbers) >= (name in ("prepare", "lint", "preview", "lengths", "plan", "bench"))
    wrong += [(*WORKS[name], f"{option}=x") for option in numbers]
    for arguments in wrong:
        refused = run(name, *arguments)
        assert refused.exit_code == 2, arguments
        assert refused.stdout == "", arguments
        assert "Error: " in refused.stderr, arguments


@pytest.mark.parametrize("name", WORKS)
def test_what_does_not_exist_exits_with_one_and_is_named(place, name) -> None:
    refused = run(name, "nowhere", *WORKS[name][1:])
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert "Error: " in refused.stderr
    assert "nowhere" in refused.stderr
    assert "does not exist" in refused.stderr
    assert "Errno" not in refused.stderr


@pytest.mark.parametrize("name", WITH_JSON)
def test_json_is_all_of_stdout_and_draws_no_bar(place, name, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    found = run(name, *WORKS[name], "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)
    assert found.stderr == ""


@pytest.mark.parametrize("name", WITH_BAR)
def test_bar_is_on_stderr_and_only_on_a_terminal_or_on_wish(place, name) -> None:
    assert run(name, *WORKS[name]).stderr == ""
    fresh = ["--name=fresh"] if name == "lengths" else []  # it does nothing twice
    shown = run(name, *WORKS[name], *fresh, "--progress")
    assert shown.exit_code == 0, shown.output
    assert "━" not in shown.stdout
    assert "━" in shown.stderr


def test_a_page_that_cannot_be_written_is_refused_before_the_work(place) -> None:
    for name in ("report", "bench"):
        for output, problem in (("none/a.html", "make the folder first"), (".", "is a folder")):
            refused = run(name, *WORKS[name], "--output", output)
            assert refused.exit_code == 2
            assert problem in refused.stderr


def test_prepare_of_a_metadataset_prints_json_too(place) -> None:
    blend = (
        "__module__: energon_lite\n__class__: MetadatasetV2\nsplits:\n  train:\n    path: ./data\n"
    )
    Path("one.yaml").write_text(blend)
    found = run("prepare", "one.yaml", "--json")
    assert json.loads(found.stdout) == {"path": "one.yaml", "joins": {}}
