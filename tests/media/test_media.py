"""Media metadata: stored by prepare and prepare-media, read by key, used for lengths."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import sqlite3
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from energon_lite.core.errors import DatasetFormatError
from energon_lite.core.file_store import PrimaryFileStore
from energon_lite.extras.media import media_headers
from energon_lite.extras.media.media_metadata import MediaDatabase, read_media_metadata
from energon_lite.extras.prepare import prepare_dataset
from energon_lite.extras.prepare import prepare_media as media
from energon_lite.extras.prepare.prepare_media import prepare_media
from energon_lite.extras.stores.file_stores import SystemFileStore, WebdatasetFileStore
from energon_lite.media import (
    AVMetadata,
    ImageMetadata,
    MediaMetadataType,
    deserialize_media_metadata,
    serialize_media_metadata,
)
from energon_lite.media.extractor import MediaFilterConfig, MediaFilterStrategy
from energon_lite.media.filesystem_prepare import prepare_filesystem_dataset
from energon_lite.sources.webdataset import BaseWebdatasetFactory

from ..conftest import REPO, jpeg, write_tar

BY_EXTENSION = MediaFilterConfig.parse(None, False, True)
BY_HEADER = MediaFilterConfig.parse(None, True, False)
CLIPS = REPO.parent / "shared/data/av_clips"


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def size_of(i: int) -> tuple[int, int]:
    return 8 + i, 20 - i % 7


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for shard in range(3):
        members = []
        for i in range(4 * shard, 4 * shard + 4):
            members += [(f"{i:03d}.jpg", jpeg(i, size_of(i))), (f"{i:03d}.txt", b"text")]
        write_tar(tmp_path / f"data/{shard}.tar", members)
    return tmp_path / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in (
        ("a/b/x.png", png(3, 4)), ("y.JPG", png(5, 6, "L")), ("z.txt", png(7, 8)), ("q.jpg", b"no"),
    ):  # fmt: skip
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "files"


def rows(root: Path, table: str, columns: str = "*") -> list[tuple[object, ...]]:
    connection = sqlite3.connect(root / ".nv-meta/index.sqlite")
    return connection.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()


# ------------------------------------------------------------------------------ types and text


def test_metadata_are_stored_as_compact_json_of_what_is_known():
    image = ImageMetadata(width=32, height=24, format="PNG", mode="RGB")
    text = '{"width":32,"height":24,"format":"PNG","mode":"RGB"}'
    assert serialize_media_metadata(image) == (MediaMetadataType.IMAGE, text)
    assert deserialize_media_metadata("image", text) == image
    clip = AVMetadata(video_duration=63, video_num_frames=1891)
    assert serialize_media_metadata(clip) == (
        "av",
        '{"video_duration":63,"video_num_frames":1891}',
    )
    assert deserialize_media_metadata(MediaMetadataType.AV, "{}") == AVMetadata()
    assert AVMetadata.from_dict(clip.to_dict()) == clip


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("img", "{}", "Unsupported media metadata type: 'img'"),
        ("image", '{"width":3}', "missing 3 required"),
        ("image", '{"width":3,"hight":4}', "no field 'hight'. Did you mean 'height'"),
        ("image", '{"width":"3"}', "width='3' is no int"),
        ("av", '{"video_fps":true}', "video_fps=True is no float"),
        ("av", "[]", "no JSON object"),
        ("av", "{", "no valid JSON"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_by_name(kind, text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        deserialize_media_metadata(kind, text)


def test_one_of_three_filters_is_chosen():
    assert BY_EXTENSION.row() == ("EXTENSION", "")
    assert MediaFilterConfig.parse("*.jpg, *.PNG,", False, False).row() == ("GLOB", "*.jpg,*.PNG")
    for options in ((None, False, False), ("*.jpg", True, False), (None, True, True)):
        with pytest.raises(ValueError, match="Exactly one of GLOB, HEADER, or EXTENSION"):
            MediaFilterConfig.parse(*options)
    with pytest.raises(ValueError, match="no pattern"):
        MediaFilterConfig.parse(" ,", False, False)


def test_files_are_chosen_by_extension_content_or_pattern():
    picture = png(32, 24)
    found = ImageMetadata(width=32, height=24, format="PNG", mode="RGB")
    assert BY_EXTENSION.extract_metadata(picture, "a/b.seg.PNG") == found
    assert BY_EXTENSION.extract_metadata(picture, "a.jpg") == found
    assert BY_EXTENSION.extract_metadata(picture, "a.txt") is None
    assert BY_EXTENSION.extract_metadata(b"broken", "a.png") is None
    assert BY_HEADER.extract_metadata(picture, "a.txt") == found
    assert BY_HEADER.extract_metadata(b"text", "a.txt") is None
    by_glob = MediaFilterConfig(MediaFilterStrategy.GLOB, ["*.BIN", "x/*.png"])
    assert by_glob.extract_metadata(io.BytesIO(picture), "a/b.bin") == found
    assert by_glob.extract_metadata(picture, "x/a.png") == found
    assert by_glob.extract_metadata(picture, "a.png") is None
    with pytest.raises(ValueError, match="needs a filename"):
        BY_HEADER.extract_metadata(picture)


# ------------------------------------------------------------------------------------ preparing


@pytest.mark.parametrize("num_workers", [1, 2])
def test_prepare_stores_the_rows_of_the_format(root, num_workers):
    report = prepare_dataset(
        root, split_ratio="1,0,0", media_filter=BY_EXTENSION, num_workers=num_workers
    )
    assert report.media_files == 12
    stored = {f"{i:03d}.jpg": size_of(i) for i in range(12)}
    assert rows(root, "media_metadata") == [
        (key, "image", f'{{"width":{w},"height":{h},"format":"JPEG","mode":"RGB"}}')
        for key, (w, h) in stored.items()
    ]
    ((number, strategy, patterns, time),) = rows(root, "media_filters")
    assert (number, strategy, patterns) == (1, "EXTENSION", "")
    assert len(time) == len("2026-11-20 23:59:01")
    schema = dict(rows(root, "sqlite_master", "name, sql"))
    assert " ".join(schema["media_metadata"].split()) == (
        "CREATE TABLE media_metadata ( entry_key TEXT PRIMARY KEY, metadata_type TEXT NOT NULL, "
        "metadata_json TEXT NOT NULL )"
    )
    assert " ".join(schema["media_filters"].split()) == (
        "CREATE TABLE media_filters ( filter_id INTEGER PRIMARY KEY AUTOINCREMENT, strategy TEXT "
        "NOT NULL, patterns TEXT, created_at_utc TEXT DEFAULT CURRENT_TIMESTAMP, "
        "UNIQUE(strategy, patterns) )"
    )


def test_prepare_by_glob_works_and_a_pattern_without_files_stores_none(root):
    """Energon's --media-metadata-by-glob reports the shards as empty (fault 50)."""
    by_glob = MediaFilterConfig.parse("*3.jpg,*.mp4", False, False)
    report = prepare_dataset(root, split_ratio="1,0,0", media_filter=by_glob)
    assert [key for key, _, _ in rows(root, "media_metadata")] == ["003.jpg"]
    assert report.samples == 12
    assert rows(root, "media_filters", "strategy, patterns") == [("GLOB", "*3.jpg,*.mp4")]


