"""The table of formats, which everybody asks who has the path of a dataset."""

from __future__ import annotations

from pathlib import PurePath

from energon_lite.formats.format import Format
from energon_lite.formats.prepared_folder import PreparedFolder
from energon_lite.names.energon_modules import import_name

# Asked first, in this order.
FORMATS: list[Format] = []
# Formats of files by suffix, imported on first use.
_BY_SUFFIX = {".jsonl": "energon_lite.extras.jsonl.jsonl:JsonlFormat"}
# Takes every other path, and reports what is wrong with it.
_FOLDER = PreparedFolder()


def register_format(own: Format) -> None:
    """Puts a format in front of the others."""
    FORMATS.insert(0, own)


def format_of(path: PurePath) -> Format:
    """Returns the format of a dataset; decides by its name, without reading it."""
    home = _BY_SUFFIX.get(path.suffix.lower())
    known = [*FORMATS, *([import_name(home)()] if home else []), _FOLDER]
    found: Format = next(own for own in known if own.is_mine(path))
    return found
