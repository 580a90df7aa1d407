"""Keeps others out: requests without the token, under another host name, or from another page."""

from __future__ import annotations

from secrets import compare_digest

from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

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


class Guard(BaseHTTPMiddleware):
    """Passes on what may see the data, and refuses the rest.

    Another site can make a browser send requests to this machine, also under its own host name,
    which it lets lead here. It does not know the token, and its host name and origin differ.

    Args:
        app: what is guarded.
        token: the first part of each path.
        once: another first part, which leads to the first page one time; empty for none.
    """

    def __init__(self, app: ASGIApp, token: str, once: str = "") -> None:
        super().__init__(app)
        self._token, self._once = token, once

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Answers a request."""
        status, text = self._problem(request)
        answer: Response
        if status == 303:
            answer = RedirectResponse(f"/{self._token}/", status)
        else:
            answer = PlainTextResponse(text, status) if text else await call_next(request)
        answer.headers.update(_HEADERS)
        return answer

    def _problem(self, request: Request) -> tuple[int, str]:
        """Returns the status and the text of a refusal; an empty text for what may pass."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            return 403, "The page is at 127.0.0.1 or localhost only."
        if origin is not None and origin != f"http://{host}":
            return 403, "Another page may not ask."
        if request.method not in ("GET", "HEAD"):
            return 405, "There is nothing to change here."
        own = request.scope["path"].split("/", 2)
        if self._once and compare_digest(own[1].encode(), self._once.encode()):
            self._once = ""
            return 303, ""
        if len(own) != 3 or not compare_digest(own[1].encode(), self._token.encode()):
            return 404, "Open the address that the command printed; it has a token."
        return 200, ""
