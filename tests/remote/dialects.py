"""Answers to the requests of S3, of the XML API of GCS, of Azure blobs, and of plain HTTP.

Paths are `/bucket/key` in all of them, and most requests are the same in all. They differ in their
lists, in the headers of conditional writes, and in multipart uploads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .object_table import ObjectTable, Page, ReadRange, StoredObject

CODES = {
    400: "InvalidRequest", 401: "Unauthorized", 403: "AccessDenied", 404: "NoSuchKey",
    405: "MethodNotAllowed", 408: "RequestTimeout", 409: "BlobAlreadyExists",
    412: "PreconditionFailed", 416: "InvalidRange", 429: "TooManyRequests", 500: "InternalError",
    503: "SlowDown",
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
        return "list-type" in self.query or self.query.get("comp") == "list"

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
        page_size: the most objects and prefixes in a page of a list.
        credentials: an access key and its secret; requests must name the key then. The signatures
            themselves are not checked.
    """

    def __init__(
        self, table: ObjectTable, page_size: int = 1000, credentials: tuple[str, str] | None = None
    ) -> None:
        self.table = table
        self.page_size = page_size
        self.credentials = credentials
        self._uploads: dict[str, dict[int, bytes]] = {}

    def answer(self, request: Request) -> Answer:
        """Does what a request asks for."""
        if not self._is_allowed(request):
            return refusal(403, "The access key is missing or not known.")
        query = request.query
        if request.method == "GET" and request.is_list:
            return self._s3_list(request) if "list-type" in query else self._azure_list(request)
        methods: dict[str, Callable[[Request], Answer]] = {
            "GET": self._read,
            "HEAD": self._read,
            "PUT": self._put_part if "partNumber" in query else self._put,
            "POST": self._post,
            "DELETE": self._delete,
            "PROPFIND": self._propfind,
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
        if request.query.get("generation", str(found.generation)) != str(found.generation):
            return refusal(404, "No such generation.")
        if not _matches(request.headers.get("if-match", "*"), found):
            return refusal(412, "The ETag is another one.")
        headers = _headers_of(found)
        if _matches(request.headers.get("if-none-match", ""), found):
            return Answer(304, headers)
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
            return refusal(409 if "x-ms-version" in headers else 412, "The object exists.")
        if "if-match" in headers and (found is None or not _matches(headers["if-match"], found)):
            return refusal(404 if found is None else 412, "The ETag is another one.")
        generation = 0 if found is None else found.generation
        if headers.get("x-goog-if-generation-match", str(generation)) != str(generation):
            return refusal(412, "The generation is another one.")
        return Answer(200, _headers_of(self.table.put(request.path, request.body)))

    def _put_part(self, request: Request) -> Answer:
        parts = self._uploads.get(request.query.get("uploadId", ""))
        if parts is None:
            return refusal(404, "No such upload.", "NoSuchUpload")
        parts[int(request.query["partNumber"])] = request.body
        return Answer(200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})

    def _post(self, request: Request) -> Answer:
        query = request.query
        if "uploads" in query:
            upload = f"upload-{len(self._uploads) + 1}"
            self._uploads[upload] = {}
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                        "</InitiateMultipartUploadResult>")  # fmt: skip
        if "uploadId" in query:
            parts = self._uploads.pop(query["uploadId"], None)
            if parts is None:
                return refusal(404, "No such upload.", "NoSuchUpload")
            digests = b"".join(hashlib.md5(parts[n]).digest() for n in sorted(parts))
            etag = f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'
            found = self.table.put(request.path, b"".join(parts[n] for n in sorted(parts)), etag)
            answer = _xml(f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag>"
                          "</CompleteMultipartUploadResult>")  # fmt: skip
            answer.headers["x-goog-generation"] = str(found.generation)
            return answer
        if "delete" in query:
            tree = ElementTree.fromstring(request.body)
            keys = [element.text or "" for element in tree.iterfind(".//{*}Key")]
            for key in keys:
                self.table.delete(f"{request.bucket}/{key}")
            done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return _xml(f"<DeleteResult>{done}</DeleteResult>")
        return refusal(400, "Not supported by this server.", "NotImplemented")

    def _delete(self, request: Request) -> Answer:
        if "uploadId" in request.query:
            self._uploads.pop(request.query["uploadId"], None)
        else:
            self.table.delete(request.path)
        return Answer(204)

    def _page(self, request: Request, after: str, limit: str) -> Page:
        query = request.query
        page = partial(self.table.page, request.bucket, query.get("prefix", ""))
        return page(query.get("delimiter", ""), after, min(int(limit), self.page_size))

    def _s3_list(self, request: Request) -> Answer:
        query = request.query
        after = query.get("continuation-token", query.get("start-after", ""))
        page = self._page(request, after, query.get("max-keys", "1000"))
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

    def _azure_list(self, request: Request) -> Answer:
        query = request.query
        after = query.get("marker", query.get("startFrom", ""))
        page = self._page(request, after, query.get("maxresults", "5000"))
        text = "".join(
            f"<Blob><Name>{escape(_key(found))}</Name><Properties>"
            f"<Last-Modified>{formatdate(found.modified, usegmt=True)}</Last-Modified>"
            f"<Content-Length>{found.size}</Content-Length>"
            f"<Content-Type>application/octet-stream</Content-Type>"
            f"<Etag>{escape(found.etag)}</Etag></Properties></Blob>"
            for found in page.objects
        )
        for prefix in page.prefixes:
            text += f"<BlobPrefix><Name>{escape(prefix)}</Name></BlobPrefix>"
        return _xml(
            f"<EnumerationResults><Blobs>{text}</Blobs>"
            f"<NextMarker>{escape(page.next_name)}</NextMarker></EnumerationResults>"
        )

    def _propfind(self, request: Request) -> Answer:
        """Lists a folder as WebDAV does, with the files below it in one answer."""
        bucket, _, folder = request.path.strip("/").partition("/")
        prefix = f"{folder}/" if folder else ""
        is_deep = request.headers.get("depth", "infinity") == "infinity"
        page = self.table.page(bucket, prefix, "" if is_deep else "/", "", 1 << 30)
        if not page.objects and not page.prefixes:
            return refusal(404, "No such folder.")
        folders = [f"{bucket}/{prefix}", *(f"{bucket}/{name}" for name in page.prefixes)]
        kind = "<D:resourcetype><D:collection/></D:resourcetype>"
        items = [(name, kind, 0.0) for name in folders]
        for found in page.objects:
            size = f"<D:getcontentlength>{found.size}</D:getcontentlength>"
            etag = f"<D:getetag>{escape(found.etag)}</D:getetag>"
            items.append((found.name, f"<D:resourcetype/>{size}{etag}", found.modified))
        text = "".join(
            f"<D:response><D:href>/{escape(quote(name))}</D:href><D:propstat><D:prop>{properties}"
            f"<D:getlastmodified>{formatdate(modified, usegmt=True)}</D:getlastmodified></D:prop>"
            "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
            for name, properties, modified in items
        )
        answer = _xml(f'<D:multistatus xmlns:D="DAV:">{text}</D:multistatus>')
        answer.status = 207
        return answer


def _matches(header: str, found: StoredObject) -> bool:
    """Whether a list of ETags, or a star, has the ETag of an object."""
    return header == "*" or found.etag in (part.strip() for part in header.split(","))


def _headers_of(found: StoredObject) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "x-goog-generation": str(found.generation),
    }


def _xml(text: str) -> Answer:
    return Answer(200, {"Content-Type": "application/xml"}, (_XML + text).encode())


def _key(found: StoredObject) -> str:
    return found.name.partition("/")[2]


def _iso_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))
