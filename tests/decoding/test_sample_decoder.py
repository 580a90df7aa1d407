"""Decoding of parts: values, image modes, and errors that describe what is wrong."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from webdataset import tenbin
from webdataset.autodecode import ImageHandler

from energon_lite.core.errors import DecodingError
from energon_lite.core.samples import CrudeSample
from energon_lite.decoding.images import IMAGE_MODES
from energon_lite.decoding.sample_decoder import SampleDecoder
from energon_lite.storage import files

from ..programs import run_program

WIDTH, HEIGHT = 7, 5


def saved(save: Any, *values: Any, **named: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *values, **named)
    return stream.getvalue()


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    return saved(image.save, image_format, **options)


def picture(mode: str) -> Image.Image:
    """Makes a colourful picture in one of Pillow's modes."""
    values = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    if mode == "P":
        palette = Image.fromarray(values[..., :3]).quantize(8)
        palette.info["transparency"] = bytes([0, 128, 255])
        return palette
    if mode == "LAB":  # Pillow does not convert to it
        return Image.frombytes("LAB", (WIDTH, HEIGHT), values[..., :3].tobytes())
    return Image.fromarray(values).convert(mode)


def arrays(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values)


@pytest.mark.parametrize(
    ("part", "raw", "value"),
    [
        ("txt", "käse".encode(), "käse"),
        ("text", b"a", "a"),
        ("transcript", b"a", "a"),
        ("cls", b"7", 7),
        ("cls2", b"7\n", 7),
        ("index", b"-1", -1),
        ("inx", b"0", 0),
        ("id", b"12", 12),
        ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("jsn", b"3", 3),
        ("caption.txt", b"a", "a"),
        ("txt.gz", gzip.compress(b"zipped", mtime=0), "zipped"),
        ("a.json.gz", gzip.compress(b"[1]", mtime=0), [1]),
        ("bin.gz", gzip.compress(b"zipped", mtime=0), b"zipped"),
        ("gz", gzip.compress(b"zipped", mtime=0), b"zipped"),
        ("bin", b"raw", b"raw"),
        ("TXT", b"case matters for basic parts", b"case matters for basic parts"),
        ("h5", b"raw", b"raw"),
        ("eps", b"%!PS-Adobe", b"%!PS-Adobe"),
        *[(part, b"raw", b"raw") for part in ("ogg", "aac", "ts")],
    ],
)
def test_parts_are_decoded_by_their_last_extension(part: str, raw: bytes, value: Any) -> None:
    decoder = SampleDecoder()
    assert decoder.decode(part, raw) == value
    assert decoder({part: raw}) == {part: value}


def test_array_parts_keep_type_and_shape() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    decoder = SampleDecoder()
    npy = decoder.decode("npy", saved(np.save, array))
    assert (npy.dtype, npy.tolist()) == (array.dtype, array.tolist())
    npz = decoder.decode("npz", saved(np.savez, a=array, b=array + 1))
    found = {name: values.tolist() for name, values in npz.items()}
    assert found == {"a": array.tolist(), "b": (array + 1).tolist()}
    ten = decoder.decode("ten", bytes(tenbin.encode_buffer([array])))
    assert ten[0].tolist() == array.tolist()


class Trap:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a dataset was unpickled",)


@pytest.mark.parametrize("part", ["pkl", "pickle", "pyd", "pth", "a.pkl", "pkl.gz"])
def test_nothing_is_unpickled_unless_named(part: str) -> None:
    raw = pickle.dumps(Trap())
    packed = gzip.compress(raw) if part.endswith("gz") else raw
    assert SampleDecoder().decode(part, packed) == raw


def test_object_arrays_are_refused_rather_than_unpickled() -> None:
    array = np.array([Trap()], dtype=object)
    for part, raw in (("npy", saved(np.save, array)), ("npz", saved(np.savez, a=array))):
        with pytest.raises(DecodingError, match=rf"part '{part}' is not .*allow_pickle"):
            SampleDecoder(unpickle=("pkl",)).decode(part, raw)


def test_named_pickle_parts_are_unpickled() -> None:
    decoder = SampleDecoder(unpickle=("pkl", "pth"))
    assert decoder.decode("pkl", pickle.dumps({"a": 1})) == {"a": 1}
    pth = saved(lambda stream: torch.save({"a": torch.ones(2)}, stream))
    assert decoder.decode("pth", pth)["a"].tolist() == [1, 1]
    assert isinstance(decoder.decode("pyd", pickle.dumps(1)), bytes)


