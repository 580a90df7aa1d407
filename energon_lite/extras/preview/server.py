"""The page: what each address shows, and the server for this machine."""

from __future__ import annotations

import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from random import randrange
from typing import Any
from urllib.parse import urlencode

import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from energon_lite.core.topology import ORDER_SETTINGS
from energon_lite.extras.inspect.forecast import plan
from energon_lite.extras.preview import charts
from energon_lite.extras.preview.browse import Order, Place, Query, SplitBrowser, split_names_of
from energon_lite.extras.preview.guard import Guard
from energon_lite.extras.preview.page_jobs import ComputingError, PageJobs
from energon_lite.extras.preview.slots import Slot, SlotReader, saved_settings
from energon_lite.extras.view import fields
from energon_lite.extras.view.media_bytes import av_bytes, picture_bytes
from energon_lite.extras.view.segments import BatchView, Token, batch_view
from energon_lite.extras.view.words import error_text

_HERE = Path(__file__).parent
_CARDS, _LIMIT_SEC, _MAX_STEPS = 24, 1.5, 1_000_000
_SELECTION = ("split", "order", "source", "q")  # kept in the links of a page
_OF_ORDER = (
    "trust", "num_streams", "batch_size", "shuffle_buffer_size", "max_samples_per_sequence",
    *ORDER_SETTINGS, "dataset_config",
)  # fmt: skip
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})$")
# Speakers whose turn is what the model learns.
_ANSWERS = ("assistant", "gpt", "model")
_KEPT = {"Cache-Control": "private, max-age=3600"}