def test_metadata_are_added_to_a_prepared_dataset_and_nothing_else_changes(root):
    prepare_dataset(root, split_ratio="2,1,0")
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    database = root / ".nv-meta/index.sqlite"
    samples = [rows(root, "samples"), rows(root, "sample_parts")]
    assert BaseWebdatasetFactory.add_media_metadata(root, media_filter=BY_HEADER, workers=2) == 12
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p != database} == {
        path: data for path, data in before.items() if path != database
    }
    assert [rows(root, "samples"), rows(root, "sample_parts")] == samples
    found = read_media_metadata(root, "007.jpg")
    assert found == ImageMetadata(width=15, height=20, format="JPEG", mode="RGB")


def test_metadata_of_earlier_runs_are_kept_where_the_files_are_the_same(root):
    prepare_dataset(root, split_ratio="1,0,0", media_filter=BY_EXTENSION)
    by_glob = MediaFilterConfig.parse("*.txt", False, False)
    assert prepare_media(root, by_glob).stored == 0
    assert len(rows(root, "media_metadata")) == 12
    assert rows(root, "media_filters", "filter_id, strategy") == [(1, "EXTENSION"), (2, "GLOB")]
    write_tar(root / "1.tar", [("004.jpg", jpeg(0)), ("new.jpg", jpeg(4))])
    report = prepare_dataset(root, split_ratio="1,0,0", force_overwrite=True)
    assert [w for w in report.warnings if "media metadata of 4 files" in w]
    assert len(rows(root, "media_metadata")) == 8
    again = prepare_dataset(root, tar_index_only=True)
    assert again.warnings == ()
    assert len(rows(root, "media_metadata")) == 8


