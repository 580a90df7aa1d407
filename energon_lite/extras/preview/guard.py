"""Keeps others out: requests without the token, under another host name, or from another page."""

from __future__ import annotations

from secrets import compare_digest

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HOSTS = ("127.0.0.1", "localhost")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; media-src 'self'; "
    "style-src 'self'; script-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Passes on what may see the data, without the token in the path; refuses the rest.

    Another site can make a browser send requests to this machine, also under its own host name,
    which it lets lead here. It does not know the token, and its host name and origin differ.

    Args:
        app: what is guarded.
        token: the first part of each path.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        problem = self._problem(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if problem is None:
            _, token, rest = scope["path"].split("/", 2)
            scope = {**scope, "path": f"/{rest}", "raw_path": b"", "base": f"/{token}"}
            await self._app(scope, receive, send_guarded)
        elif scope["type"] == "http":
            status, text = problem
            await PlainTextResponse(text, status)(scope, receive, send_guarded)

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        """Returns the status and the text of a refusal; None for what may pass."""
        if scope["type"] != "http":
            return 403, ""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            return 403, "The page is at 127.0.0.1 or localhost only."
        if origin is not None and origin != f"http://{host}":
            return 403, "Another page may not ask."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "There is nothing to change here."
        own = scope["path"].split("/", 2)
        if len(own) != 3 or not compare_digest(own[1].encode(), self._token.encode()):
            return 404, "Open the address that the command printed; it has a token."
        return None
