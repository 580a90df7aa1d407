"""Hostile datasets: a table of small datasets, each of them with one thing planted in it.

A case gets a prepared dataset of its own and a folder beside it, in which nothing may change, and
returns what is to be opened, if that is not the dataset.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..conftest import write_tar

Case = Callable[[Path, Path], "Path | None"]
CASES: dict[str, Case] = {}
META = ".nv-meta"
LENGTHS = f"{META}/energon_lite/lengths/default"
EXECUTED = "executed"


def add(name: str, case: Case) -> None:
    assert name not in CASES
    CASES[name] = case


def text(place: str, content: str | bytes) -> Case:
    """Puts a text in the place of a file."""
    raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content

    def case(root: Path, outside: Path) -> None:
        del outside
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).unlink(missing_ok=True)
        (root / place).write_bytes(raw)

    return case


def metadataset(content: str) -> Case:
    def case(root: Path, outside: Path) -> Path:
        path = root.parent / "meta.yaml"
        path.write_text(content.replace("OUTSIDE", str(outside)))
        return path

    return case


# ------------------------------------------------------------- what is no file, in place of a file


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)


def _socket(path: Path, outside: Path) -> None:
    del outside
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(path.name)
    os.chdir(here)


def _sparse(path: Path, outside: Path) -> None:
    del outside
    with path.open("wb") as file:
        file.truncate(1 << 36)


def _loop(path: Path, outside: Path) -> None:
    del outside
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": _socket,
    "folder": lambda path, _: path.mkdir(),
    "empty": lambda path, _: path.write_bytes(b""),
    "noise": lambda path, _: path.write_bytes(bytes(range(256)) * 40),
    "zeros without end": lambda path, _: path.symlink_to("/dev/zero"),
    "noise without end": lambda path, _: path.symlink_to("/dev/urandom"),
    "link to nothing": lambda path, _: path.symlink_to("no/such/file"),
    "link to itself": _loop,
    "link outside": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder outside": lambda path, outside: path.symlink_to(outside),
    "64 GiB of nothing": _sparse,
}
PLACES = {
    "tar": "shard-000.tar", "idx": "shard-000.tar.idx", "meta": META,
    "info": f"{META}/.info.json", "old info": f"{META}/.info.yaml", "split": f"{META}/split.yaml",
    "dataset": f"{META}/dataset.yaml", "sqlite": f"{META}/index.sqlite",
    "uuid": f"{META}/index.uuid", "partial": f"{META}/prepare.partial",
    "lock": f"{META}/prepare.partial/lock", "lengths": f"{LENGTHS}/train.npy",
    "facts": f"{LENGTHS}/train.json", "partial lengths": f"{LENGTHS}/train.npy.partial",
    "all lengths": LENGTHS,
}  # fmt: skip


def _in_place(kind: str, place: str) -> Case:
    def case(root: Path, outside: Path) -> None:
        _remove(root / place)
        KINDS[kind](root / place, outside)

    return case


for _place in PLACES:
    for _kind in KINDS:
        add(f"{_kind} as {_place}", _in_place(_kind, PLACES[_place]))


# --------------------------------------------------------------------- names, counts, split parts


def info(counts: Any) -> Case:
    return text(f"{META}/.info.json", json.dumps({"shard_counts": counts}))


GOOD = {"shard-000.tar": 6, "shard-001.tar": 6}
for _name in (
    "../data/shard-000.tar", "/etc/passwd", "a/../../outside/file.tar", "", ".", "..", "x",
    "shard-000.tar\0", "\ud800.tar", "\udcff.tar", "x" * 4096, "a/" * 2000 + "b.tar", "-rf.tar",
    "%s%n.tar", "{0..9}.tar", "{}.tar", "{", "new\nline.tar", "\x1b[31m.tar", "shard-000.tar/",
    "./shard-000.tar", "shard-000.tar/../shard-001.tar", "~/.bashrc", "${HOME}.tar",
    "file:///dev/zero", "s3://bucket/x.tar", ".nv-meta/index.sqlite",
):  # fmt: skip
    add(f"shard named {_name[:30]!a} in info", info({**GOOD, _name: 6}))
    add(f"shard named {_name[:30]!a} in split",
        text(f"{META}/split.yaml", json.dumps({"split_parts": {"train": [_name]}})))  # fmt: skip
for _count in (10**30, 10**18, 1 << 40, 7, 5, 1, 0, -1, 1.5, True, None, "6", [6], {}, 1e400):
    add(f"count {_count!r}", info({**GOOD, "shard-000.tar": _count}))
add("count with 5,000 digits",
    text(PLACES["info"], '{"shard_counts": {"shard-000.tar": ' + "9" * 5000 + "}}"))  # fmt: skip
add("100,000 shards that are not there", info({f"{i}.tar": 1 for i in range(100_000)}))
add("info nested deeply", text(f"{META}/.info.json", "[" * 100_000))
add("info with a map nested deeply", text(f"{META}/.info.json", '{"a":' * 100_000))
for _part in ("../../../../outside/x", "/tmp/x", "a/b", "", "-rf", "%s", "x" * 4096, "{0..9}",
              "new\nline", "..", "\ud800"):  # fmt: skip
    add(f"split part {_part[:30]!a}", text(
        f"{META}/split.yaml",
        json.dumps({"split_parts": {_part: ["shard-000.tar"], "train": ["shard-001.tar"]}}),
    ))  # fmt: skip


add("20,000 split parts", text(
    f"{META}/split.yaml",
    json.dumps({"split_parts": {f"p{i}": ["shard-000.tar"] for i in range(20_000)}}),
))  # fmt: skip
add("1,000 split parts", text(
    f"{META}/split.yaml",
    json.dumps({"split_parts": {"train": ["shard-001.tar"]} | {f"p{i}": [] for i in range(999)}}),
))  # fmt: skip
add("200,000 excluded samples", text(f"{META}/split.yaml", json.dumps({
    "split_parts": {"train": ["shard-000.tar"]}, "exclude": ["shard-000.tar/{0..199999}"],
})))  # fmt: skip


def file_named(name: str | bytes) -> Case:
    """Puts another tar into the folder."""

    def case(root: Path, outside: Path) -> None:
        del outside
        write_tar(root / "t", [("other.txt", b"x")])
        os.rename(os.fsencode(root / "t"), os.fsencode(root) + b"/" + os.fsencode(name))  # noqa: PTH104

    return case


for _file in ("new\nline.tar", "-rf.tar", "%s%n.tar", "{0..9}.tar", "{}.tar", "{.tar", "*.tar",
              "a.tar.tar", ".tar", " .tar", "x" * 251 + ".tar", "x" * 245 + ".tar", b"\xff\xfe.tar",
              "\x1b]0;x\x07.tar", "SHARD-000.TAR", "shard-000.tar.tar", "'.tar", '".tar',
              "shard-000.tar.idx.tar", "\u202e.tar", "é.tar", "e\u0301.tar"):  # fmt: skip
    add(f"file named {ascii(_file)[:40]} ({len(_file)})", file_named(_file))


def folder_of_tars(root: Path, outside: Path) -> None:
    del outside
    (root / "x.tar").mkdir()
    (root / "y.tar").mkdir()
    shutil.move(root / "shard-001.tar", root / "y.tar" / "shard-001.tar")


def deep_folders(root: Path, outside: Path) -> None:
    del outside
    here = Path.cwd()
    os.chdir(root)
    for _ in range(1500):
        os.mkdir("d")  # noqa: PTH102  the whole path is too long
        os.chdir("d")
    Path("a.tar").write_bytes(b"")
    os.chdir(here)


def links_in_circles(root: Path, outside: Path) -> None:
    del outside
    for name in "abcdefgh":
        (root / name).mkdir()
        for other in "abcdefgh":
            (root / name / other).symlink_to(root / other)


def linked_folder(root: Path, outside: Path) -> None:
    shutil.move(root / "shard-001.tar", outside / "shard-001.tar")
    (root / "linked").symlink_to(outside)


def linked_tar(root: Path, outside: Path) -> None:
    shutil.move(root / "shard-001.tar", outside / "shard-001.tar")
    (root / "shard-001.tar").symlink_to(outside / "shard-001.tar")


add("folders named x.tar", folder_of_tars)
add("folders 1,500 deep", deep_folders)
add("links in circles", links_in_circles)
add("a folder of tars that leads out", linked_folder)
add("a tar that leads out", linked_tar)


# ------------------------------------------------------------------------------------- documents

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
    for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
DOCUMENTS = {
    "laughs": LAUGHS,
    "laughs by merging": "a: &a {x: 1}\n" + "".join(
        f"{b}: &{b} {{{b}1: *{a}, {b}2: *{a}, {b}3: *{a}, {b}4: *{a}}}\n"
        for a, b in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
    ),
    "a list in itself": "split_parts: &a [*a]\nsample_type: *a\nshard_counts: *a\nsplits: *a\n",
    "a map in itself": "split_parts: &a {train: *a}\nsample_type: *a\nsplits: *a\n",
    "deep lists": "split_parts: " + "[" * 100_000,
    "deep lists, closed": "splits: " + "[" * 900 + "]" * 900,
    "deep blocks": "".join(" " * i + "a:\n" for i in range(3000)),
    "deep lists in blocks": "- " * 50_000,
    "python objects": "a: !!python/object/apply:os.system ['touch OUTSIDE/executed']\n",
    "python names": "a: !!python/name:os.system\nb: !!python/module:antigravity\n",
    "unknown tags": "a: !x y\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "tabs": "a:\n\t- b\n",
    "UTF-16": "a: 1".encode("utf-16"),
    "no UTF-8": b"\xff\xfe\xfa",
    "zero bytes": b"a: \0\n",
    "nothing": "",
    "a number": "1",
    "a list": "- 1",
    "keys that are lists": "? [a]\n: b\n",
    "keys that are maps": "? {a: b}\n: c\n",
    "a long number": "a: " + "9" * 10_000,
    "long keys": "a" * 100_000 + ": 1",
    "twice": "split_parts: {}\nsplit_parts: {}\n",
    "open quote": 'a: "',
    "directives": "%YAML 9.9\n--- a",
    "anchors without end": "".join(f"&a{i} " for i in range(100)) + "x",
}  # fmt: skip
for _place in ("split", "dataset", "info", "old info"):
    for _kind, _document in DOCUMENTS.items():

        def _written(root: Path, outside: Path, place: str = _place, kind: str = _kind) -> None:
            if place == "old info":
                (root / PLACES["info"]).unlink()
            text(PLACES[place], DOCUMENTS[kind])(root, outside)

        add(f"{_kind} in {_place}", _written)
for _kind, _document in DOCUMENTS.items():

    def _meta(root: Path, outside: Path, kind: str = _kind) -> Path:
        text("../meta.yaml", DOCUMENTS[kind])(root, outside)
        return root.parent / "meta.yaml"

    add(f"{_kind} in a metadataset", _meta)
for _braces in ("{0..999999999}", "{a,b}" * 40, "{" * 5000, "{a,{b,{c," * 300, "{1..9..0}",
                "{0..9999999999999999999999}", "{a..\U0010ffff}", "\\" * 9999, "{1..1000..-1}",
                "{000000000..999999999}", "}{", "{1..2}" * 25):  # fmt: skip
    for _key in ("split_parts", "exclude"):
        _value: Any = {"split_parts": {"train": ["shard-000.tar"]}, "exclude": []}
        if _key == "exclude":
            _value["exclude"] = [_braces]
        else:
            _value["split_parts"]["train"].append(_braces)
        add(f"braces {_braces[:24]!a} in {_key}", text(f"{META}/split.yaml", json.dumps(_value)))


# -------------------------------------------------------------------- dataset.yaml that names code

EVIL = f"import os, pathlib\npathlib.Path(os.environ['HOSTILE_OUTSIDE'], {EXECUTED!r}).touch()\n"
PLAIN = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
CODE = {
    "module": "{__module__: hostile_code, __class__: Evil}",
    "sample type": "sample_type: {__module__: hostile_code, __class__: Evil}\n"
    "field_map: {text: txt}",
    "module below": "{__module__: hostile_code.below, __class__: Evil}",
    "function": "{__module__: hostile_code, __function__: main}",
    "functions in it": PLAIN + "field_map: {text: {__function__: hostile_code.main}}",
    "loader": PLAIN + "sample_loader: sample_loader.py:sample_loader\npart_filter: "
    "sample_loader.py:part_filter",
    "loader elsewhere": PLAIN + "sample_loader: OUTSIDE/hostile_code.py:main",
    "loader above": PLAIN + "sample_loader: ../../outside/hostile_code.py:main",
    "filter only": PLAIN + "field_map: {text: txt}\npart_filter: sample_loader.py:part_filter",
    "os.system": "{__module__: os, __class__: system}",
    "Popen": "{__module__: subprocess, __class__: Popen}",
    "eval": "{__module__: builtins, __class__: eval}",
    "a type": "{__module__: builtins, __class__: type}",
    "no module": "{__module__: '', __class__: x}",
    "a dot": "{__module__: ., __class__: x}",
    "two dots": "{__module__: a..b, __class__: x}",
    "a module with zero": '{__module__: "a\\0b", __class__: x}',
    "main": "{__module__: __main__, __class__: x}",
    "a number": "{__module__: 1, __class__: 2}",
    "own code": "{__module__: energon_lite.storage.files, __class__: read_file}",
    "own base": "{__module__: energon_lite, __class__: BaseWebdatasetFactory}",
    "an argument": PLAIN + "field_map: {text: txt}\nname: ../../x",
    "a path": PLAIN + "field_map: {text: txt}\npath: /etc",
    "worker config": PLAIN + "field_map: {text: txt}\nworker_config: 3",
    "text for numbers": PLAIN + "field_map: {text: txt}\nparallel_shard_iters: lots",
    "too many": PLAIN + "field_map: {text: txt}\nparallel_shard_iters: 1000000000000",
    "negative": PLAIN + "field_map: {text: txt}\nmax_samples_per_sequence: -5",
    "much": PLAIN + "field_map: {text: txt}\nmax_samples_per_sequence: " + "9" * 40,
    "epochs": PLAIN + "field_map: {text: txt}\nshuffle_over_epochs: " + "9" * 30,
    "fields": PLAIN + "field_map: {text: 'txt" + "[x]" * 50_000 + "'}",
    "fields that are lists": PLAIN + "field_map: [1]",
    "fields of nothing": PLAIN + "field_map: {text: ''}",
    "split file": PLAIN + "field_map: {text: txt}\nsplit_config: ../../../outside/file.yaml",
    "split device": PLAIN + "field_map: {text: txt}\nsplit_config: /dev/zero",
    "subflavors": PLAIN + "field_map: {text: txt}\nsubflavors: {" + ", ".join(
        f"k{i}: v" for i in range(20_000)) + "}",
    "deep subflavors": PLAIN + "field_map: {text: txt}\nsubflavors: " + "{a: " * 900 + "1"
    + "}" * 900,
    "subflavors that are none": PLAIN + "field_map: {text: txt}\nsubflavors: 3",
    "subflavors of laughs": PLAIN + "field_map: {text: txt}\n" + "subflavors:\n" + "".join(
        f"  {line}\n" for line in LAUGHS.splitlines()),
}  # fmt: skip


def code(content: str) -> Case:
    def case(root: Path, outside: Path) -> None:
        (root / META / "sample_loader.py").write_text(EVIL)
        (root / META / "dataset.yaml").write_text(content.replace("OUTSIDE", str(outside)))

    return case


for _name, _content in CODE.items():
    add(f"dataset.yaml: {_name}", code(_content))


# ------------------------------------------------------------------------------------------- tars


def tar(*members: tuple[str, bytes], kind: int = tarfile.PAX_FORMAT, **more: Any) -> Case:
    """Writes the first shard anew."""

    def case(root: Path, outside: Path) -> None:
        del outside
        with tarfile.open(root / "shard-000.tar", "w", format=kind) as file:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                for key, value in more.items():
                    setattr(member, key, value)
                file.addfile(member, io.BytesIO(content))

    return case


def header(at: int, value: bytes) -> Case:
    """Puts bytes into the first header, and corrects its checksum."""

    def case(root: Path, outside: Path) -> None:
        del outside
        path = root / "shard-000.tar"
        raw = bytearray(path.read_bytes())
        raw[at : at + len(value)] = value
        total = sum(raw[:148]) + 8 * 32 + sum(raw[156:512])
        raw[148:156] = b"%06o\0 " % total
        path.write_bytes(raw)

    return case


SIZE, TYPE = 124, 156
TARS: dict[str, Case] = {
    "absolute names": tar(("/etc/passwd.txt", b"x"), ("/a.txt", b"y")),
    "names above": tar(("../../outside/file.txt", b"x"), ("../../x.txt", b"y")),
    "long names": tar(("x" * 4096 + ".txt", b"x")),
    "names with lines": tar(("a\nb.txt", b"x"), ("%s%n.txt", b"x"), ("-rf.txt", b"x")),
    "names with braces": tar(("{0..9}.txt", b"x"), ("{}.txt", b"x")),
    "names that are no text": tar(("a\udcff.txt", b"x")),
    "the same key twice": tar(("a.txt", b"x"), ("b.txt", b"x"), ("a.txt", b"x")),
    "the same member twice": tar(("a.txt", b"x"), ("a.txt", b"y")),
    "links": tar(("a.txt", b""), type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard links": tar(("a.txt", b""), type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "devices": tar(("a.txt", b""), type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipes": tar(("a.txt", b""), type=tarfile.FIFOTYPE),
    "folders only": tar(("a.txt", b""), type=tarfile.DIRTYPE),
    "no sample": tar(("readme", b"x")),
    "a sample of 20,000 files": tar(*((f"a.{i}", b"") for i in range(20_000))),
    "parts that are no text": tar(("a.txt", b"\xff\xfe"), ("b.txt", b"\xff")),
    "the keys of the other shard": tar(("00006.txt", b"x"), ("00007.txt", b"x")),
    "other case": tar(*((f"{i:05d}.TXT", b"x") for i in range(6))),
    "size of minus 512": header(SIZE, b"-0000000512\0"),
    "size of minus 0": header(SIZE, b"-0000000000\0"),
    "size of 8 GiB": header(SIZE, b"77777777777\0"),
    "size in base 256": header(SIZE, b"\x80" + b"\x7f" * 11),
    "negative base 256": header(SIZE, b"\xff" * 12),
    "size in words": header(SIZE, b"twelve bytes"),
    "size with underscores": header(SIZE, b"0_0_0_0_0_1\0"),
    "a long name": header(TYPE, b"L"),
    "a long link": header(TYPE, b"K"),
    "a PAX header": header(TYPE, b"x"),
    "a global header": header(TYPE, b"g"),
    "an unknown type": header(TYPE, b"Q"),
    "gzip": text("shard-000.tar", b"\x1f\x8b" + bytes(2000)),
    "zeros": text("shard-000.tar", bytes(10240)),
    "a header only": text("shard-000.tar", b"a" * 512),
}  # fmt: skip
for _records in (b"11 size=abc\n", b"9 size=-\n", b"99999999999 size=1\n", b"12 size=-512\n",
                 b"0 \n", b"-1 x=y\n", b"30 size=9999999999999999999999\n"):  # fmt: skip

    def _pax(root: Path, outside: Path, records: bytes = _records) -> None:
        del outside
        path = root / "shard-000.tar"
        raw = path.read_bytes()
        head = bytearray(raw[:512])
        head[SIZE : SIZE + 12] = b"%011o\0" % len(records)
        head[TYPE : TYPE + 1] = b"x"
        head[148:156] = b"%06o\0 " % (sum(head[:148]) + 8 * 32 + sum(head[156:512]))
        path.write_bytes(bytes(head) + records.ljust(512, b"\0") + raw)

    TARS[f"PAX {_records!r}"] = _pax
for _name, _case in TARS.items():
    add(f"tar: {_name}", _case)


def offsets(change: Callable[[Any], Any]) -> Case:
    def case(root: Path, outside: Path) -> None:
        del outside
        path = root / "shard-000.tar.idx"
        values = np.frombuffer(path.read_bytes(), dtype="<u8").copy()
        path.write_bytes(np.asarray(change(values), dtype="<u8").tobytes())

    return case


for _name, _change in {
    "beyond the file": lambda x: np.where(x == x.max(), 1 << 40, x),
    "2 ** 63": lambda x: np.where(x == x.max(), (1 << 63) + 512, x),
    "falling": lambda x: x[::-1],
    "the same": lambda x: x * 0,
    "shifted": lambda x: x + 1,
    "half blocks": lambda x: x // 2,
    "too few": lambda x: x[:-1],
    "too many": lambda x: np.append(x, x.max() + 512),
}.items():
    add(f"index: {_name}", offsets(_change))


# ----------------------------------------------------------------------------------------- sqlite

ENDLESS = "WITH RECURSIVE r(i) AS (VALUES(1) UNION ALL SELECT i + 1 FROM r) SELECT "
SQLITE = {
    "endless samples": "DROP TABLE samples; CREATE VIEW samples AS "
    + ENDLESS
    + "0 AS tar_file_id, i || '' AS sample_key, i AS sample_index, 0 AS byte_offset, "
    "1 AS byte_size FROM r",
    "endless parts": "DROP TABLE sample_parts; CREATE VIEW sample_parts AS "
    + ENDLESS
    + "0 AS tar_file_id, i AS sample_index, 'txt' AS part_name, 0 AS content_byte_offset, "
    "1 AS content_byte_size FROM r",
    "computed values": "DROP TABLE sample_parts; CREATE TABLE sample_parts (tar_file_id, "
    "sample_index, content_byte_offset, content_byte_size, part_name AS "
    "(hex(zeroblob(100000000))))",
    "virtual": "DROP TABLE samples; CREATE VIRTUAL TABLE samples USING fts5(tar_file_id, "
    "sample_key, sample_index, byte_offset, byte_size)",
    "text": "UPDATE samples SET tar_file_id = 'x'",
    "nothing": "UPDATE samples SET byte_offset = NULL",
    "huge": "UPDATE samples SET sample_index = 9223372036854775807",
    "negative": "UPDATE samples SET sample_index = -sample_index",
    "no tables": "DROP TABLE samples; DROP TABLE sample_parts",
    "other shards": "UPDATE samples SET tar_file_id = tar_file_id + 7",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON samples BEGIN DELETE FROM samples; END",
    "sums": "UPDATE sample_parts SET content_byte_size = 9223372036854775807",
}
for _name, _script in SQLITE.items():

    def _planted(root: Path, outside: Path, script: str = _script) -> None:
        del outside
        with sqlite3.connect(root / META / "index.sqlite") as connection:
            connection.executescript(script)
        connection.close()
        value = {"split_parts": {"train": ["shard-000.tar", "shard-001.tar"]},
                 "exclude": ["shard-000.tar/00003"]}  # fmt: skip
        (root / META / "split.yaml").write_text(json.dumps(value))

    add(f"sqlite: {_name}", _planted)


# ------------------------------------------------------------------------------------ metadatasets

HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
METADATASETS = {
    "itself": HEAD + "  train: {path: meta.yaml}\n",
    "itself twice": HEAD + "  train: {blend: [{path: meta.yaml, weight: 1}, {path: ./meta.yaml, "
    "weight: 1}]}\n",
    "a device": HEAD + "  train: {path: file:///dev/zero}\n",
    "a device as a file": HEAD + "  train: {path: zero.yaml}\n",
    "a pipe": HEAD + "  train: {path: pipe.yaml}\n",
    "a process": HEAD + "  train: {path: /proc/self/mem}\n",
    "remote": HEAD + "  train: {path: s3://bucket/x}\n",
    "msc": HEAD + "  train: {path: msc://bucket/x}\n",
    "no variable": HEAD + "  train: {path: '${NO_SUCH_VARIABLE_HERE}/x'}\n",
    "zero byte": HEAD + '  train: {path: "a\\0b"}\n',
    "long": HEAD + "  train: {path: " + "x" * 5000 + "}\n",
    "far above": HEAD + "  train: {path: " + "../" * 3000 + "x}\n",
    "nowhere": HEAD + "  train: {path: ''}\n",
    "jsonl": HEAD + "  train: {path: x.jsonl}\n",
    "weights": HEAD + "  train: {blend: [{path: data, weight: .nan}]}\n",
    "infinite weight": HEAD + "  train: {blend: [{path: data, weight: 1e999}]}\n",
    "long weight": HEAD + "  train: {blend: [{path: data, weight: " + "9" * 400 + "}]}\n",
    "negative": HEAD + "  train: {blend: [{path: data, weight: -1}]}\n",
    "repetitions": HEAD + "  train: {blend_epochized: [{path: data, repetitions: 1e300}]}\n",
    "many repetitions": HEAD + "  train: {blend_epochized: [{path: data, repetitions: "
    + "9" * 30 + "}]}\n",
    "subset": HEAD + "  train: {path: data, subset: {range: [0, 10000000000000000000000]}}\n",
    "backwards": HEAD + "  train: {path: data, subset: {range: ['90%', '10%']}}\n",
    "much subset": HEAD + "  train: {path: data, subset: {range: ['0%', '1e300%']}}\n",
    "lengths": HEAD + "  train: {blend: [{path: data, weight: 1}], unit: tokens, "
    "lengths: ../../outside/file}\n",
    "lengths of a device": HEAD + "  train: {blend: [{path: data, weight: 1}], unit: tokens, "
    "lengths: /dev/zero}\n",
    "split file": HEAD + "  train: {path: data, split_config: ../../outside/file.yaml}\n",
    "dataset file": HEAD + "  train: {path: data, dataset_config: /dev/zero.yaml}\n",
    "split part": HEAD + "  train: {path: data, split_part: ../../../outside/x}\n",
    "code": "__module__: hostile_code\n__class__: Evil\nsplits: {train: {path: data}}\n",
    "functions": HEAD + "  train: {path: data, subflavors: {__function__: hostile_code.main}}\n",
    "subflavors": HEAD + "  train: {path: data, subflavors: " + "{a: " * 900 + "1"
    + "}" * 900 + "}\n",
    "nested blends": HEAD + "  train: " + "{blend: [{weight: 1, " * 200 + "path: data"
    + "}]}" * 200,
    "a folder that is none": HEAD + "  train: {path: outside}\n",
}  # fmt: skip
for _name, _content in METADATASETS.items():

    def _named(root: Path, outside: Path, content: str = _content) -> Path:
        os.mkfifo(root.parent / "pipe.yaml")
        (root.parent / "zero.yaml").symlink_to("/dev/zero")
        return metadataset(content)(root, outside) or root

    add(f"metadataset: {_name}", _named)


def chain(root: Path, outside: Path) -> Path:
    del outside
    for i in range(2000):
        to = "data" if i == 1999 else f"m{i + 1}.yaml"
        (root.parent / f"m{i}.yaml").write_text(HEAD + f"  train: {{path: {to}}}\n")
    return root.parent / "m0.yaml"


def doubling(root: Path, outside: Path) -> Path:
    del outside
    for i in range(40):
        to = "data" if i == 39 else f"m{i + 1}.yaml"
        (root.parent / f"m{i}.yaml").write_text(
            HEAD + f"  train: {{blend: [{{path: {to}, weight: 1}}, {{path: {to}, weight: 2}}]}}\n"
        )
    return root.parent / "m0.yaml"


def through_links(root: Path, outside: Path) -> Path:
    del outside
    (root.parent / "loop").symlink_to(root.parent)
    for name in ("a", "b"):
        (root.parent / f"{name}.yaml").symlink_to("meta.yaml")
    paths = ("loop/a.yaml", "loop/loop/b.yaml")
    members = ", ".join(f"{{path: {path}, weight: 1}}" for path in paths)
    (root.parent / "meta.yaml").write_text(f"{HEAD}  train: {{blend: [{members}]}}\n")
    return root.parent / "meta.yaml"


add("metadataset: a chain of 2,000", chain)
add("metadataset: 2 ** 40 leaves", doubling)
add("metadataset: itself through links", through_links)


# ------------------------------------------------------------------------------------ permissions


def unreadable(place: str) -> Case:
    def case(root: Path, outside: Path) -> None:
        del outside
        (root / place).chmod(0)

    return case


if os.getuid() != 0:
    for _name, _place in PLACES.items():
        if _name in ("tar", "idx", "meta", "info", "split", "dataset", "sqlite", "uuid"):
            add(f"no permission for {_name}", unreadable(_place))
