"""Opens the page for the command, where the packages that it needs are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from energon_lite.extras.inspect.checkpoints import states_at
from energon_lite.names.energon_modules import import_name

_SERVER = "energon_lite.extras.preview.server"
_INSTALL = "The page needs `pip install 'energon_lite[preview]'`"


def why_not(is_asked: bool, is_terminal: bool) -> str:
    """Returns why samples are to be printed, and no page opened; empty to open it.

    Args:
        is_asked: whether an option of the page was given.
        is_terminal: whether somebody reads what is printed.

    Raises:
        RuntimeError: The page is asked for, and a package is missing.
    """
    missing = [name for name in ("jinja2", "starlette", "uvicorn") if find_spec(name) is None]
    if missing and is_asked:
        raise RuntimeError(f"{_INSTALL}; {', '.join(missing)} not found")
    if missing or not (is_asked or is_terminal):
        where = "" if missing else ", and a terminal or --port"
        return f"{_INSTALL}{where}; samples are printed, as with --terminal"
    return ""


def open_page(
    path: str, split: str | None, *, state: Path | None, port: int, **options: Any
) -> None:
    """Serves the page until it is interrupted.

    Args:
        path: what is shown.
        split: the split to begin with; of several, the first.
        state: file or folder with the states of a run.
        port: of the page; 0 for a free one.
        options: of `server.Pages`, and `browser` and `ready` of `server.serve`.
    """
    shown = {name: options.pop(name) for name in ("browser", "ready")}
    states = [] if state is None else states_at([state])
    first = split.split(",")[0] if split else None
    pages = import_name(_SERVER, "Pages")(path, first, states=states, **options)
    import_name(_SERVER, "serve")(pages, port, **shown)
