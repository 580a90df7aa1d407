from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from energon_lite.cli import app
from energon_lite.storage.nvmeta import is_prepared, read_dataset_config, read_info

from .conftest import REPO, write_tar, write_texts

TYPED = ["--split-ratio", "2,1,1", "--sample-type", "TextSample", "--field-map", "text=txt"]


@pytest.fixture
def root(tmp_path):
    write_texts(tmp_path / "data", samples_per_shard=5)
    return tmp_path / "data"


def run(*args: object):
    """Runs the command; stdin is no terminal."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_prepare_info_and_lint_of_a_good_dataset_exit_with_zero(root):
    prepared = run("prepare", root, *TYPED)
    assert prepared.exit_code == 0
    assert "20 samples in 4 shards" in prepared.stdout
    assert "train: 10 samples in 2 shards" in prepared.stdout
    info = run("info", root)
    assert info.exit_code == 0
    assert "sample type: TextSample (megatron.energon)" in info.stdout
    assert "val: 25.0%, 5 samples in 1 shard\n" in info.stdout
    lint = run("lint", root)
    assert lint.exit_code == 0
    assert "20 samples decoded (0 failed), 0 errors, 0 warnings" in lint.stdout


@pytest.mark.parametrize("command", ["prepare", "info", "lint"])
def test_reports_are_also_json(root, command):
    options = TYPED if command == "prepare" else []
    if command != "prepare":
        run("prepare", root, *TYPED)
    result = run(command, root, *options, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["shards"] == 4
    assert report["samples"] == 20


def test_field_maps_are_json_or_pairs(root):
    args = ["--split-ratio", "2,1,1", "--sample-type", "TextSample", "--force-overwrite"]
    for texts in (['{"text": "txt,md"}'], ["text=txt,md"]):
        maps = [arg for text in texts for arg in ("--field-map", text)]
        assert run("prepare", root, *args, *maps).exit_code == 0
        assert read_dataset_config(root)["field_map"] == {"text": "txt,md"}


def test_split_parts_are_given_by_pattern(root):
    parts = ["--split-parts", "train:shard-000[0-2]", "--split-parts", "dev:shard-0003"]
    assert run("prepare", root, *parts, "--skip-dataset-yaml").exit_code == 0
    splits = json.loads(run("info", root, "--json").stdout)["splits"]
    assert {name: split["samples"] for name, split in splits.items()} == {"train": 15, "dev": 5}


@pytest.mark.parametrize(
    ("args", "option"),
    [
        ([], "--split-ratio"),
        (["--split-ratio", "2,1,1"], "--sample-type"),
        (["--split-ratio", "2,1,1", "--sample-type", "TextSample"], "--field-map"),
        ([*TYPED, "--field-map", "{text: txt}"], "--field-map"),
        ([*TYPED, "--field-map", "text"], "--field-map"),
        (["--split-parts", "train"], "--split-parts"),
        (["--num-workers", "-1"], "--num-workers"),
        (["--foo"], "--foo"),
    ],
)
def test_a_missing_or_malformed_option_is_a_usage_error_that_names_it(root, args, option):
    result = run("prepare", root, *args)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not is_prepared(root)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--split-ratio", "8,1", "--sample-type", "Nope"], "unknown sample type 'Nope'"),
        (["--split-ratio", "8,1,1", "--skip-dataset-yaml"], "leaves 'val' empty"),
        (["--split-parts", "a:*.tar", "--skip-dataset-yaml"], "looks like a glob"),
    ],
)
def test_answers_that_do_not_fit_exit_with_one(root, args, message):
    result = run("prepare", root, *args, *(["--field-map", "a=b"] if "Nope" in args else []))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["prepare", "info", "lint"])
def test_a_missing_folder_exits_with_one_and_a_message(tmp_path, command):
    result = run(command, tmp_path / "none")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "does not exist" in result.stderr


def test_a_bad_tar_exits_with_one_and_names_it(root):
    (root / "shard-0002.tar").write_bytes(b"")
    result = run("prepare", root, *TYPED)
    assert result.exit_code == 1
    assert "shard-0002.tar: the file is empty" in result.stderr
    assert result.stdout == ""


def test_a_prepared_folder_is_not_prepared_again_unless_asked(root):
    assert run("prepare", root, *TYPED).exit_code == 0
    again = run("prepare", root, *TYPED)
    assert again.exit_code == 1
    assert "--force-overwrite" in again.stderr
    assert run("prepare", root, *TYPED, "--force-overwrite").exit_code == 0
    assert run("prepare", root, "--tar-index-only").exit_code == 0


def test_a_dry_run_says_what_it_would_write(root):
    result = run("prepare", root, *TYPED, "--dry-run")
    assert result.exit_code == 0
    assert "Would prepare" in result.stdout
    assert ".nv-meta/dataset.yaml" in result.stdout
    assert not is_prepared(root)


def test_only_the_tars_that_are_named_are_prepared(root):
    typed = [*TYPED, "--split-ratio", "1,0,0"]
    assert run("prepare", root, "shard-000{2..1}.tar", "*0.tar", *typed).exit_code == 0
    assert list(read_info(root).shard_counts) == [f"shard-000{i}.tar" for i in (2, 1, 0)]
    result = run("prepare", root, "other/*.tar", *typed, "--force-overwrite")
    assert result.exit_code == 1
    assert "other/*.tar matches no .tar file" in result.stderr


def test_shuffled_tars_are_all_in_the_split(root):
    assert run("prepare", root, *TYPED, "--shuffle-tars").exit_code == 0
    assert json.loads(run("info", root, "--json").stdout)["splits"]["train"]["shards"] == 2
    assert list(read_info(root).shard_counts) == [f"shard-{i:04d}.tar" for i in range(4)]


def test_lint_exits_with_one_if_every_sample_fails(tmp_path):
    write_tar(tmp_path / "a.tar", [(f"{i}.json", b"{broken") for i in range(3)])
    fields = ["--sample-type", "TextSample", "--field-map", "text=json[a]"]
    assert run("prepare", tmp_path, "--split-ratio", "1,0,0", *fields).exit_code == 0
    result = run("lint", tmp_path)
    assert result.exit_code == 1
    assert "3 samples decoded (3 failed)" in result.stdout
    assert "a.tar, sample '0'" in result.stdout


def test_the_progress_bar_is_on_stderr_and_only_on_wish(root):
    assert "Indexing shards" not in run("prepare", root, *TYPED, "--dry-run").output
    result = run("prepare", root, *TYPED, "--progress")
    assert "4/4" in result.stderr
    assert "4/4" not in result.stdout


def test_version_and_help_without_a_command():
    assert run("--version").stdout.startswith("energon-lite ")
    assert "prepare" in run("--help").stdout
    for command in ("prepare", "info", "lint", "plan", "schema"):
        assert run(command, "--help").exit_code == 0


@pytest.fixture
def blend(root):
    """A metadataset of two splits of the prepared folder."""
    assert run("prepare", root, *TYPED).exit_code == 0
    path = root.parent / "blend.yaml"
    path.write_text(
        "__module__: energon_lite\n"
        "__class__: MetadatasetV2\n"
        "splits:\n"
        "  train:\n"
        "    blend:\n"
        "      - {path: ./data, weight: 3}\n"
        "      - {path: ./data, weight: 1, split_part: val, name: other}\n"
    )
    return path


def test_plan_says_what_a_run_will_give(root, blend):
    options = ["--steps", 10, "--batch-size", 4, "--world-size", 2, "--num-streams", 4]
    result = run("plan", blend, *options)
    assert result.exit_code == 0
    assert "10 steps of 2 ranks x 4 samples, from 4 streams: 80 samples" in result.stdout
    assert "warning: data/train: each of its 10 samples comes" in result.stdout
    report = json.loads(run("plan", blend, *options, "--json").stdout)
    assert [source["name"] for source in report["sources"]] == ["data/train", "other"]
    assert sum(source["samples"] for source in report["sources"]) == report["samples"] == 80
    folder = run("plan", root, "--steps", 100, "--no-repeat", "--split-part", "val")
    assert "5 of 100 steps of 1 rank x 1 sample" in folder.stdout
    assert "warning: the pass ends after 5 of 100 steps" in folder.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "--steps"),
        (["--steps", "0"], 2, "--steps"),
        (["--steps", "1", "--split-part", "tain"], 1, "no split 'tain'. Did you mean 'train'?"),
        (["--steps", "1", "--no-repeat"], 1, "`until: first` or `until: all_once`"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(blend, args, code, message):
    result = run("plan", blend, *args)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_schema_prints_that_of_the_docs():
    result = run("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(
        (REPO / "docs/metadataset.schema.json").read_text()
    )


COMMAND = [sys.executable, "-c", "from energon_lite.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "200"}


@pytest.mark.processes
def test_a_closed_stdin_never_makes_it_wait(root):
    # Not by `preexec_fn`: that runs Python between fork and exec, and may wait forever for a lock
    # that another thread of the tests held.
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "prepare", str(root)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert result.returncode == 2
    assert "--split-ratio" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_on_a_terminal_it_asks_for_what_is_missing(root):
    parent, child = pty.openpty()
    command = [*COMMAND, "prepare", str(root)]
    with subprocess.Popen(
        command, stdin=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        os.close(child)
        os.write(parent, b"1,2\n2,1,1\nNope\nTextSample\ntxt\n")
        try:
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            os.close(parent)
    assert process.returncode == 0, errors
    assert b"Part for 'text' (str)" in output
    assert b"Parts of the first sample: txt" in output
    assert read_dataset_config(root)["field_map"] == {"text": "txt"}


def test_the_package_does_not_import_the_command_line():
    code = "import sys, energon_lite; print([m for m in ('typer', 'rich') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=Path.home(),
    )
    assert result.stdout.strip() == "[]", result.stderr