@pytest.mark.parametrize("kind", ["RGB PNG", "RGBA PNG", "L PNG", "LA PNG", "1 PNG", "RGB JPEG"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_images_are_decoded_as_webdataset_decodes_them(kind: str) -> None:
    mode, image_format = kind.split()
    part, raw = image_format.lower(), encoded(picture(mode), image_format)
    for spec in IMAGE_MODES:
        ours = SampleDecoder(image_decode=spec).decode(part, raw)
        theirs = ImageHandler(spec)(part, raw)
        assert type(ours) is type(theirs), spec
        ours_array, theirs_array = arrays(ours), arrays(theirs)
        assert ours_array.dtype == theirs_array.dtype, spec
        np.testing.assert_array_equal(ours_array, theirs_array, err_msg=spec)


@pytest.mark.parametrize(
    ("mode", "part"),
    [
        *[("P", "png"), ("P", "gif"), ("CMYK", "jpg"), ("CMYK", "tif"), ("I;16", "png")],
        *[("I;16", "tiff"), ("I;16", "pgm"), ("YCbCr", "jpg"), ("LAB", "tif"), ("RGB", "webp")],
        *[("RGB", "bmp"), ("RGB", "tga"), ("F", "tif"), ("RGBA", "ico"), ("RGB", "ppm")],
    ],
)
def test_every_kind_of_picture_works_in_every_mode(mode: str, part: str) -> None:
    image_format = {"jpg": "JPEG", "tif": "TIFF", "pgm": "PPM"}.get(part, part.upper())
    # Pillow writes a GIF with one transparent colour only.
    options: dict[str, Any] = {"transparency": 1} if part == "gif" else {}
    if part == "ico":
        options["sizes"] = [(WIDTH, HEIGHT)]  # Pillow 12 drops sizes below 16 pixels
    raw = encoded(picture(mode), image_format, **options)
    for spec, wanted in IMAGE_MODES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            image = SampleDecoder(image_decode=spec).decode(part, raw)
        if wanted.kind == "pil":
            assert (image.mode, image.size) == (wanted.colors, (WIDTH, HEIGHT)), spec
        else:
            check_values(image, wanted)


def check_values(image: Any, wanted: Any) -> None:
    """Shape, type and range of a decoded picture."""
    channels = (len(wanted.colors),) if wanted.colors != "L" else ()
    values = arrays(image)
    is_torch = wanted.kind == "torch"
    assert values.shape == (*channels * is_torch, HEIGHT, WIDTH, *channels * (not is_torch))
    assert values.dtype == (np.float32 if wanted.is_float else np.uint8)
    assert 0 <= values.min() <= values.max() <= (1 if wanted.is_float else 255)
    assert wanted.kind != "torch" or image.is_contiguous()
    values[...] = 0  # writable


@pytest.mark.parametrize("part", ["png", "tiff", "pgm"])
def test_16_bit_grey_keeps_its_upper_byte_instead_of_turning_white(part: str) -> None:
    image = picture("I;16")
    raw = encoded(image, {"pgm": "PPM"}.get(part, part.upper()))
    decoded = SampleDecoder(image_decode="torchrgb8").decode(part, raw)
    expected = np.asarray(image) >> 8
    for channel in decoded:
        np.testing.assert_array_equal(channel.numpy(), expected)


RAMP = np.linspace(0, 1, 20 * 30, dtype=np.float32).reshape(20, 30)


@pytest.mark.parametrize("spec", IMAGE_MODES)
@pytest.mark.parametrize(
    "pixels", [RAMP, RAMP * 255, (RAMP * 65535).astype(np.int32), (RAMP * 65535).astype(np.uint16)]
)
def test_grey_of_any_depth_keeps_its_picture(spec: str, pixels: Any) -> None:
    raw = encoded(Image.fromarray(pixels), "TIFF")
    found = arrays(SampleDecoder(image_decode=spec).decode("tif", raw))
    mode = IMAGE_MODES[spec]
    if mode.kind == "torch" and found.ndim == 3:
        found = np.moveaxis(found, 0, 2)
    values = found.reshape(*RAMP.shape, -1)[..., 0] / (1 if mode.is_float else 255)
    assert np.abs(values - RAMP).max() < 1 / 128


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (RAMP * 300, "from 0 to 300"),
        (RAMP - 0.5, "from -0.5 to 0.5"),
        (RAMP * np.nan, "from nan to nan"),
        ((RAMP * 255).astype(np.int32), "from 0 to 255"),
        ((RAMP * 70_000).astype(np.int32), "from 0 to 70000"),
        ((RAMP * 70_000).astype(np.int32) - 9, "from -9 to 69991"),
    ],
)
@pytest.mark.parametrize("spec", ["torchl", "pil", "rgb8"])
def test_grey_of_an_unknown_range_is_refused(spec: str, pixels: Any, words: str) -> None:
    raw = encoded(Image.fromarray(pixels), "TIFF")
    text = rf"part 'tif' of [\d,]+ bytes has grey values {words} of 32 bits, .* store it with 8"
    with pytest.raises(DecodingError, match=text):
        SampleDecoder(image_decode=spec).decode("tif", raw)


