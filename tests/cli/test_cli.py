from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from energon_lite.extras.cli import app
from energon_lite.extras.cli.commands import main
from energon_lite.formats.nvmeta import (
    is_prepared,
    read_dataset_config,
    read_info,
)

from ..conftest import REPO, write_captions, write_tar, write_texts
from ..helpers import text_set
from ..programs import run_program

TYPED = ["--split-ratio", "2,1,1", "--sample-type", "TextSample", "--field-map", "text=txt"]


@pytest.fixture
def root(tmp_path):
    write_texts(tmp_path / "data", samples_per_shard=5)
    return tmp_path / "data"


COMMANDS = {name: command for name, command in main.commands.items() if not command.hidden}
COMMANDS |= {
    f"checkpoint {name}": command
    for name, command in COMMANDS.pop("checkpoint").commands.items()
    if not command.hidden
}


def run(*args: object, answers: str = ""):
    """Runs the command; stdin is no terminal, and has the answers of a script."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=answers)


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


def test_prepare_info_and_lint_of_a_jsonl_file_ask_nothing(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": \n\n{"a": 3}\n')
    prepared = run("prepare", path)
    assert prepared.exit_code == 0
    assert "Prepared" in prepared.stdout
    assert "3 samples in 1 shard" in prepared.stdout
    assert "1 of 3 lines are no JSON objects, from { to }, and will be skipped: line 2" in (
        prepared.stdout
    )
    assert prepared.stdout.endswith("\nDone. Found 3 samples.\n")
    assert "dataset.yaml" not in prepared.stderr
    assert "JSONL, crude samples, in every split; indexed" in run("info", path).stdout
    lint = run("lint", path)
    assert lint.exit_code == 1
    assert "line 2 (blank lines not counted)" in lint.stdout
    refused = run("prepare", path, "--split-ratio", "8,1,1")
    assert refused.exit_code == 2
    assert "split_ratio is for folders of tars" in refused.stderr


def test_field_maps_are_json_or_pairs(root):
    args = ["--split-ratio", "2,1,1", "--sample-type", "TextSample", "--force-overwrite"]
    for texts in (['{"text": "txt,md"}'], ["text=txt,md"]):
        maps = [arg for text in texts for arg in ("--field-map", text)]
        assert run("prepare", root, *args, *maps).exit_code == 0
        assert read_dataset_config(root)["field_map"] == {"text": "txt,md"}


def test_split_parts_are_chosen_by_pattern(root):
    parts = ["--split-parts", "train:shard-000[0-2]", "--split-parts", "dev:shard-0003"]
    assert run("prepare", root, *parts, "--skip-dataset-yaml").exit_code == 0
    splits = json.loads(run("info", root, "--json").stdout)["splits"]
    assert {name: split["samples"] for name, split in splits.items()} == {"train": 15, "dev": 5}


def test_a_prepared_folder_is_prepared_again_only_by_option(root):
    assert run("prepare", root, *TYPED).exit_code == 0
    for given in (TYPED, []):
        again = run("prepare", root, *given)
        assert again.exit_code == 1
        assert "is already prepared; use force_overwrite (--force-overwrite)" in again.stderr
    assert run("prepare", root, *TYPED, "--force-overwrite").exit_code == 0
    assert run("prepare", root, "--tar-index-only").exit_code == 0


def test_only_the_tars_that_are_named_are_prepared(root):
    typed = [*TYPED, "--split-ratio", "1,0,0"]
    assert run("prepare", root, "shard-000{2..1}.tar", "*0.tar", *typed).exit_code == 0
    assert list(read_info(root).shard_counts) == [f"shard-000{i}.tar" for i in (2, 1, 0)]


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


def test_version_and_help_without_a_command():
    assert run("--version").stdout.startswith("energon-lite ")
    assert "prepare" in run("--help").stdout
    for command in ("prepare", "info", "lint", "plan"):
        assert run(command, "--help").exit_code == 0


BLEND = """__module__: energon_lite
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: ./data, weight: 3}
      - {path: ./data, weight: 1, split_part: val, name: other}
