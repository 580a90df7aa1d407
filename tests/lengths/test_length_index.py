"""The length index: measured once, in parallel, continued, and noticed when it is out of date."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from energon_lite import (
    DefaultTaskEncoder,
    Packing,
    SkipSample,
    TextSample,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.core.errors import DatasetFormatError, EmptyDatasetError, FatalSampleError
from energon_lite.extras.cli import app
from energon_lite.extras.lengths.length_index import measure_lengths
from energon_lite.formats.length_files import lengths_path, read_lengths
from energon_lite.task_encoder.hooks import fingerprint

from ..helpers import metadataset, number_of, text_of, text_set
from ..programs import run_program

NUM_SAMPLES = 2500  # three tasks
CONFIG = WorkerConfig(rank=0, world_size=1, num_workers=0)


class Letters(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return len(sample.text)


class Resources(DefaultTaskEncoder):
    packing = Packing(capacity={"tokens": 99, "tiles": 9})

    @stateless
    def preencode_sample(self, sample: TextSample) -> TextSample:
        number = number_of(sample)
        if number % 5 == 2:
            raise SkipSample
        if number % 7 == 3:
            raise ValueError("broken")
        return sample

    @stateless
    def postencode_sample(self, sample: TextSample) -> TextSample:
        raise AssertionError("the heavy part is not needed for a length")

    def sample_length(self, sample: TextSample) -> dict[str, int]:
        return {"tiles": number_of(sample) % 4, "tokens": len(sample.text)}


class Expanding(Letters):
    @stateless
    def encode_sample(self, sample: TextSample) -> Iterator[TextSample]:
        for _ in range(number_of(sample) % 3):
            yield sample


def letters(sample: TextSample) -> int:
    return len(sample.text)


EXPECTED = [len(text_of(i)) for i in range(NUM_SAMPLES)]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_set(tmp_path_factory.mktemp("lengths") / "texts", NUM_SAMPLES)


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "texts")


def stored(root: Path, name: str = "default", resource: str = "tokens") -> list[int]:
    array = np.load(lengths_path(root, "train", name, resource), allow_pickle=False)
    assert array.dtype == np.uint16
    return array.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_is_measured(root, num_workers) -> None:
    shown: list[tuple[str, int, int]] = []
    (report,) = measure_lengths(
        root, Letters(), num_workers=num_workers, progress=lambda *at: shown.append(at)
    )
    assert stored(root) == EXPECTED
    assert report.totals == {"tokens": sum(EXPECTED)}
    assert report.longest == {"tokens": max(EXPECTED)}
    assert (report.samples, report.measured) == (NUM_SAMPLES, NUM_SAMPLES)
    assert shown[-1] == ("texts/train", NUM_SAMPLES, NUM_SAMPLES)
    assert not list(root.rglob("*.partial*"))


def test_nothing_is_measured_twice_unless_data_or_code_changed(root) -> None:
    measure_lengths(root, Letters(), num_workers=0)
    (report,) = measure_lengths(root, Letters(), num_workers=0)
    assert report.measured == 0
    assert report.totals == {"tokens": sum(EXPECTED)}
    (report,) = measure_lengths(root, Expanding(), num_workers=0)
    assert report.measured == NUM_SAMPLES
    assert stored(root) == [n * (i % 3) for i, n in enumerate(EXPECTED)]


def test_empty_split_parts_are_passed_over_unless_named(root) -> None:
    split = root / ".nv-meta/split.yaml"
    split.write_text(split.read_text().replace("exclude:", "  test: []\nexclude:"))
    (report,) = measure_lengths(root, Letters(), num_workers=0)
    assert report.split_part == "train"
    with pytest.raises(EmptyDatasetError, match="no shards in split part 'test'"):
        measure_lengths(root, Letters(), num_workers=0, split_parts=["test"])
    split.write_text("split_parts: {train: [], test: []}\n")
    with pytest.raises(EmptyDatasetError, match="nothing to measure"):
        measure_lengths(root, Letters(), num_workers=0)


def test_index_of_read_only_data_lies_elsewhere_and_is_read_by_its_path(root, tmp_path) -> None:
    (root / ".nv-meta/energon_lite").write_text("here no folder can be made")
    with pytest.raises(PermissionError, match=r"--meta-dir DIR .* lengths='DIR/letters'"):
        measure_lengths(root, Letters(), name="letters", num_workers=0)
    before = sorted(root.rglob("*"))
    meta = tmp_path / "meta"
    (report,) = measure_lengths(root, Letters(), name="letters", meta_dir=meta, num_workers=0)
    assert sorted(root.rglob("*")) == before
    assert meta / "letters" in report.file.parents
    moved = root.rename(tmp_path / "moved")
    (report,) = measure_lengths(moved, Letters(), name="letters", meta_dir=meta, num_workers=0)
    assert report.measured == 0

    class Packed(Letters):
        packing = Packing(capacity=200, lengths=f"{meta}/letters")

        def pack_selected_samples(self, samples: list[TextSample]) -> TextSample:
            return samples[0]

    assert next(iter(get_train_dataset(moved, batch_size=None, task_encoder=Packed())))
    Packed.packing = Packing(capacity=200, lengths=f"{meta}/other")
    with pytest.raises(FileNotFoundError, match=f"--name other --meta-dir {meta}"):
        get_train_dataset(moved, batch_size=None, task_encoder=Packed())


def test_resources_have_arrays_of_their_own_and_bad_samples_length_zero(root) -> None:
    (report,) = measure_lengths(root, Resources(), name="vlm", num_workers=0)
    left = [i % 5 != 2 and i % 7 != 3 for i in range(NUM_SAMPLES)]
    tokens = [n * here for n, here in zip(EXPECTED, left, strict=True)]
    assert stored(root, "vlm") == tokens
    assert stored(root, "vlm", "tiles") == [i % 4 * here for i, here in enumerate(left)]
    assert report.skipped == sum(i % 5 == 2 for i in range(NUM_SAMPLES))
    assert report.skipped + report.failed == left.count(False)
    assert report.problems[0] == ("00003", report.problems[0][1])
    assert "broken" in report.problems[0][1]


def test_blend_of_tokens_uses_the_index(root, tmp_path) -> None:
    other = text_set(tmp_path / "other", 40)
    for path in (root, other):
        measure_lengths(path, Letters(), name="letters", num_workers=0)
    entries = [{"path": str(root)}, {"path": str(other)}]
    blend = metadataset({"unit": "tokens", "lengths": "letters", "blend": entries})
    dataset = get_train_dataset(blend, batch_size=4, worker_config=CONFIG)
    loader = get_savable_loader(dataset)
    assert list(islice(loader, 300))
    shares = [stats.actual_share for stats in loader.stats().values()]
    assert shares == pytest.approx([0.5, 0.5], abs=0.01)


def test_blend_warns_of_an_index_of_code_that_changed(root, tmp_path, caplog) -> None:
    measure_lengths(root, Letters(), num_workers=0)
    entries = [{"path": str(root)}]
    blend = metadataset({"unit": "tokens", "lengths": "default", "blend": entries})
    for encoder in (Letters(), Expanding(), DefaultTaskEncoder()):
        get_train_dataset(blend, batch_size=4, worker_config=CONFIG, task_encoder=encoder)
    assert not caplog.records
    facts = lengths_path(root, "train", "default").with_suffix(".json")
    text = facts.read_text()
    before = fingerprint(Letters())
    assert before in text
    facts.write_text(text.replace(before, before[:-1] + "x"))
    get_train_dataset(blend, batch_size=4, worker_config=CONFIG, task_encoder=Letters())
    assert "the code of the task encoder changed since length index 'default'" in caplog.text


def test_metadataset_has_each_of_its_folders_measured_once(root, tmp_path) -> None:
    part = {"path": "texts", "subset": {"range": [0, 10]}}
    blend = metadataset({"blend": [part, {"path": "texts"}]})
    (tmp_path / "meta.yaml").write_text(json.dumps(blend))
    (report,) = measure_lengths(tmp_path / "meta.yaml", Letters(), num_workers=0)
    assert report.measured == NUM_SAMPLES
    assert stored(root) == EXPECTED


KILLED = """
import os, sys
from tests.lengths.test_length_index import Letters, measure_lengths, stored, Path
class Slow(Letters):
    def sample_length(self, sample):
        if int(sample.__key__) == 2100:
            os.kill(os.getpid(), 9)
        return len(sample.text)
