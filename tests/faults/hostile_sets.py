"""Hostile datasets: a table of small datasets, each of them with one thing planted in it.

A case gets a prepared dataset of its own and a folder beside it, in which nothing may change, and
returns what is to be opened, if that is not the dataset. The documents, patterns, tar headers and
tables that are planted here are also what the readers of each are tested with.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from ..conftest import write_tar
from ..helpers import metadataset
from .mutations import damage

Case = Callable[[Path, Path], "Path | None"]
META = ".nv-meta"
LENGTHS = f"{META}/energon_lite/lengths/default"
META_YAML = "../meta.yaml"
EXECUTED = "executed"
CASES: dict[str, Case] = {"nothing": lambda root, outside: None}


def add(name: str, case: Case) -> None:
    assert name not in CASES
    CASES[name] = case


def put_text(path: Path, content: str | bytes) -> Path:
    """Writes a text in the place of a file, and of the other one where one of a pair is read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".yaml", ".json", path.suffix):
        if suffix == path.suffix or path.stem in (".info", "split"):
            path.with_suffix(suffix).unlink(missing_ok=True)
    is_text = isinstance(content, str)
    path.write_bytes(content.encode("utf-8", "surrogatepass") if is_text else content)  # type: ignore[union-attr, arg-type]
    return path


def put(place: str, content: str | bytes) -> Case:
    """Puts a text in the place of a file; `OUTSIDE` in it is the folder beside the dataset."""

    def case(root: Path, outside: Path) -> Path | None:
        own = content.replace("OUTSIDE", str(outside)) if isinstance(content, str) else content
        path = put_text(root / place, own)
        return path if place == META_YAML else None

    return case


def change(place: str, function: Callable[[Path], Any]) -> Case:
    """Lets a function change a file, or what is in a folder."""
    return lambda root, outside: function(root / place) and None


def put_json(place: str, value: Any) -> Case:
    return put(place, json.dumps(value))


# ------------------------------------------------------------- what is no file, in place of a file


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "empty": lambda path, _: path.write_bytes(b""),
    "noise": lambda path, _: path.write_bytes(bytes(range(256)) * 40),
    "zeros without end": lambda path, _: path.symlink_to("/dev/zero"),
    "noise without end": lambda path, _: path.symlink_to("/dev/urandom"),
    "link to nothing": lambda path, _: path.symlink_to("no/such/file"),
    "link to itself": lambda path, _: path.symlink_to(path.name),
    "link outside": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder outside": lambda path, outside: path.symlink_to(outside),
    "64 GiB of nothing": lambda path, _: (path.touch(), os.truncate(path, 1 << 36)),
}
if os.getuid() != 0:
    KINDS["no permission"] = lambda path, _: (path.touch(), path.chmod(0))
PLACES = {
    "tar": "shard-000.tar", "idx": "shard-000.tar.idx", "meta": META,
    "info": f"{META}/.info.json", "old info": f"{META}/.info.yaml", "split": f"{META}/split.yaml",
    "dataset": f"{META}/dataset.yaml", "sqlite": f"{META}/index.sqlite",
    "uuid": f"{META}/index.uuid", "partial": f"{META}/prepare.partial",
    "lock": f"{META}/prepare.partial/lock", "lengths": f"{LENGTHS}/train.npy",
    "facts": f"{LENGTHS}/train.json", "partial lengths": f"{LENGTHS}/train.npy.partial",
    "all lengths": LENGTHS, "metadataset": META_YAML,
}  # fmt: skip


def _in_place(kind: str, place: str) -> Case:
    def case(root: Path, outside: Path) -> Path | None:
        path = root / place
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[kind](path, outside)
        return path if place == META_YAML else None

    return case


def _damaged(path: Path) -> None:
    rng = random.Random(path.name)
    for _ in range(rng.randint(1, 4)):
        path.write_bytes(damage(path.read_bytes(), rng)[0] or b"x")


for _name, _place in PLACES.items():
    for _kind in KINDS:
        add(f"{_kind} as {_name}", _in_place(_kind, _place))
    if _name not in ("meta", "old info", "partial", "lock", "partial lengths", "all lengths"):
        add(f"{_name}, damaged", change(_place, _damaged))