def test_tars_that_are_not_those_prepared_are_refused(root):
    prepare_dataset(root, split_ratio="1,0,0")
    before = (root / ".nv-meta/index.sqlite").read_bytes()
    write_tar(root / "1.tar", [(f"{i:03d}.{p}", b"x" * 5000) for i in range(4, 8) for p in "ab"])
    with pytest.raises(DatasetFormatError, match=r"1\.tar: is not the tar that was prepared"):
        prepare_media(root, BY_HEADER)
    assert (root / ".nv-meta/index.sqlite").read_bytes() == before


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_folder_of_files_gets_an_index_of_nothing_but_metadata(folder, num_workers, monkeypatch):
    monkeypatch.setattr(media, "_FILES_PER_TASK", 2)
    report = prepare_media(folder, BY_EXTENSION, num_workers=num_workers)
    assert (report.stored, report.is_webdataset) == (2, False)
    assert report.warnings == (
        "1 media files cannot be read, and have no metadata: q.jpg: no image that can be read "
        "(the content is that of no image)",
    )
    assert sorted(path.name for path in (folder / ".nv-meta").iterdir()) == ["index.sqlite"]
    tables = {name for name, kind in rows(folder, "sqlite_master", "name, type") if kind == "table"}
    assert tables == {"media_metadata", "media_filters", "sqlite_sequence"}
    assert [key for key, _, _ in rows(folder, "media_metadata")] == ["a/b/x.png", "y.JPG"]
    (folder / "y.JPG").unlink()
    assert prepare_filesystem_dataset(folder, BY_HEADER, progress=False) == 2
    assert "1 media files cannot be read" in prepare_media(folder, BY_HEADER).warnings[0]
    assert [key for key, _, _ in rows(folder, "media_metadata")] == ["a/b/x.png", "z.txt"]