def test_images_are_recognised_by_content_and_by_guessing_in_unknown_parts() -> None:
    raw = encoded(picture("RGB"))
    assert SampleDecoder().decode("JPG", raw).shape == (3, HEIGHT, WIDTH)  # it is a PNG
    assert SampleDecoder().decode("seg.Jpeg.gz", gzip.compress(raw)).shape == (3, HEIGHT, WIDTH)
    guessing = SampleDecoder(guess_content=True)
    for image_format in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        image = encoded(picture("RGB"), image_format)
        assert guessing.decode("picture", image).shape == (3, HEIGHT, WIDTH), image_format
    assert guessing.decode("bin", b"no image") == b"no image"
    assert SampleDecoder(av_decode="bytes", guess_content=True).decode("mp4", raw) == raw
    assert guessing.decode("pkl", raw) == raw
    assert SampleDecoder().decode("picture", raw) == raw
    with pytest.raises(DecodingError, match="part 'picture' is a broken PNG"):
        guessing.decode("picture", raw[:40])


@pytest.mark.parametrize(
    ("part", "raw", "message"),
    [
        ("jpg", b"<htm", r"^part 'jpg' is not a JPEG \(starts with 3c 68 74 6d\)$"),
        ("jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n", "part 'jpg' is not a JPEG"),  # no Ghostscript
        ("webp", b"<htm", "part 'webp' is not a WebP"),
        ("xpm", b"<htm", "part 'xpm' is not an XPM"),
        ("seg.png", b"", r"part 'seg.png' is empty \(0 bytes\), not a PNG"),
        ("txt", b"ab\xff", r"part 'txt' is not UTF-8 text \(starts with 61 62 ff\): .*position 2"),
        ("json", b"{x}", r"part 'json' is not JSON \(starts with 7b 78 7d\): .*column 2"),
        ("json", b"[" * 100_000, "part 'json' is not JSON"),
        ("cls", b"seven", "part 'cls' is not a whole number"),
        ("npy", b"nothing", "part 'npy' is not a plain npy array"),
        ("npz", b"nothing", "part 'npz' is not an npz archive"),
        ("ten", b"nothing", "part 'ten' is not tenbin data"),
        ("txt.gz", b"text", r"part 'txt.gz' is not gzip data \(starts with 74 65 78 74\)"),
        ("json.gz", gzip.compress(b"x", mtime=0), "part 'json' is not JSON"),
    ],
)
def test_decoding_error_shows_the_first_bytes(part: str, raw: bytes, message: str) -> None:
    with pytest.raises(DecodingError, match=message) as caught:
        SampleDecoder()({"__key__": "k", part: raw})
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_truncated_image_is_called_broken(kept: float) -> None:
    whole = encoded(Image.effect_noise((64, 64), 50), "JPEG")
    raw = whole[: int(len(whole) * kept)]
    message = rf"part 'jpg' is a broken JPEG of {len(raw):,} bytes"
    with pytest.raises(DecodingError, match=message) as caught:
        SampleDecoder().decode("folder/x.1.jpg", raw)
    assert getattr(caught.value, "__notes__", None) == ["file 'folder/x.1.jpg'"]


