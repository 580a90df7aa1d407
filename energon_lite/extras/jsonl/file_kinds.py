"""Recognises files that are not what their names promise, by their first bytes."""

from __future__ import annotations

# Enough bytes to recognise text.
HEAD_BYTES = 512
_SHOWN_CHARACTERS = 60
_KINDS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file (`git lfs pull`)",
    b"\x1f\x8b": "gzip data; decompress it (gunzip)",
    b"BZh": "bzip2 data; decompress it (bunzip2)",
    b"\x28\xb5\x2f\xfd": "zstd data; decompress it (unzstd)",
    b"\xfd7zXZ": "xz data; decompress it (unxz)",
    b"PK\3\4": "a zip archive; unpack it",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xfe": "text in UTF-16; write it in UTF-8",
    b"\xfe\xff": "text in UTF-16; write it in UTF-8",
}


def kind_of(head: bytes, is_text: bool = False) -> str:
    """Describes a file that is of another kind than its name, and what to do with it.

    Args:
        head: the first `HEAD_BYTES` bytes.
        is_text: whether the file should be text, which may be a web page all the same.

    Returns:
        The description, such as "gzip data; decompress it (gunzip)"; empty if the bytes show none.
    """
    for start, kind in _KINDS.items():
        if head.startswith(start):
            return kind
    # The last character may be cut off.
    text = head.decode("utf-8", "replace").rstrip("\ufffd")
    words = " ".join(text.removeprefix("\ufeff").split())
    is_page = words.startswith("<")
    is_readable = words.isprintable() and "\ufffd" not in words
    if not words or not is_readable or (is_text and not is_page):
        return ""
    what = "a web page or an XML error" if is_page else "text, perhaps the error of a server"
    return f"{what} ({words[:_SHOWN_CHARACTERS]!r}); download it again"