def test_a_folder_without_such_files_and_a_jsonl_are_refused(root, tmp_path):
    with pytest.raises(ValueError, match=r"none of 3 files .*run `energon-lite prepare .*` first"):
        prepare_media(root, BY_EXTENSION)
    (tmp_path / "x.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="only supports WebDatasets or filesystem datasets"):
        prepare_media(tmp_path / "x.jsonl", BY_EXTENSION)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        prepare_media(tmp_path / "none", BY_EXTENSION)
    with pytest.raises(FileNotFoundError, match="not a prepared dataset"):
        BaseWebdatasetFactory.add_media_metadata(root, media_filter=BY_EXTENSION)


def test_a_run_that_was_stopped_is_continued_and_leaves_the_old_index(folder, monkeypatch):
    monkeypatch.setattr(media, "_FILES_PER_TASK", 1)
    prepare_media(folder, MediaFilterConfig.parse("*.txt", False, False))
    before = (folder / ".nv-meta/index.sqlite").read_bytes()
    read: list[str] = []
    real = media_headers.read_metadata

    def stopping(name, file, config):
        if len(read) == 1:
            raise KeyboardInterrupt
        read.append(name)
        return real(name, file, config)

    monkeypatch.setattr(media_headers, "read_metadata", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare_media(folder, BY_EXTENSION, num_workers=1)
    assert (folder / ".nv-meta/index.sqlite").read_bytes() == before
    again: list[str] = []
    monkeypatch.setattr(
        media_headers, "read_metadata", lambda *args: (again.append(args[0]), real(*args))[1]
    )
    assert prepare_media(folder, BY_EXTENSION, num_workers=1).stored == 2
    assert read == ["a/b/x.png"]
    assert again == ["q.jpg", "y.JPG"]
    assert len(rows(folder, "media_metadata")) == 3


def test_a_large_picture_is_not_decoded(tmp_path, monkeypatch):
    """A header of 60,000 x 60,000 pixels: decoded, it would have 10 GB."""
    header = png(1, 1)
    chunk = header[12:16] + (60_000).to_bytes(4, "big") * 2 + header[24:29]
    huge = header[:12] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + header[33:]
    (tmp_path / "x.png").write_bytes(huge)
    report = prepare_media(tmp_path, BY_HEADER)
    assert report.stored == 0
    assert "raise PIL.Image.MAX_IMAGE_PIXELS" in report.warnings[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert prepare_media(tmp_path, BY_HEADER, num_workers=1).stored == 1
    assert read_media_metadata(tmp_path, "x.png").width == 60_000


# ---------------------------------------------------------------------------- audio and video


def test_without_pyav_such_files_are_counted_with_the_command_that_installs_it(
    tmp_path, monkeypatch
):
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypisom")
    (tmp_path / "b.wav").write_bytes(b"RIFF\0\0\0\0WAVE")
    (tmp_path / "c.png").write_bytes(png(3, 4))

    monkeypatch.setitem(sys.modules, "av", None)
    report = prepare_media(tmp_path, BY_EXTENSION, num_workers=1)
    assert report.stored == 1
    (warning,) = report.warnings
    assert warning.startswith("2 video and audio files have no metadata")
    assert "pip install 'energon_lite[av]'" in warning


EXPECTED = {
    "LJ002-0020.wav": (None, None, None, None, None, 1.5396371882086168, 1, 22050, 33949),
    "common_voice_en_651325.mp3": (None, None, None, None, None, 2.376, 1, 48000, 114048),
    "big_buck_bunny_small.mp4": (5.28, 132, 25.0, 320, 240, 5.312, 6, 48000, 254976),
    "energon_sync_test.mkv": (63.054, 1891, 30.0, 192, 108, 63.103, 2, 48000, 3028992),
    "energon_sync_test.mp4": (1891 / 30, 1891, 30.0, 192, 108, 63.068333333333335, 2, 48000,
                              3027968),
    "energon_test_audio.flac": (None, None, None, None, None, 10.0, 1, 32000, 320000),
}  # fmt: skip


@pytest.mark.skipif(not CLIPS.is_dir(), reason="the real clips are not here")
def test_metadata_of_real_clips_are_those_of_energon(tmp_path):
    pytest.importorskip("av")
    members = [(f"{i}.{n.partition('.')[2]}", (CLIPS / n).read_bytes())
               for i, n in enumerate(EXPECTED)]  # fmt: skip
    write_tar(tmp_path / "a.tar", members)
    report = prepare_dataset(tmp_path, split_ratio="1,0,0", media_filter=BY_EXTENSION)
    assert report.media_files == len(EXPECTED)
    for (name, expected), (key, _) in zip(EXPECTED.items(), members, strict=True):
        found = read_media_metadata(tmp_path, key)
        fields = [field.name for field in dataclasses.fields(AVMetadata)]
        for field, value in zip(fields, expected, strict=True):
            stored = getattr(found, field)
            assert stored == (value if value is None else pytest.approx(value, rel=1e-12)), name


# ------------------------------------------------------------------------------------- reading


def test_what_is_missing_is_named_with_the_command_that_makes_it(root, tmp_path):
    again = "run `energon-lite prepare-media"
    with pytest.raises(RuntimeError, match=f"Media metadata database missing at .*; {again}"):
        read_media_metadata(tmp_path / "nothing", "x.jpg")
    prepare_dataset(root, split_ratio="1,0,0")
    with pytest.raises(RuntimeError, match=f"holds no media metadata; {again}"):
        read_media_metadata(root, "000.jpg")
    prepare_media(root, BY_EXTENSION)
    with pytest.raises(KeyError, match=r"no media metadata of '000\.txt'"):
        read_media_metadata(root, "000.txt")
    with pytest.raises(KeyError):
        read_media_metadata(root, "half \ud800")
    with MediaDatabase(root) as database:
        assert database["000.jpg"] == read_media_metadata(root, "000.jpg")


def test_stores_read_metadata_in_any_thread_and_after_a_fork(root, folder):
    prepare_dataset(root, split_ratio="1,0,0", media_filter=BY_EXTENSION)
    store, files = WebdatasetFileStore(root), SystemFileStore(folder)
    with pytest.raises(RuntimeError, match="Media metadata database missing"):
        files.get_media_metadata("y.JPG")
    prepare_media(folder, BY_EXTENSION)
    assert files.get_media_metadata("y.JPG").mode == "L"
    with pytest.raises(KeyError):
        files.get_media_metadata("z.txt")
    prepare_media(folder, BY_HEADER)  # the database is another file now
    assert files.get_media_metadata("z.txt").width == 7
    with pytest.raises(ValueError, match="leads out of the folder"):
        files.get_media_metadata("../y.JPG")
    with pytest.raises(RuntimeError, match="need a store with a folder"):
        SystemFileStore().get_media_metadata("y.JPG")
    primary = PrimaryFileStore(store, "007")
    assert primary.get_media_metadata(".jpg").width == 15
    keys = [f"{i % 12:03d}.jpg" for i in range(200)]
    widths = [8 + i % 12 for i in range(200)]
    with ThreadPoolExecutor(4) as threads:
        assert [found.width for found in threads.map(store.get_media_metadata, keys)] == widths
    with multiprocessing.get_context("fork").Pool(2) as processes:
        found = processes.map(store.get_media_metadata, keys)
    assert [metadata.width for metadata in found] == widths


def test_corrupt_metadata_and_views_are_refused(root):
    prepare_dataset(root, split_ratio="1,0,0", media_filter=BY_EXTENSION)
    path = root / ".nv-meta/index.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("UPDATE media_metadata SET metadata_json = '{' WHERE entry_key = '001.jpg'")
    connection.commit()
    with pytest.raises(DatasetFormatError, match=r"entry '001\.jpg': .*no valid JSON.*; run"):
        read_media_metadata(root, "001.jpg")
    assert isinstance(read_media_metadata(root, "002.jpg"), ImageMetadata)
    connection.execute("ALTER TABLE media_metadata RENAME TO other")
    connection.execute("CREATE VIEW media_metadata AS SELECT * FROM other")
    connection.commit()
    uses = (lambda: read_media_metadata(root, "002.jpg"), lambda: prepare_media(root, BY_HEADER))
    for use in uses:
        with pytest.raises(DatasetFormatError, match="'media_metadata' is no plain table"):
            use()