@pytest.mark.parametrize("part", ["mp", "msg", "cbor"])
def test_missing_package_is_an_import_error_that_names_what_to_install(part, monkeypatch):
    name = "cbor" if part == "cbor" else "msgpack"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        SampleDecoder().decode(part, b"\x01")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_decode": "torchrbg"}, "Unknown imagespec: 'torchrbg'. Did you mean"),
        ({"av_decode": "avdecoder"}, "unknown mode 'avdecoder'. Did you mean 'AVDecoder'"),
        ({"unpickle": ("pickel",)}, "'pickel' .*Did you mean 'pickle'"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleDecoder(**settings)


def test_decoder_is_immutable_comparable_and_picklable() -> None:
    decoder = SampleDecoder(image_decode="pil", unpickle=["pkl"])  # type: ignore[arg-type]
    assert decoder.decode("txt", b"a") == "a"
    copy = pickle.loads(pickle.dumps(decoder))
    assert copy == decoder
    assert hash(copy) == hash(decoder)
    assert copy != SampleDecoder()
    assert copy.decode("txt", b"a") == "a"
    assert json.loads(json.dumps(decoder.config())) == {
        "image_decode": "pil", "av_decode": "AVDecoder", "video_decode_audio": False,
        "guess_content": False, "unpickle": ["pkl"],
    }  # fmt: skip
    assert SampleDecoder(**decoder.config()) == decoder
    with pytest.raises(AttributeError):
        decoder.image_decode = "l"  # type: ignore[misc]


def test_samples_keep_their_class_and_service_entries() -> None:
    crude = CrudeSample(__key__="k", __index__=b"3", txt=b"t", done="already")
    decoded = SampleDecoder()(crude)
    assert type(decoded) is CrudeSample
    assert decoded == {"__key__": "k", "__index__": b"3", "txt": "t", "done": "already"}
    assert crude["txt"] == b"t"
    assert type(SampleDecoder()({"txt": b"t"})) is dict


def test_images_may_stay_bytes_beside_decoded_json() -> None:
    decoder = SampleDecoder(image_decode="bytes", guess_content=True)
    raw = encoded(picture("RGB"))
    decoded = decoder({"__key__": "a", "jpg": raw, "png.gz": gzip.compress(raw), "x": raw,
                       "json": b'{"a": 1}'})  # fmt: skip
    assert decoded == {"__key__": "a", "jpg": raw, "png.gz": raw, "x": raw, "json": {"a": 1}}
    assert pickle.loads(pickle.dumps(decoder)) == decoder
    later = SampleDecoder(image_decode="rgb8").decode("jpg", decoded["jpg"])
    assert later.shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize(
    ("part", "like"), [("jpg.0", "jpg"), ("a.json.12", "json"), ("txt.1", "txt")]
)
def test_one_of_several_parts_is_decoded_by_the_text_before_its_number(part, like) -> None:
    raw = {"jpg": encoded(picture("RGB"), "JPEG"), "json": b"[1]", "txt": b"text"}[like]
    decoder = SampleDecoder(image_decode="rgb8")
    expected = decoder.decode(like, raw)
    assert np.array_equal(decoder({part: raw})[part], expected)
    assert np.array_equal(decoder.decode(part, raw), expected)
    assert decoder({"0": raw})["0"] == raw


def test_pickled_part_that_stays_bytes_warns_once_with_the_setting(caplog) -> None:
    files.warn_once.cache_clear()
    raw = pickle.dumps([1])
    for _ in range(3):
        assert SampleDecoder()({"pickle": raw, "a.pth": raw}) == {"pickle": raw, "a.pth": raw}
    texts = [record.message for record in caplog.records]
    assert len(texts) == 2
    assert "unpickle=('pickle',)" in texts[0]
    assert "unpickle=('pth',)" in texts[1]
    caplog.clear()
    assert SampleDecoder(unpickle=("pickle",))({"pickle": raw}) == {"pickle": [1]}
    assert not caplog.records


def test_audio_and_video_without_pyav_are_an_error_with_the_install_line() -> None:
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from energon_lite import AVDecoder, SampleDecoder\n"
        "print(SampleDecoder(av_decode='bytes').decode('mp4', b'raw'))\n"
        "for mode in ('AVDecoder', 'torch', 'pyav'):\n"
        "    try: SampleDecoder(av_decode=mode).decode('mp4', b'raw')\n"
        "    except ImportError as error: print(error)\n"
    )
    out = run_program("-c", code)
    lines = out.stdout.splitlines()
    assert lines[0] == "b'raw'"
    assert len(lines) == 4
    assert all("pip install 'energon_lite[av]'" in line for line in lines[1:])


def test_gzip_data_cut_off_is_no_bomb() -> None:
    packed = gzip.compress(b"\xff" * 1000, 0)[:-50]  # ends as if 4 GiB were declared
    with pytest.raises(DecodingError, match="ends before its end marker"):
        SampleDecoder(max_bytes=2000).decode("bin.gz", packed)
