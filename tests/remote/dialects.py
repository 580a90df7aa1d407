"""Answers to the requests of S3 and of plain HTTP; paths are `/bucket/key` in both."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from xml.sax.saxutils import escape

from .object_table import ObjectTable, ReadRange, StoredObject

CODES = {
    400: "InvalidRequest", 401: "Unauthorized", 403: "AccessDenied", 404: "NoSuchKey",
    405: "MethodNotAllowed", 408: "RequestTimeout", 412: "PreconditionFailed", 416: "InvalidRange",
    429: "TooManyRequests", 500: "InternalError", 503: "SlowDown",
}  # fmt: skip
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'


@dataclass(frozen=True)
class Request:
    """One request; names of headers are in lower case, `path` is decoded and has no first slash."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""

    @property
    def is_list(self) -> bool:
        return "list-type" in self.query

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]


@dataclass
class Answer:
    """One answer; its body is `body`, or the bytes `[start, stop)` of an object."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    source: StoredObject | None = None
    start: int = 0
    stop: int = 0

    @property
    def span(self) -> tuple[int, int]:
        return (0, len(self.body)) if self.source is None else (self.start, self.stop)

    @property
    def num_bytes(self) -> int:
        return self.span[1] - self.span[0]

    @contextmanager
    def opened(self) -> Iterator[ReadRange]:
        """Yields a function that reads the body between two positions of `span`."""
        if self.source is None:
            yield lambda start, stop: self.body[start:stop]
        else:
            with self.source.opened() as read:
                yield read


def refusal(status: int, message: str = "", code: str = "") -> Answer:
    """Returns an error as S3's XML has it."""
    code = code or CODES.get(status, "Error")
    text = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
    return Answer(status, {"Content-Type": "application/xml"}, (_XML + text).encode())


def byte_range(text: str, size: int) -> tuple[int, int] | None:
    """Returns the `[start, stop)` of a Range header; None for one that a server ignores.

    Raises:
        IndexError: No byte of the object is in the range.
    """
    unit, _, spec = text.partition("=")
    first, dash, last = spec.strip().partition("-")
    if unit.strip() != "bytes" or not dash or not (first + last).isdecimal():
        return None
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise IndexError(text)
    return start, stop


class ObjectService:
    """Answers requests from a table of objects.

    Args:
        table: the objects.
        credentials: an access key and its secret; requests must name the key then. The signatures
            themselves are not checked.
    """

    def __init__(self, table: ObjectTable, credentials: tuple[str, str] | None = None) -> None:
        self.table = table
        self.credentials = credentials

    def answer(self, request: Request) -> Answer:
        """Does what a request asks for."""
        if not self._is_allowed(request):
            return refusal(403, "The access key is missing or not known.")
        if request.method == "GET" and request.is_list:
            return self._list(request)
        methods: dict[str, Callable[[Request], Answer]] = {
            "GET": self._read,
            "HEAD": self._read,
            "PUT": self._put,
            "DELETE": self._delete,
        }
        method = methods.get(request.method)
        return refusal(405, request.method) if method is None else method(request)

    def _is_allowed(self, request: Request) -> bool:
        if self.credentials is None:
            return True
        key = self.credentials[0]
        text = request.headers.get("authorization", "")
        signed = f"Credential={request.query.get('X-Amz-Credential', '')}"
        is_named = f"Credential={key}/" in text or text == f"Bearer {key}"
        return is_named or signed.startswith(f"Credential={key}/")

    def _read(self, request: Request) -> Answer:
        found = self.table.find(request.path)
        if found is None:
            return refusal(404, "The specified key does not exist.")
        if not _matches(request.headers.get("if-match", "*"), found):
            return refusal(412, "The ETag is another one.")
        headers = _headers_of(found)
        answer = Answer(200, headers, b"", found, 0, found.size)
        if request.method == "GET" and "range" in request.headers:
            try:
                part = byte_range(request.headers["range"], found.size)
            except IndexError:
                refused = refusal(416, "The requested range is not satisfiable.")
                refused.headers["Content-Range"] = f"bytes */{found.size}"
                return refused
            if part is not None:
                answer.status = 206
                answer.start, answer.stop = part
                headers["Content-Range"] = f"bytes {part[0]}-{part[1] - 1}/{found.size}"
        return answer

    def _put(self, request: Request) -> Answer:
        headers = request.headers
        if "comp" in request.query or any(name.endswith("-copy-source") for name in headers):
            return refusal(400, "Not supported by this server.", "NotImplemented")
        found = self.table.find(request.path)
        if headers.get("if-none-match") == "*" and found is not None:
            return refusal(412, "The object exists.")
        if "if-match" in headers and (found is None or not _matches(headers["if-match"], found)):
            return refusal(404 if found is None else 412, "The ETag is another one.")
        return Answer(200, _headers_of(self.table.put(request.path, request.body)))

    def _delete(self, request: Request) -> Answer:
        self.table.delete(request.path)
        return Answer(204)

    def _list(self, request: Request) -> Answer:
        query = request.query
        after = query.get("continuation-token", query.get("start-after", ""))
        names, limit = (query.get("prefix", ""), query.get("delimiter", "")), query.get("max-keys")
        page = self.table.page(request.bucket, *names, after, min(int(limit or 1000), 1000))
        text = "".join(
            f"<Contents><Key>{escape(_key(found))}</Key><Size>{found.size}</Size>"
            f"<LastModified>{_iso_date(found.modified)}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag></Contents>"
            for found in page.objects
        )
        for prefix in page.prefixes:
            text += f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
        if page.next_name:
            token = escape(page.next_name)
            text += f"<NextContinuationToken>{token}</NextContinuationToken>"
        is_cut = str(bool(page.next_name)).lower()
        return _xml(
            f"<ListBucketResult><Name>{escape(request.bucket)}</Name>"
            f"<IsTruncated>{is_cut}</IsTruncated>{text}</ListBucketResult>"
        )


def _matches(header: str, found: StoredObject) -> bool:
    """Whether a list of ETags, or a star, has the ETag of an object."""
    return header == "*" or found.etag in (part.strip() for part in header.split(","))


def _headers_of(found: StoredObject) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }


def _xml(text: str) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, (_XML + text).encode())


def _key(found: StoredObject) -> str:
    return found.name.partition("/")[2]


def _iso_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