# --------------------------------------------------------------------- names, counts, split parts

GOOD = {"shard-000.tar": 6, "shard-001.tar": 6}
INFO, SPLIT = PLACES["info"], PLACES["split"]
for _name in (
    "../data/shard-000.tar", "/etc/passwd", "a/../../outside/file.tar", "", ".", "..", "x",
    "shard-000.tar\0", "\ud800.tar", "\udcff.tar", "x" * 4096, "a/" * 2000 + "b.tar", "-rf.tar",
    "%s%n.tar", "{0..9}.tar", "{}.tar", "{", "new\nline.tar", "\x1b[31m.tar", "shard-000.tar/",
    "./shard-000.tar", "shard-000.tar/../shard-001.tar", "~/.bashrc", "${HOME}.tar",
    "file:///dev/zero", "s3://bucket/x.tar", ".nv-meta/index.sqlite",
):  # fmt: skip
    add(f"shard named {_name[:30]!a}", put_json(INFO, {"shard_counts": {**GOOD, _name: 6}}))
    add(f"split of {_name[:30]!a}", put_json(SPLIT, {"split_parts": {"train": [_name]}}))
    _parts = {_name: ["shard-000.tar"], "train": ["shard-001.tar"]}
    add(f"split part {_name[:30]!a}", put_json(SPLIT, {"split_parts": _parts}))
for _count in (10**30, 10**18, 1 << 40, 7, 5, 1, 0, -1, 1.5, True, None, "6", [6], {}, 1e400):
    add(f"count {_count!r}", put_json(INFO, {"shard_counts": {**GOOD, "shard-000.tar": _count}}))
add("a long count", put(INFO, '{"shard_counts": {"shard-000.tar": ' + "9" * 5000 + "}}"))
_many = {f"{i}.tar": 1 for i in range(2_000)}
add("2,000 shards that are not there", put_json(INFO, {"shard_counts": _many}))
for _num in (999, 20_000):
    _parts = {"train": ["shard-001.tar"], **{f"p{i}": ["shard-000.tar"] for i in range(_num)}}
    add(f"{_num} split parts", put_json(SPLIT, {"split_parts": _parts}))
_EXCLUDE = {"split_parts": {"train": [*GOOD]}, "exclude": ["shard-000.tar/00003"]}
add("200,000 excluded samples", put_json(SPLIT, {**_EXCLUDE, "exclude": ["x.tar/{0..199999}"]}))


def _rename(folder: Path, name: str | bytes) -> None:
    write_tar(folder / "t", [("other.txt", b"x")])
    os.rename(folder / "t", os.fsencode(folder) + b"/" + os.fsencode(name))  # noqa: PTH104


for _file in ("new\nline.tar", "-rf.tar", "%s%n.tar", "{0..9}.tar", "{.tar", "*.tar", ".tar",
              " .tar", "x" * 251 + ".tar", "x" * 245 + ".tar", b"\xff\xfe.tar", "\x1b]0;x\x07.tar",
              "SHARD-000.TAR", "'.tar", '".tar', "shard-000.tar.idx.tar", "\u202e.tar", "é.tar",
              "e\u0301.tar"):  # fmt: skip
    _change = change("", lambda folder, file=_file: _rename(folder, file))  # type: ignore[misc]
    add(f"file named {ascii(_file)[:40]} ({len(_file)})", _change)


def _deep_folders(folder: Path) -> None:
    here = Path.cwd()
    os.chdir(folder)
    for _ in range(1500):
        os.mkdir("d")  # noqa: PTH102  the whole path is too long
        os.chdir("d")
    Path("a.tar").write_bytes(b"")
    os.chdir(here)


add("a folder named x.tar", change("x.tar", Path.mkdir))
add("folders 1,500 deep", change("", _deep_folders))


# ------------------------------------------------------------------------------------- documents


def laughs(shape: str, levels: int = 30) -> str:
    """Lines of aliases that stand for 10 ** levels values."""
    lines = ["l0: &l0 {lol: lol}" if "<<" in shape else "l0: &l0 [lol]"]
    for level in range(1, levels):
        alias = f"*l{level - 1}"
        lines.append(f"l{level}: &l{level} {shape.replace('*', ', '.join([alias] * 10))}")
    return "\n".join(lines)


