"""A process that runs scripts with obstore for tests.

A store that was used in a process hangs in every process that is forked from it later, and tests
fork. So obstore is imported only here, in a process started by exec, and never by the tests.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def store_of(
    kind: str,
    url: str,
    bucket: str = "",
    *,
    key: str | None = None,
    secret: str | None = None,
    max_retries: int = 3,
    timeout_sec: float = 5.0,
) -> Any:
    """Returns an obstore store that reads from a test server, with retries after 1 to 5 ms."""
    from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

    backoff = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5)}
    common: dict[str, Any] = {
        "client_options": {"allow_http": True, "timeout": timedelta(seconds=timeout_sec)},
        "retry_config": {
            "max_retries": max_retries,
            "retry_timeout": timedelta(seconds=10),
            "backoff": {**backoff, "base": 2},
        },
    }
    if kind == "http":
        return HTTPStore(f"{url}/{bucket}", **common)
    if kind == "gcs":
        # With `skip_signature`, its writes look for credentials in the network all the same.
        return GCSStore(bucket, base_url=url, bearer_token=key or "none", **common)
    if kind == "azure":
        common.update(account_name="account", endpoint=url, skip_signature=True)
        return AzureStore(bucket, **common)
    common.update(endpoint=url, region="us-east-1", virtual_hosted_style_request=False)
    if key:
        return S3Store(bucket, access_key_id=key, secret_access_key=secret, **common)
    return S3Store(bucket, skip_signature=True, **common)


def error_of(function: Callable[[], Any]) -> str:
    """The name of the exception that a function raises; "" if it raises none."""
    try:
        function()
    except BaseException as error:
        return type(error).__name__
    return ""


class ObstoreClient:
    """The process, as tests use it: a context manager.

    Args:
        limit_sec: the longest that a script may run.
    """

    def __init__(self, limit_sec: float = 60.0) -> None:
        self.limit_sec = limit_sec
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ObstoreClient:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, script: str, **values: Any) -> Any:
        """Runs the body of a function, and returns what it returns, as JSON has it.

        Args:
            script: knows `obstore`, `store_of`, `error_of`, and `store`, opened from the value of
                that name. Bytes that it returns become text.
            values: the other names that it knows.

        Raises:
            RuntimeError: The script failed; with its traceback.
            TimeoutError: The script did not end. The process is killed, and started for the next.
        """
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([textwrap.dedent(script), values]).encode() + b"\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.limit_sec):
                self._end()
                raise TimeoutError(f"no answer after {self.limit_sec} s")
        answer = json.loads(process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def _start(self) -> None:
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def value_of(script: str, values: dict[str, Any]) -> Any:
    """Runs the body of a function with these names."""
    import obstore

    if "store" in values:
        values["store"] = store_of(**values["store"])
    names = {"obstore": obstore, "store_of": store_of, "error_of": error_of, **values}
    exec("def script():\n" + textwrap.indent(script, "    "), names)
    return names["script"]()


def as_json(value: Any) -> Any:
    """Bytes as text, and all else that JSON does not have as `str`."""
    try:
        return bytes(memoryview(value)).decode("latin-1")
    except TypeError:
        return str(value)


def main() -> None:
    """Answers scripts until stdin ends, and ends without the destructors of obstore."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        script, values = json.loads(line)
        try:
            answer = {"value": value_of(script, values)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer, default=as_json) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
