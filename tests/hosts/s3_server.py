"""An S3 server on loopback, moto's, that fails as it is asked to. `python s3_server.py PORT`.

    GET /-/answers?kind=503      the answer to each request from now on, or to each third one with `every=3`:
                                 500, 503, slow (no answer), gone (no such bucket), denied; none ends it
    GET /-/counts                how many requests it got, as JSON

A request whose access key is "wrong" is refused as S3 does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

ERRORS = {
    "500": ("500 Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    "503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "gone": ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist"),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "wrong": ("403 Forbidden", "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist."),
}
Start = Callable[[str, list[tuple[str, str]]], Any]


class Server:
    """The application of the server."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._counts = Counter[str]()
        self._kind, self._every, self._seen = "none", 1, 0
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/-/"):
            return self._ask(path, parse_qs(environ["QUERY_STRING"]), start)
        with self._lock:
            self._counts[method] += 1
            self._seen += 1
            kind = self._kind if self._seen % self._every == 0 else "none"
        if "Credential=wrong/" in environ.get("HTTP_AUTHORIZATION", ""):
            kind = "wrong"
        if kind == "slow":
            time.sleep(60)
        if kind not in ERRORS:
            found: Iterable[bytes] = self._moto(environ, start)
            return found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, text = ERRORS[kind]
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [b"" if method == "HEAD" else body]

    def _ask(self, path: str, query: dict[str, list[str]], start: Start) -> Iterable[bytes]:
        with self._lock:
            if path == "/-/answers":
                self._kind, self._every, self._seen = query["kind"][0], int(query.get("every", ["1"])[0]), 0
            body = json.dumps(self._counts).encode()
            self._counts.clear()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), Server(), threaded=True)