"""


@pytest.fixture
def blend(root):
    """A metadataset of two splits of the prepared folder."""
    assert run("prepare", root, *TYPED).exit_code == 0
    path = root.parent / "blend.yaml"
    path.write_text(BLEND)
    return path


def test_plan_predicts_what_a_run_will_read(root, blend):
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


MAIN = "from energon_lite.extras.cli import main; main()"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "200"}


def python(code: str) -> str:
    """The last line that code prints in a new process."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ALL_TYPES = """0. CaptioningSample
1. ImageClassificationSample
2. ImageSample
3. InterleavedSample
4. MultiChoiceVQASample
5. OCRSample
6. Sample
7. SimilarityInterleavedSample
8. TextSample
9. VQASample
10. VidQASample
11. Crude sample (plain dict for cooking)
12. VQAOCRSample
"""


def test_answers_of_energons_wizard_are_taken_in_its_order_with_its_numbers(tmp_path):
    """The answers of a script that is written for `energon prepare`."""
    write_captions(tmp_path, num_shards=4, samples_per_shard=2)
    answers = "2,1,1\ny\n0\ny\njpg\ntxt\n"
    result = run("prepare", tmp_path, answers=answers)
    assert result.exit_code == 0, result.output
    assert ALL_TYPES in result.stdout
    assert read_dataset_config(tmp_path) == {
        "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
        "field_map": {"image": "jpg", "caption": "txt"},
    }
    again = run("prepare", tmp_path, answers="y\n1,1,0\nYes\n11\n")
    assert again.exit_code == 0, again.output
    assert "It seems the dataset had already been prepared." in again.stdout
    assert read_dataset_config(tmp_path)["__class__"] == "CrudeWebdataset"
    stays = run("prepare", tmp_path, answers="y\n1,1,0\nn\n")
    assert stays.exit_code == 0
    assert read_dataset_config(tmp_path)["__class__"] == "CrudeWebdataset"
    assert run("prepare", tmp_path, answers="n\n").exit_code == 1


def test_optional_fields_are_passed_over_by_an_empty_answer(tmp_path):
    write_captions(tmp_path, num_shards=4, samples_per_shard=2)
    result = run("prepare", tmp_path, answers="2,1,1\ny\n1\n\njpg\n\ntxt,json[a]\n")
    assert result.exit_code == 0, result.output
    assert read_dataset_config(tmp_path)["field_map"] == {
        "image": "jpg",
        "label_name": "txt,json[a]",
    }


def test_no_question_is_put_that_an_option_answers(tmp_path):
    write_captions(tmp_path, num_shards=4, samples_per_shard=2)
    result = run(
        "prepare", tmp_path, "--split-ratio", "2,1,1", "--sample-type", "CaptioningSample",
        answers="y\njpg\ntxt\n",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "sample types are available" not in result.stdout
    assert "train/val/test split" not in result.stdout


@pytest.mark.parametrize("way", ["answers", "option"])
def test_a_sample_loader_of_ones_own_is_begun(root, way):
    options = ["--split-ratio", "2,1,1", "--sample-type", "TextSample"]
    more = ["--non-interactive"] if way == "option" else []
    result = run("prepare", root, *options, *more, answers="" if more else "n\n")
    assert result.exit_code == 0, result.output
    assert "Edit .nv-meta/sample_loader.py" in result.stderr
    assert read_dataset_config(root)["sample_loader"] == "sample_loader.py:sample_loader"
    code = root / ".nv-meta/sample_loader.py"
    assert "part in ('txt',)" in code.read_text()
    code.write_text(code.read_text().replace("TODO", "txt"))
    assert run("lint", root, "--trust").exit_code == 0
    assert run("prepare", root, *options, *more, "--force-overwrite", answers="n\n").exit_code == 0
    assert "TODO" not in code.read_text().splitlines()[5]


def test_without_a_sample_type_energons_scripts_write_no_dataset_yaml(root):
    result = run("prepare", root, "--non-interactive", "--split-ratio", "2,1,1")
    assert result.exit_code == 0
    assert "No dataset.yaml was written; give --sample-type" in result.stderr
    assert not (root / ".nv-meta/dataset.yaml").exists()


@pytest.mark.parametrize(("answers", "option"), [("2,1,1\ny\n", "--sample-type"), ("", "--split")])
def test_script_that_goes_silent_is_not_waited_for(root, monkeypatch, capsys, answers, option):
    monkeypatch.setattr("energon_lite.extras.cli.wizard.LIMIT_SEC", 1)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdin", stdin)
        stdout.write(answers)
        stdout.flush()
        with pytest.raises(SystemExit) as end:
            app(["prepare", str(root)])
    assert end.value.code == 2
    assert option in capsys.readouterr().err


def test_every_option_of_energon_is_known(root):
    energon = [
        "--no-progress", "--split-ratio", "2,1,1", "--exclude", "nothing", "--num-workers", "1",
        "--shuffle-tars", "--fix-duplicates", "--non-interactive", "--force-overwrite",
        "--dataset-yaml-name", "other.yaml", "--sample-type", "TextSample", "--tmp-path", "/tmp",
        "--field-map", '{"text": "txt"}',
    ]  # fmt: skip
    assert run("prepare", root, *energon).exit_code == 0
    assert run("prepare", root, "--tar-index-only", "--progress", "--num-workers", 1).exit_code == 0
    both = ["--split-config", "split.yaml", "--dataset-config", "other.yaml"]
    assert run("info", root, *both).exit_code == 0
    assert run("lint", root, *both, "--split-parts", "train,val", "--parallel", 1).exit_code == 0
    for option in ("--media-metadata-by-header", "--media-metadata-by-glob=*.txt"):
        again = run("prepare", root, *energon, option)
        assert again.exit_code == 0, again.output
        assert "media metadata of 0 files" in again.stdout
        refused = run("prepare", root, "--tar-index-only", option)
        assert refused.exit_code == 2
        assert "run `energon-lite prepare-media` after it" in refused.stderr
    for short in (["-h"], ["prepare", "-h"], ["-V"]):
        assert run(*short).exit_code == 0


def test_command_of_energon_that_is_missing_names_its_replacement():
    result = run("analyze-debug", "info", "some/path", "--new-world-size", 4)
    assert result.exit_code == 2
    assert "energon-lite analyze-debug: not in this version; " in result.stderr
    assert "analyze-debug" not in run("--help").stdout.split()


def test_commands_are_objects_under_energons_names(root):
    from energon_lite.cli import main
    from energon_lite.cli.main import main as group
    from energon_lite.cli.main import prepare_command
    from energon_lite.tools.checkpoint import command_redist
    from energon_lite.tools.info import command as info_command
    from energon_lite.tools.prepare import command

    assert command is prepare_command is group.commands["prepare"]
    assert command_redist is group.commands["checkpoint"].commands["redist"]
    assert callable(main)
    assert main is not group
    args = [str(root), "--split-ratio", "2,1,1", "--skip-dataset-yaml", "--no-progress"]
    for do, given, printed in ((command, args, "Done\n"), (info_command, args[:1], "20 samples")):
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout), pytest.raises(SystemExit) as end:
            do.main(args=given, prog_name="energon")
        assert end.value.code in (None, 0)
        assert printed in stdout.getvalue()


def test_empty_split_parts_are_linted_without_an_error(root):
    assert run("prepare", root, *TYPED, "--split-ratio", "1,0,0").exit_code == 0
    assert run("lint", root, "--split-parts", "train,val,test").exit_code == 0
    assert run("lint", root, "--split-parts", "dev").exit_code == 1


def test_a_metadataset_is_described_and_checked(blend):
    info = run("info", blend)
    assert info.exit_code == 0
    assert "train: 15 samples in 2 sources" in info.stdout
    assert "other: 5 samples in 1 shard, part 'val' of" in info.stdout
    report = json.loads(run("info", blend, "--json").stdout)
    assert [source["samples"] for source in report["metadataset"]["train"]] == [10, 5]
    blend.write_text(blend.read_text().replace("split_part: val", "split_part: dev"))
    assert "other: " in run("info", blend).stdout
    assert "there is nothing to prepare" in run("prepare", blend).stdout
    blend.write_text(blend.read_text().replace("weight", "wieght"))
    assert run("prepare", blend).exit_code == 1


@pytest.mark.processes
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name):
    example = run(*name.split(), "--help").stdout.partition("Example:\n  ")[2].split()
    assert example[: 1 + name.count(" ") + 1] == ["energon-lite", *name.split()]
    arguments = itertools.takewhile(lambda word: word != ">", example[2 + name.count(" ") :])
    assert COMMANDS[name].make_context(name, [*arguments]).args == []


def test_names_of_commands_are_completed():
    env = {"_ENERGON_LITE_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(
        app, prog_name="energon-lite", env={**env, "COMP_WORDS": "energon-lite prep"}
    )
    assert shown.stdout.split() == ["prepare", "prepare-media"]


@pytest.mark.parametrize("args", ["--help", "prepare --help", "info --help", "lengths -h", "-V"])
def test_help_imports_neither_torch_nor_numpy(args):
    code = (
        "import sys\nfrom energon_lite.extras.cli import app\n"
        f"try: app({args.split()!r})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'rich.progress') if m in sys.modules])"
    )
    assert python(code) == "[]"


@pytest.mark.processes
def test_info_of_a_folder_imports_no_torch(root):
    assert run("prepare", root, *TYPED).exit_code == 0
    code = (
        f"import sys\nfrom energon_lite.extras.cli import app\ntry: app(['info', {str(root)!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    assert python(code) == "0 False"


@pytest.mark.processes
@pytest.mark.parametrize("command", ["prepare", "info"])
def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path, command):
    folder = text_set(tmp_path / "\u6570\u636e", 3)
    arguments = [command, str(folder)]
    if command == "prepare":
        arguments += ["--tar-index-only", "--num-workers", "0"]
    code = f"import sys; sys.stdout.reconfigure(encoding='latin-1'); {MAIN}"
    done = run_program("-c", code, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert command == "prepare" or "\\u6570\\u636e" in done.stdout


@pytest.mark.processes
def test_a_closed_stdin_never_makes_it_wait(root):
    code = f"import os, sys; os.close(0); sys.stdin = None; {MAIN}"
    result = run_program("-c", code, "prepare", root, env=ENVIRONMENT)
    assert result.returncode == 2
    assert "--split-ratio" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.processes
def test_on_a_terminal_it_asks_for_what_is_missing(root):
    terminal, stdin = pty.openpty()
    os.write(terminal, b"8,x\n2,1,1\ny\nNope\n6\n8\ny\npng\n\ntxt\n")
    done = run_program("-c", MAIN, "prepare", root, env=ENVIRONMENT, stdin=stdin)
    os.close(terminal)
    os.close(stdin)
    assert done.returncode == 0, done.stderr
    assert "give two or three numbers" in done.stdout
    assert "'Nope' is not a sample type of the list" in done.stdout
    assert "'6' is not a sample type of the list" in done.stdout
    assert done.stdout.count("That type doesn't exist in the WebDataset") == 2
    assert read_dataset_config(root)["field_map"] == {"text": "txt"}


def test_the_package_does_not_import_the_command_line():
    code = "import sys, energon_lite; print([m for m in ('typer', 'rich') if m in sys.modules])"
    assert python(code) == "[]"


# Media metadata and states


@pytest.fixture
def states() -> list[dict]:
    return json.loads((REPO / "tests/golden/state-v7.json").read_text())["plain"]["states"]


def test_states_are_described_of_json_and_of_torch_files(states, tmp_path):
    files = [tmp_path / f"rank{i}.json" for i in range(2)]
    for path, state in zip(files, states, strict=True):
        path.write_text(json.dumps(state))
    result = run("checkpoint", "info", *files)
    assert result.exit_code == 0, result.output
    assert "Checkpoint type: Per-rank checkpoint files, 2 states" in result.stdout
    assert "Number of DP ranks: 2\nNumber of streams: 4\n\n" in result.stdout
    assert "  Rank 1 (rank1.json):\n    Pass 0\n" in result.stdout
    assert "    Batches since the pass, or a virtual epoch, began: 7\n" in result.stdout
    assert "    texts/train: 21 samples read (also into buffers), 0 skipped" in result.stdout
    alone = run("checkpoint", "info", files[1])
    assert "warning: no state of rank 0: those of all 2 ranks are needed" in alone.stdout
    megatron = {"iteration": 7, "dataloader_state_dict": states[0], "model": torch.zeros(3)}
    torch.save(megatron, tmp_path / "model.pt")
    together = {"trainer": {"data": {"loader_state": json.dumps(states)}}}
    torch.save(together, tmp_path / "all.pt")
    assert "1 state of" in run("checkpoint", "info", tmp_path / "model.pt").stdout
    report = json.loads(run("checkpoint", "info", tmp_path / "all.pt", "--json").stdout)
    assert [state["rank"] for state in report["states"]] == [0, 1]
    assert report["warnings"] == []
    files[0].write_text(json.dumps({**states[0], "count": 8}))
    assert "rank 0 (rank0.json): was edited" in run("checkpoint", "info", *files).stdout


RATIO = ["prepare", "data", "--split-ratio"]
PLAN = ["plan", "blend.yaml"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        *((["prepare", "data", *TYPED[:number]], 2, TYPED[number]) for number in (0, 2, 4)),
        (["prepare", "data", *TYPED, "--field-map", "{text: txt}"], 2, "--field-map"),
        (["prepare", "data", *TYPED, "--field-map", "text"], 2, "--field-map"),
        (["prepare", "data", "--split-parts", "train"], 2, "--split-parts"),
        (["prepare", "data", "--num-workers", "-1"], 2, "--num-workers"),
        (["prepare", "data", "--foo"], 2, "--foo"),
        *(([*RATIO, ratio], 2, "split ratio") for ratio in ("8", "1,2,3,4", "1,-1,1", "0,0,0")),
        ([*RATIO, "8,x"], 2, "give two or three numbers"),
        ([*RATIO, "8,1", "--sample-type", "Nope", *TYPED[4:]], 2, "unknown sample type 'Nope'"),
        (["prepare", "data", "--split-parts", "a:*.tar", "--skip-dataset-yaml"], 2,
         "looks like a glob"),
        (["prepare", "data", "--non-interactive"], 2, "missing: shares of train,val,test"),
        (["prepare-media", "data"], 2, "Exactly one of"),
        (["lengths", "data", "--with", "energon_lite:Pakcing"], 2, "Did you mean 'Packing'?"),
        (["lengths", "data", "--with", "nothing:Encoder"], 2, "No module named"),
        (["info", "."], 1, "of its folders one, two are: give the path of one"),
        (["info", "data"], 1, "run `energon-lite prepare data`"),
        (PLAN, 2, "--steps"),
        ([*PLAN, "--steps", "0"], 2, "--steps"),
        ([*PLAN, "--steps", "1", "--split-part", "tain"], 1, "'tain'. Did you mean 'train'?"),
        ([*PLAN, "--steps", "1", "--no-repeat"], 2, "`until: first` or `until: all_once`"),
        ([*RATIO, "1", *TYPED[2:]], 0, ""),
    ],
)  # fmt: skip
def test_wrong_options_exit_with_two_and_faults_of_data_with_one(
    root, monkeypatch, args, code, words
):
    for name in ("one", "two"):
        write_tar(root.parent / name / "0.tar", [("0.txt", b"x")])
        assert run("prepare", root.parent / name, "--split-ratio", "1", *TYPED[2:]).exit_code == 0
    monkeypatch.chdir(root.parent)
    Path("blend.yaml").write_text(BLEND.replace("./data", "./one").replace("val", "train"))
    result = run(*args)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert ("train: 20 samples" in result.stdout) == (code == 0)
    assert (is_prepared(root), "Traceback" in result.stderr) == (code == 0, False)
    assert code == 0 or not list(root.rglob("*.idx"))


def test_a_folder_that_cannot_be_written_to_is_prepared_by_links(root, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("energon_lite.storage.files.open_own", refuse)
    result = run("prepare", root, *TYPED)
    assert result.exit_code == 1
    assert f"`mkdir FOLDER && ln -s {root}/*.tar FOLDER`" in result.stderr


class _Code:
    def __reduce__(self):
        return exit, ()


def test_files_without_a_state_are_refused_and_nothing_is_unpickled(states, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"a": 1}, path)
    assert "holds no state of a loader" in run("checkpoint", "info", path).stderr
    torch.save(_Code(), path)
    refused = run("checkpoint", "info", path)
    assert refused.exit_code == 1
    assert "neither JSON nor a torch file of plain values" in refused.stderr
    path.write_bytes(path.read_bytes() + b"megatron.energon.savable_loader")
    assert "a state of Megatron-Energon" in run("checkpoint", "info", path).stderr
    path.write_text(json.dumps({**states[0], "rank": "x"}))
    assert "the state's 'rank' is 'x'" in run("checkpoint", "info", path).stderr
    redist = run("checkpoint", "redist", "a", "b", "--new-world-size", 4)
    assert redist.exit_code == 0
    assert "loaded as they are on any number of ranks" in redist.stdout