Slow.__module__, Slow.__qualname__ = Letters.__module__, "Letters"
import energon_lite.extras.lengths.length_index as index
index.fingerprint = lambda encoder: "the same"
measure_lengths(Path(sys.argv[1]), Slow(), num_workers=0)
"""


def test_killed_run_resumes_where_it_was_and_a_corrupt_rest_is_measured_again(root, monkeypatch):
    partial = lengths_path(root, "train", "default").with_suffix(".npy.partial")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"nothing")
    partial.with_name(partial.name + ".json").write_text("{}")
    done = run_program("-c", KILLED, root)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(FileNotFoundError, match="energon-lite lengths"):
        read_lengths(root, "train", "default", NUM_SAMPLES, "")
    monkeypatch.setattr(
        "energon_lite.extras.lengths.length_index.fingerprint", lambda encoder: "the same"
    )
    (report,) = measure_lengths(root, Letters(), num_workers=0)
    assert report.measured == NUM_SAMPLES - 2048
    assert stored(root) == EXPECTED


class Changing(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> Any:
        number = number_of(sample)
        return 3 if number < 1500 else {"tokens": 3, "tiles": 1}


class Negative(DefaultTaskEncoder):
    def sample_length(self, sample: TextSample) -> int:
        return -1


class Nothing(DefaultTaskEncoder):
    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        raise SkipSample

    def sample_length(self, sample: TextSample) -> int:
        return 1


@pytest.mark.parametrize(
    ("encoder", "error", "text"),
    [
        (DefaultTaskEncoder, ValueError, "does not say how long a sample is"),
        (Changing, DatasetFormatError, r"\['tiles', 'tokens'\] for .* and \['tokens'\]"),
        (Negative, FatalSampleError, "returned -1; return the sample's tokens"),
        (Nothing, DatasetFormatError, "no sample has a length"),
    ],
)
def test_encoder_that_cannot_measure_is_refused(root, encoder, error, text) -> None:
    with pytest.raises(error, match=text):
        measure_lengths(root, encoder(), num_workers=0)


# --------------------------------------------------------------------------------- command line


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lengths", *arguments])


def test_command_measures_with_a_class_or_a_function(root) -> None:
    for target in ("Letters", "letters"):
        done = command(str(root), "--with", f"{__name__}:{target}", "--name", target)
        assert done.exit_code == 0, done.output
        assert f"2,500 samples, {sum(EXPECTED):,} tokens (longest" in done.output
        assert stored(root, target) == EXPECTED
    done = command(str(root), "--with", f"{__name__}:Letters", "--name", "Letters", "--json")
    (report,) = json.loads(done.output)
    assert report["measured"] == 0


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("Letters", "neither module:Class nor"),
        ("nowhere:Letters", "No module named 'nowhere'"),
        (f"{__name__}:Lost", "has no attribute 'Lost'"),
        (f"{__name__}:NUM_SAMPLES", "is a int, neither"),
    ],
)
def test_command_names_what_is_wrong_with_the_encoder(root, target, text) -> None:
    done = command(str(root), "--with", target)
    assert done.exit_code == 2
    assert text in " ".join(done.output.replace("│", " ").split())