HOSTILE_YAML = {
    "lists": "a: " + "[" * 100_000,
    "closed lists": "a: " + "[" * 900 + "]" * 900,
    "maps": "{a: " * 100_000,
    "dashes": "- " * 100_000,
    "keys": "? " * 100_000,
    "indented maps": "\n".join(" " * i + f"k{i}:" for i in range(300)),
    "laughing lists": laughs("[*]"),
    "laughing maps": laughs("{x: [*], y: [*]}"),
    "laughing merges": laughs("{<<: [*]}"),
    "long text laughs": f"l0: &l0 {'x' * 100_000}\nb: [{', '.join(['*l0'] * 3000)}]",
    "anchor in itself": "a: &a {b: *a}",
    "half of a character": '"\\ud800": 1',
    "python objects": "a: !!python/object/apply:os.system ['touch OUTSIDE/executed']\n",
    "python names": "a: !!python/name:os.system\nb: !!python/module:antigravity\n",
}
HOSTILE_JSON = {
    "lists": '{"a": ' + "[" * 100_000,
    "closed lists": '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "maps": '{"a": ' * 100_000,
    "thousands of digits": '{"a": ' + "9" * 5000 + "}",
    "no number": '{"a": NaN}',
    "infinite": '{"a": -Infinity}',
    "half of a character": '{"\\ud800": 1}',
    "key twice": '{"a": 1, "a": 2}',
}
ODD_YAML: dict[str, str | bytes] = {
    "UTF-16": "a: 1".encode("utf-16"), "no UTF-8": b"\xff\xfe\xfa", "zero bytes": b"a: \0\n",
    "nothing": "", "a number": "1", "a list": "- 1", "a long number": "a: " + "9" * 10_000,
    "long keys": "a" * 100_000 + ": 1", "open quote": 'a: "', "directives": "%YAML 9.9\n--- a",
    "lists as parts": "split_parts: &a [[1]]\nsample_type: *a\nshard_counts: *a\nsplits: *a\n",
    "anchors without end": "".join(f"&a{i} " for i in range(100)) + "x",
}  # fmt: skip
for _name in ("split", "dataset", "old info", "metadataset"):
    for _kind, _document in {**HOSTILE_YAML, **ODD_YAML}.items():
        add(f"{_kind} in {_name}", put(PLACES[_name], _document))
for _kind, _document in HOSTILE_JSON.items():
    add(f"{_kind} in info", put(INFO, _document))
BRACES = (
    "{000000000..999999999}", "{a,b}" * 40, "{0..9}{0..9}" * 10, "{1..999999999..2}",
    "{{0..1999999},a,{0..9}}", "{0..99999}" + "x" * 100_000, "{1.." + "9" * 5000 + "}",
    "{" * 100_000, "{a," * 100_000, "{" * 500 + "}" * 500, "{1.." + "0" * 200 + "2}",
)  # fmt: skip
for _number, _braces in enumerate((*BRACES, "{1..9..0}", "{a..\U0010ffff}", "\\" * 9999, "}{")):
    _train = ["shard-000.tar", _braces]
    add(f"braces {_number} in split_parts", put_json(SPLIT, {"split_parts": {"train": _train}}))
    add(f"braces {_number} in exclude", put_json(SPLIT, {**_EXCLUDE, "exclude": [_braces]}))


# -------------------------------------------------------------------- dataset.yaml that names code

EVIL = f"import os, pathlib\npathlib.Path(os.environ['HOSTILE_OUTSIDE'], {EXECUTED!r}).touch()\n"
PLAIN = "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
FIELDS = PLAIN + "field_map: {text: txt}\n"
CODE = (
    *(f"{{__module__: {module}, __class__: {name}}}" for module, name in (
        ("hostile_code", "Evil"), ("hostile_code.below", "Evil"), ("os", "system"),
        ("subprocess", "Popen"), ("builtins", "eval"), ("builtins", "type"), ("''", "x"),
        (".", "x"), ("a..b", "x"), ('"a\\0b"', "x"), ("__main__", "x"), (1, 2),
        ("energon_lite.storage.files", "read_file"), ("energon_lite", "BaseWebdatasetFactory"),
    )),
    "sample_type: {__module__: hostile_code, __class__: Evil}\nfield_map: {text: txt}",
    "{__module__: hostile_code, __function__: main}",
    *(PLAIN + text for text in (
        "field_map: {text: {__function__: hostile_code.main}}", "field_map: [1]",
        "sample_loader: sample_loader.py:sample_loader\npart_filter: sample_loader.py:part_filter",
        "sample_loader: OUTSIDE/hostile_code.py:main", "field_map: {text: ''}",
        "sample_loader: ../../outside/hostile_code.py:main",
        "field_map: {text: 'txt" + "[x]" * 50_000 + "'}",
    )),
    *(FIELDS + text for text in (
        "part_filter: sample_loader.py:part_filter", "name: ../../x", "path: /etc",
        "worker_config: 3", "parallel_shard_iters: lots", "parallel_shard_iters: 1000000000000",
        "max_samples_per_sequence: -5", "max_samples_per_sequence: " + "9" * 40,
        "shuffle_over_epochs: " + "9" * 30, "split_config: ../../../outside/file.yaml",
        "split_config: /dev/zero", "subflavors: 3",
        "subflavors: {" + ", ".join(f"k{i}: v" for i in range(20_000)) + "}",
    )),
)  # fmt: skip
for _number, _content in enumerate(CODE):

    def _code(root: Path, outside: Path, content: str = _content) -> None:
        (root / META / "sample_loader.py").write_text(EVIL)
        put(PLACES["dataset"], content)(root, outside)

    add(f"dataset.yaml {_number}: {_content[-40:]!r}", _code)


# ------------------------------------------------------------------------------------------- tars


def header(name: bytes, size: bytes, kind: bytes = b"0", **more: bytes) -> bytes:
    """A header with a right checksum, whatever it holds."""
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[124 : 124 + len(size)] = size
    raw[156:157] = kind
    raw[257:265] = more.get("magic", b"ustar\00000")
    raw[148:156] = b" " * 8
    raw[148:156] = more.get("checksum", b"%06o\0 " % sum(raw))
    return bytes(raw)


def octal(size: int) -> bytes:
    return b"%011o\0" % size


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


def named(content: bytes, kind: bytes) -> bytes:
    """A member after an extension header."""
    own = header(b"a.txt", octal(3)) + padded(b"abc")
    return header(b"ext", octal(len(content)), kind) + padded(content) + own


BAD_HEADERS = {
    **{text: header(b"a.txt", size) for text, size in {
        "negative octal": b"-0000000512\0", "plus": b"+0000000003\0",
        "underscore": b"000_0000003\0", "prefixed": b"0o000000003\0", "decimal": b"00000000009\0",
        "digits apart": b"0000 000003\0", "beyond the file": b"77777777777\0",
        "negative base-256": (-512).to_bytes(12, "big", signed=True),
        "base-256 of 2**63": b"\x80" + (1 << 63).to_bytes(11, "big"),
        "base-256 of 2**90": b"\xbf" + b"\xff" * 11,
        "base-256 beyond the file": b"\x80" + (1 << 62).to_bytes(11, "big"),
    }.items()},
    "checksum": header(b"a.txt", octal(3), checksum=b"000001\0 "),
    "checksum with a sign": header(b"a.txt", octal(3), checksum=b"-00001\0 "),
    **{
        f"{kind} header of {text}": header(b"ext", size, kind.encode()) + bytes(1024)
        for kind in "LKxg"
        for text, size in [
            ("-512 bytes", b"-0000001000\0"),
            ("-512 bytes, base-256", (-512).to_bytes(12, "big", signed=True)),
            ("more than the file", b"77777777777\0"),
            ("2 MiB", octal(2 << 20)),
        ]
    },
    **{f"PAX {content[:40]!r}": named(content, b"x") for content in (
        b"12 size=abc\n", b"13 size=-512\n", b"28 size=%d\n" % 2**63, "14 size=٣\n".encode(),
        b"5011 size=" + b"1" * 5000 + b"\n", b" path=x.txt\n", b"1" * 5000 + b" path=x.txt\n",
        b"99 path=x.txt\n", b"9 path=x.txt\n", b"9 pathx.\n", b"16 path=a\0b.txt\n",
    )},
    "zero byte in a name": named(b"a\0b.txt\0", b"L"),
    "endless chain": header(b"ext", octal(0), b"g") * 3000,
}  # fmt: skip
TAR = PLACES["tar"]
for _name, _header in BAD_HEADERS.items():
    add(f"tar: {_name}", put(TAR, header(b"0.txt", octal(0)) + _header + bytes(1 << 20)))


def tar_of(names: list[str], content: bytes = b"x", **fields: Any) -> bytes:
    """A tar of members whose headers have other values."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 0 if fields else len(content)
            for key, value in fields.items():
                setattr(member, key, value)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


TARS = {
    "absolute names": tar_of(["/etc/passwd.txt", "/a.txt"]),
    "names above": tar_of(["../../outside/file.txt", "../../x.txt"]),
    "odd names": tar_of(["x" * 4096 + ".txt", "a\nb.txt", "%s%n.txt", "{0..9}.txt", "a\udcff.txt"]),
    "the same key twice": tar_of(["a.txt", "b.txt", "a.txt"]),
    "the same member twice": tar_of(["a.txt", "a.txt"]),
    "links": tar_of(["a.txt"], type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard links": tar_of(["a.txt"], type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "devices": tar_of(["a.txt"], type=tarfile.CHRTYPE, devmajor=1, devminor=5),
    "pipes": tar_of(["a.txt"], type=tarfile.FIFOTYPE),
    "folders only": tar_of(["a.txt"], type=tarfile.DIRTYPE),
    "no sample": tar_of(["readme"]),
    "parts that are no text": tar_of(["a.txt", "b.txt"], b"\xff\xfe"),
    "the keys of the other shard": tar_of(["00006.txt", "00007.txt"]),
    "other case": tar_of([f"{i:05d}.TXT" for i in range(6)]),
    "gzip": b"\x1f\x8b" + bytes(2000),
    "zeros": bytes(10240),
    "a header only": b"a" * 512,
}
for _name, _tar in TARS.items():
    add(f"tar: {_name}", put(TAR, _tar))


def _many_files(root: Path, outside: Path) -> Path | None:
    return put(TAR, tar_of([f"a.{i}" for i in range(20_000)], b""))(root, outside)


add("tar: a sample of 20,000 files", _many_files)  # not made where it is not used


# ----------------------------------------------------------------------------------------- sqlite

ENDLESS = "WITH RECURSIVE r(i) AS (VALUES(1) UNION ALL SELECT i + 1 FROM r) SELECT "
PLANTED = {
    "endless view": "DROP TABLE samples; CREATE VIEW samples AS " + ENDLESS
    + "0 AS tar_file_id, i || '' AS sample_key, i AS sample_index, 0 AS byte_offset, "
    "1 AS byte_size FROM r",
    "view in other case": "DROP TABLE samples; CREATE VIEW SAMPLES AS SELECT 0 AS "
    "tar_file_id, 'x' AS sample_key, 0 AS sample_index, 0 AS byte_offset, 1 AS byte_size",
    "computed column": "DROP TABLE sample_parts; CREATE TABLE sample_parts (tar_file_id, "
    "sample_index, content_byte_offset, content_byte_size, part_name AS (hex(zeroblob(9))))",
    "virtual table": "DROP TABLE samples; CREATE VIRTUAL TABLE samples USING fts5("
    "tar_file_id, sample_key, sample_index, byte_offset, byte_size)",
    "other columns": "DROP TABLE samples; CREATE TABLE samples (sample_key TEXT)",
    "text for numbers": "UPDATE samples SET tar_file_id = 'x', byte_offset = 'y'; "
    "UPDATE sample_parts SET content_byte_size = 'z', content_byte_offset = 'z'",
    "missing values": "UPDATE samples SET byte_offset = NULL; "
    "UPDATE sample_parts SET part_name = NULL",
    "bytes for text": "UPDATE samples SET sample_key = CAST(sample_key AS BLOB); "
    "UPDATE sample_parts SET part_name = x'ff'",
    "no UTF-8": "UPDATE samples SET sample_key = CAST(x'ff' AS TEXT) "
    "WHERE sample_key = (SELECT max(sample_key) FROM samples)",
    "sums that overflow": "UPDATE sample_parts SET content_byte_size = 9223372036854775807",
}  # fmt: skip
HARMLESS = {
    "huge": "UPDATE samples SET sample_index = 9223372036854775807",
    "negative": "UPDATE samples SET sample_index = -sample_index",
    "no tables": "DROP TABLE samples; DROP TABLE sample_parts",
    "other shards": "UPDATE samples SET tar_file_id = tar_file_id + 7",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON samples BEGIN DELETE FROM samples; END",
}


def run_script(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


for _name, _script in {**PLANTED, **HARMLESS}.items():

    def _planted(root: Path, outside: Path, script: str = _script) -> None:
        run_script(root / PLACES["sqlite"], script)
        put_json(SPLIT, _EXCLUDE)(root, outside)

    add(f"sqlite: {_name}", _planted)


# ------------------------------------------------------------------------------------ metadatasets


def _blend(*members: Any, **more: Any) -> dict[str, Any]:
    return {"blend": [{"weight": 1, **member} for member in members], **more}


def _nested(levels: int, leaf: Any, key: str = "a") -> Any:
    for _ in range(levels):
        leaf = _blend(leaf) if key == "blend" else {key: leaf}
    return leaf


DATA = {"path": "data"}
SPLITS: list[dict[str, Any]] = [
    *({"path": path} for path in (
        "meta.yaml", "file:///dev/zero", "zero.yaml", "pipe.yaml", "/proc/self/mem", "outside",
        "msc://bucket/x", "${NO_SUCH_VARIABLE_HERE}/x", "a\0b", "x" * 5000,
        "../" * 3000 + "x", "", "x.jsonl",
    )),
    _blend({"path": "meta.yaml"}, {"path": "./meta.yaml"}),
    *(_blend({**DATA, "weight": weight}) for weight in (".nan", "1e999", "9" * 400, -1)),
    *({"blend_epochized": [{**DATA, "repetitions": number}]} for number in (1e300, 10**30)),
    *({**DATA, "subset": {"range": ends}} for ends in (
        [0, 10**22], ["90%", "10%"], ["0%", "1e300%"])),
    *(_blend(DATA, unit="tokens", lengths=name) for name in ("../../outside/file", "/dev/zero")),
    {**DATA, "split_config": "../../outside/file.yaml"},
    {**DATA, "dataset_config": "/dev/zero.yaml"},
    {**DATA, "split_part": "../../../outside/x"},
    {**DATA, "subflavors": {"__function__": "hostile_code.main"}},
    {**DATA, "subflavors": _nested(900, 1)},
    _nested(200, DATA, "blend"),
]  # fmt: skip
for _number, _split in enumerate(SPLITS):

    def _written(root: Path, outside: Path, split: Any = _split) -> Path | None:
        os.mkfifo(root.parent / "pipe.yaml")
        (root.parent / "zero.yaml").symlink_to("/dev/zero")
        return put_json(META_YAML, metadataset(split))(root, outside)

    add(f"metadataset {_number}: {json.dumps(_split)[:40]}", _written)
_CODE = "__module__: hostile_code\n__class__: Evil\nsplits: {train: {path: data}}\n"
add("metadataset of code", put(META_YAML, _CODE))


def chain(folder: Path, length: int, split: Callable[[str], Any]) -> Path:
    """Writes files of which each one names the next; returns the first."""
    for i in range(length):
        to = "data" if i == length - 1 else f"m{i + 1}.yaml"
        (folder / f"m{i}.yaml").write_text(json.dumps(metadataset(split(to))))
    return folder / "m0.yaml"


add("a chain of 2,000", lambda root, _: chain(root.parent, 2000, lambda to: {"path": to}))
add("2 ** 40 leaves", lambda root, _: chain(
    root.parent, 40, lambda to: _blend({"path": to}, {"path": to})))  # fmt: skip
