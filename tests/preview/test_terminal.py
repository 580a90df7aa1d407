from __future__ import annotations

import io
import itertools
import wave

import pytest
import torch
from typer.testing import CliRunner

from energon_lite import AVDecoder, CrudeSample, TextSample
from energon_lite.core.errors import DatasetFormatError
from energon_lite.extras.cli import app
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.preview.terminal import sample_text, sample_texts

from ..conftest import jpeg, write_captions


@pytest.fixture
def root(tmp_path):
    write_captions(tmp_path / "set", num_shards=2, samples_per_shard=3)
    field_map = {"image": "jpg", "caption": "txt"}
    prepare_dataset(
        tmp_path / "set", split_ratio="1,1,0", sample_type="CaptioningSample",
        field_map=field_map, num_workers=0,
    )  # fmt: skip
    return tmp_path / "set"


def test_each_sample_is_text_with_its_fields_and_a_picture(root):
    texts = list(sample_texts(root, "train"))
    assert len(texts) == 3
    first = texts[0].splitlines()
    assert first[0] == "CaptioningSample"
    assert any(line.startswith(" - image (<class 'bytes'>): 24 x 16 JPEG, ") for line in first)
    assert sum(line.startswith("       ") for line in first) == 16
    assert any(line.startswith(" - caption (<class 'str'>): '") for line in first)


def test_crude_samples_and_metadatasets_are_shown(root, tmp_path):
    (root / ".nv-meta" / "crude.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )
    crude = list(sample_texts(root, "val", dataset_config="crude.yaml"))
    assert len(crude) == 3
    assert crude[0].startswith("CrudeSample\n")
    (tmp_path / "m.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        "splits:\n  all:\n    blend:\n    - {path: set, split_part: train}\n"
        "    - {path: set, split_part: val}\n"
    )
    assert len(list(sample_texts(tmp_path / "m.yaml", "all"))) == 6


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 400), (4, 300, 2), (3, 40, 40)])
def test_pictures_of_any_shape_and_colour_are_drawn(shape):
    for value in (torch.zeros(shape), torch.full(shape, 255, dtype=torch.uint8)):
        sample = TextSample(__key__="a", __restore_key__=(), text=value)
        rows = [r for r in sample_text(sample).splitlines() if r.startswith("       ")]
        assert 1 <= len(rows) <= 16
        (width,) = {len(row) for row in rows}
        assert 8 <= width <= 67


def test_long_and_odd_texts_are_shortened_and_escaped():
    sample = TextSample(__key__="a", __restore_key__=(), text="\x1b[2J" + "x" * 1000)
    assert "\x1b" not in sample_text(sample)
    assert "(1,009 characters)" in sample_text(sample)


def test_the_command_asks_after_each_sample(root):
    result = CliRunner().invoke(app, ["preview", str(root)], input="y\nn\n")
    assert result.exit_code == 0
    assert result.output.count("Continue? [y/N]") == 2
    assert "train, sample 1: CaptioningSample" in result.output
    both = CliRunner().invoke(
        app, ["preview", str(root), "--split-parts", "test,val"], input="y\n" * 9
    )
    assert both.exit_code == 0, both.output
    assert "test is empty" in both.output
    assert both.output.count("val, sample") == 3
    wrong = CliRunner().invoke(app, ["preview", str(root), "--split-parts", "foo"])
    assert wrong.exit_code == 1
    with pytest.raises(DatasetFormatError, match="no split part 'foo'"):
        next(itertools.chain(sample_texts(root, "foo")))


def test_audio_is_shown_by_its_duration():
    pytest.importorskip("av")
    stream = io.BytesIO()
    with wave.open(stream, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16000))
    text = sample_text(CrudeSample(wav=AVDecoder(io.BytesIO(stream.getvalue()))))
    assert "1.0 s, 8,000 Hz, 1 channel" in text
    assert "object at" not in text


def test_crude_parts_are_drawn_and_nothing_reaches_the_terminal_as_a_command():
    turns = [{"role": "us\x1ber", "content": "Hi\x9b"}, {"role": "assistant", "content": "Hello"}]
    sample = CrudeSample(
        jpg=jpeg(3), broken=jpeg(3)[:200], chat=turns, meta={"a": ["\x1b", None]}, bin=bytes(3000),
        list=["one", jpeg(4)],
    )  # fmt: skip
    sample["\x1b[31m"] = 1
    text = sample_text(sample)
    assert all(line.isprintable() for line in text.splitlines())
    assert " - jpg (<class 'bytes'>): 24 x 16 JPEG, " in text
    assert text.count("\n       ") == 16 + 2 + 16
    assert "       us\\x1ber: Hi\\x9b\n       assistant: Hello\n" in text
    assert ' - meta (<class \'dict\'>): {"a": ["\\u001b", null]}\n' in text
    assert " - bin (<class 'bytes'>): 3 KiB\n" in text
    assert "     - 1 (<class 'bytes'>): 24 x 16 JPEG, " in text
    assert " - \\x1b[31m (<class 'int'>): 1" in text