class Pages:
    """Answers the requests.

    Args:
        path: a prepared folder, a file of samples or a metadataset.
        split: the split to begin with; None for the first.
        trust: whether code that the dataset names may run.
        encoder: the task encoder for batches; None for the default.
        states: of the ranks of a run, whose batches are shown.
        slot: the batch to begin with; None to begin with the samples.
        ranks: of the run; by default as in the states, or 1.
        settings: of the run, as of `SlotReader`; None for those of the states, or defaults.
    """

    def __init__(
        self, path: str, split: str | None = None, *, trust: bool | None = None,
        encoder: Any = None, states: Sequence[Any] = (), slot: int | None = None,
        ranks: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        own = {name: value for name, value in settings.items() if value is not None}
        self.ranks = ranks or (states[0]["world_size"] if states else 1)
        defaults = {"num_streams": self.ranks, "batch_size": 1, "trust": trust}
        run = {**defaults, **saved_settings(states), **own}
        order = {name: run[name] for name in _OF_ORDER if name in run}
        order["batch_size"] = run["batch_size"] or 1
        self.splits = list(split_names_of(path))
        self._path, self._split = path, split or self.splits[0]
        self._slot, self._first_page = slot, "model" if states or slot is not None else "browse"
        self._encoder, self._order = encoder, order
        self._browser: Callable[[str], SplitBrowser] = cache(
            lambda name: SplitBrowser(path, name, **order)
        )
        self._slots: Callable[[str], SlotReader] = cache(
            lambda name: SlotReader(path, name, encoder, states, **run)
        )
        self._sample = lru_cache(8)(lambda split, place: self._browser(split).sample(place))
        self._batch = lru_cache(8)(self._read_batch)
        self._jobs = PageJobs()
        # Errors of the data are seen before the page is.
        if not self._browser(self._split).raw and (encoder is not None or states):
            self._slots(self._split)
        self._jinja = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_HERE / "templates"), autoescape=True,
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._jinja.filters.update(turns=fields.turns_of, short=fields.short_text, tone=_tone)

    def app(self, token: str, once: str = "") -> Guard:
        """Returns the application, for requests whose paths begin with the token; see `Guard`."""
        pages: dict[str, Callable[[Request], Response]] = {
            "": self._home, "browse": self._browse, "sample": self._show, "step": self._step,
            "jump": self._jump, "model": self._model, "charts": self._charts, "media": self._media,
        }  # fmt: skip
        routes = [Route(f"/{name}", self._answered(page)) for name, page in pages.items()]
        static = Mount("/static", StaticFiles(directory=_HERE / "static"))
        rest = Route("/{path:path}", self._answered(self._unknown))
        return Guard(
            Starlette(routes=[Mount(f"/{token}", routes=[*routes, static, rest])]), token, once
        )

    def _answered(self, page: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """Returns an endpoint that shows errors: of data, of hooks, and of addresses.

        A page that takes long is computed in the background; meanwhile its progress is shown.
        """

        def answer(request: Request) -> Response:
            try:
                name = f"{request.url} {request.headers.get('range')}"
                found: Response = self._jobs.result(name, lambda: page(request))
                return found
            except ComputingError as progress:
                waiting = self._html(request, "computing", 202, progress=progress)
                waiting.headers["Refresh"] = "1"
                return waiting
            except Exception as error:
                # Subclasses of ValueError are of data, hooks and states.
                is_address = type(error) in (ValueError, IndexError, KeyError)
                return self._html(
                    request, "error", 404 if is_address else 500, error=error_text(error)
                )

        return answer

    def _html(self, request: Request, page: str, status: int = 200, **values: Any) -> Response:
        given = request.query_params
        text = self._jinja.get_template(f"{page}.html").render(
            base=request.scope["root_path"], link=partial(_link, request), page=page,
            title=Path(self._path).name, splits=self.splits,
            split=given.get("split") or self._split, **values,
        )  # fmt: skip
        return HTMLResponse(text.encode(errors="replace"), status)

    def _asked(self, request: Request) -> tuple[str, SplitBrowser, Query]:
        """Returns the split and the samples that a request selects.

        Raises:
            ValueError: There is no such split or source.
        """
        given = request.query_params
        split = given.get("split") or self._split
        if split not in self.splits:
            raise ValueError(f"there is no split {split!r}; there are {', '.join(self.splits)}")
        browser = self._browser(split)
        source = _whole_number(request, "source") if given.get("source") else None
        if source is not None and source >= len(browser.sources):
            raise ValueError(f"there is no source {source}")
        order: Order = "run" if given.get("order") == "run" else "files"
        return split, browser, Query(order, source, given.get("q", "")[:1000])

    def _unknown(self, request: Request) -> Response:
        raise ValueError(f"there is no page {request.path_params['path']!r}")

    def _home(self, request: Request) -> Response:
        return _go(request, self._first_page, slot=self._slot)

    # ------------------------------------------------------------------ samples

    def _browse(self, request: Request) -> Response:
        split, browser, query = self._asked(request)
        first, stop = browser.bounds(query)
        at = _whole_number(request, "at", first)
        found = browser.search(query, at, _CARDS)
        before = browser.search(query, at - 1, _CARDS, step=-1, limit_sec=0.2).entries
        return self._html(
            request, "browse", browser=browser, query=query, at=at, first=first, stop=stop,
            cards=[self._card(split, *entry) for entry in found.entries], next=found.next,
            before=before[-1][0] if before else None,
        )  # fmt: skip

    def _card(self, split: str, position: int, place: Place) -> dict[str, Any]:
        """Returns what a template shows of a sample: its fields, or why it cannot be read."""
        sample, error = _or_error(lambda: self._sample(split, place))
        views = [] if error else fields.field_views(sample)
        first: dict[str, tuple[str, Any]] = {}  # by kind
        for path, view in fields.walked(views):
            first.setdefault(view.kind, (path, view.value))
        turns = fields.turns_of(first.get("conversation", ("", None))[1]) or [("", "")]
        answer = next((turn for turn in turns if turn[0] in _ANSWERS), turns[0])
        return {
            "position": position, "place": place, "error": error, "views": views,
            "facts": None if error else fields.sample_facts(sample),
            "picture": first.get("picture", (None, None))[0],
            "text": first.get("text", answer)[1],
            "prompt": None if "text" in first or answer is turns[0] else turns[0][1],
        }  # fmt: skip

    def _show(self, request: Request) -> Response:
        split, browser, query = self._asked(request)
        first, stop = browser.bounds(query)
        position = _whole_number(request, "at", first)
        place = browser.place(query, position)
        if place is None:
            raise ValueError(f"there is no sample at {position:,}")
        return self._html(
            request, "sample", card=self._card(split, position, place), query=query,
            source=browser.sources[place.source], first=first, stop=stop, raw=browser.raw,
        )  # fmt: skip

    def _step(self, request: Request) -> Response:
        """Goes to the next sample that fits, or the one before, or any; else to the list."""
        _, browser, query = self._asked(request)
        step = -1 if "back" in request.query_params else 1
        first, stop = browser.bounds(query)
        at = randrange(first, stop or browser.num_samples)
        if "at" in request.query_params:
            at = _whole_number(request, "at") + step
        found = browser.search(query, at, 1, step=step)
        if found.entries:
            return _go(request, "sample", at=found.entries[0][0])
        return _go(request, "browse", at=max(0, at if found.next is None else found.next))

    def _jump(self, request: Request) -> Response:
        """Goes to the sample of a key; where no index knows it, searches for it."""
        _, browser, _ = self._asked(request)
        key = request.query_params.get("key", "")
        place = browser.find(key)
        if place is None:
            return _go(request, "browse", q=key)
        alone = {"order": None, "source": None, "q": None}
        return _go(request, "sample", **alone, at=browser.position(place))

    # ------------------------------------------------------------------ batches, charts, media

    def _read_batch(self, split: str, number: int) -> tuple[Slot, BatchView]:
        slot = self._slots(split).read(number)
        if slot is None:
            raise ValueError(f"the run ends before slot {number:,}")
        return slot, batch_view(slot.batch, slot.restore_key, self._encoder)

    def _model(self, request: Request) -> Response:
        split, browser, _ = self._asked(request)
        if self._encoder is None and browser.is_crude and not browser.raw:
            return self._html(request, "empty", path=self._path)
        slots = self._slots(split)
        number = _whole_number(request, "slot", slots.first)
        slot, view = self._batch(split, number)
        return self._html(
            request, "model", number=number, slots=slots, view=view, slot=slot, ranks=self.ranks,
            begin=_whole_number(request, "begin", 0),
            facts=fields.sample_facts(slot.batch), views=fields.field_views(slot.batch),
        )  # fmt: skip

    def _charts(self, request: Request) -> Response:
        split, browser, _ = self._asked(request)
        steps = max(1, _whole_number(request, "steps", 1000))
        if steps > _MAX_STEPS:
            raise ValueError(f"steps={steps:,}: the charts are of up to {_MAX_STEPS:,} steps")
        is_cooked = self._encoder is not None or not browser.is_crude
        forecast = _or_error(lambda: plan(self._path, steps=steps, split_part=split, **self._order))
        return self._html(
            request, "charts", steps=steps, forecast=forecast, lengths=browser.stored_lengths(),
            histogram=charts.histogram,
            sizes=_or_error(lambda: charts.sizes(browser, _LIMIT_SEC)),
            fills=_or_error(lambda: charts.fills(self._slots(split), self._encoder, _LIMIT_SEC))
            if is_cooked else ([], ""),
        )  # fmt: skip

    def _media(self, request: Request) -> Response:
        """Returns a picture, a recording or a video of a sample or of a batch."""
        split, given = self._asked(request)[0], request.query_params
        if "picture" in given:
            _, view = self._batch(split, _whole_number(request, "slot"))
            return _picture(request, view.pictures[_whole_number(request, "picture")])
        if "slot" in given:
            sample = self._batch(split, _whole_number(request, "slot"))[0].batch
        else:
            place = Place(*(_whole_number(request, name) for name in ("of", "number", "epoch")))
            sample = self._sample(split, place)
        found = dict(fields.walked(fields.field_views(sample)))[given.get("field", "")]
        if found.kind in ("audio", "video"):
            return _ranged(request, *av_bytes(found.value))
        if found.kind != "picture":
            raise ValueError(f"{found.name} is no picture, audio or video")
        return _picture(request, found.value)


def _link(request: Request, target: str, **more: Any) -> str:
    """Returns an address with what is selected, and with more; None leaves a part out."""
    given = request.query_params
    query = {**{name: given.get(name) or None for name in _SELECTION}, **more}
    known = {name: value for name, value in query.items() if value is not None}
    return f"{request.scope['root_path']}/{target}?{urlencode(known, errors='replace')}"


def _go(request: Request, target: str, **more: Any) -> Response:
    return RedirectResponse(_link(request, target, **more), 303)


def _picture(request: Request, value: Any) -> Response:
    edge = min(_whole_number(request, "edge", 0), 4096) or None
    content, media_type = picture_bytes(value, edge)
    return Response(content, media_type=media_type, headers=_KEPT)


def _ranged(request: Request, content: bytes, media_type: str) -> Response:
    """Returns the part of a recording that a player asks for, to jump without loading all of it."""
    headers, total = {"Accept-Ranges": "bytes"}, len(content)
    found = _RANGE.match(request.headers.get("range", ""))
    if found is None:
        return Response(content, media_type=media_type, headers=headers)
    start = int(found[1])
    stop = min(total, int(found[2]) + 1 if found[2] else total)
    if start >= stop:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{total}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{total}"
    return Response(content[start:stop], 206, media_type=media_type, headers=headers)


def _whole_number(request: Request, name: str, default: int | None = None) -> int:
    """Returns a whole number of an address.

    Raises:
        ValueError: It is none, or not there.
    """
    text = request.query_params.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise ValueError(f"{name}={text!r:.40} is no whole number")
    return int(text)


def _or_error(make: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a function makes, or why it cannot."""
    try:
        return make(), ""
    except Exception as error:
        return None, error_text(error)


def _tone(token: Token, heaviest: float) -> int:
    """Returns the shade of a token in 0..4: how much its loss counts."""
    return max(1, round(4 * token.weight / heaviest)) if token.weight > 0 and heaviest > 0 else 0


def serve(pages: Pages, port: int, *, browser: bool, ready: Callable[[str], Any]) -> None:
    """Serves the page at 127.0.0.1 until it is interrupted.

    Args:
        pages: the page.
        port: 0 for a free one.
        browser: whether to open it in the browser.
        ready: is called with its address.

    Raises:
        OSError: The port is taken.
    """
    token, once = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise OSError(f"port {port}: {error.strerror}; leave --port out, or change it") from None
    with listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/"
        ready(address)
        if browser:
            # Other users see the command line of the browser; this address works once.
            webbrowser.open(address.replace(token, once))
        config = uvicorn.Config(
            pages.app(token, once if browser else ""),
            ws="none",
            log_level="warning",
            server_header=False,
        )
        uvicorn.Server(config).run([listening])
