"""A bucket in memory, by fsspec's protocol "bucket": one that refuses, loses answers, or ends a process at a request.

    with buckets() as requests:                 # empty at first, and gone afterwards
        requests.fault = lambda request: ...    # called before each; what it raises, the request raises
        checkpoint.save(..., checkpoint_id="bucket://b/run/step-1")
        requests.made                           # [Request("put", "b/run/...", 512), ...]

It has S3's interface for uploads in parts, pages of a thousand names, and conditional writes that are atomic.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import fsspec
from fsspec.spec import AbstractFileSystem

PAGE = 1000


class Request(NamedTuple):
    """`kind`: put, put?, get, head, list, delete, copy, or a method of uploads in parts."""

    kind: str
    path: str
    nbytes: int = 0


class Requests:
    """What is in the buckets, and the requests that were made."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.made: list[Request] = []
        self.fault: Callable[[Request], object] = lambda _: None
        # Called after a request had its effect, before its answer.
        self.lost: Callable[[Request], object] = lambda _: None
        self.at_a_time = self.most_at_a_time = 0
        self.lock = threading.RLock()

    def count(self, kind: str) -> int:
        return sum(request.kind == kind for request in self.made)


class BucketFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """See the module."""

    protocol = "bucket"
    requests: ClassVar[Requests] = Requests()

    def _do(self, request: Request, effect: Callable[[], Any]) -> Any:
        here = self.requests
        with here.lock:
            here.made.append(request)
            here.at_a_time += 1
            here.most_at_a_time = max(here.most_at_a_time, here.at_a_time)
        try:
            here.fault(request)
            with here.lock:
                found = effect()
            here.lost(request)
            return found
        finally:
            with here.lock:
                here.at_a_time -= 1

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)

        def put() -> None:
            if mode == "create" and path in self.requests.objects:
                raise FileExistsError(path)
            self.requests.objects[path] = bytes(value)

        self._do(Request("put?" if mode == "create" else "put", path, len(value)), put)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        got: bytes = self._do(Request("get", path, (end or 0) - (start or 0)), lambda: self._object(path)[start:end])
        return got

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        now = datetime.datetime.now(datetime.UTC)
        size = self._do(Request("head", path), lambda: len(self._object(path)))
        return {"name": path, "size": size, "type": "file", "LastModified": now}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)

        def listed() -> dict[str, dict[str, Any]]:
            found = {}
            for name, data in sorted(self.requests.objects.items()):
                if name.startswith(f"{path}/"):
                    first, slash, _ = name[len(path) + 1 :].partition("/")
                    kind, size = ("directory", 0) if slash else ("file", len(data))
                    found[first] = {"name": f"{path}/{first}", "type": kind, "size": size}
            return found

        found: dict[str, dict[str, Any]] = self._do(Request("list", path), listed)
        for _ in range((len(found) - 1) // PAGE):
            self._do(Request("list", path), lambda: None)
        if not found:
            raise FileNotFoundError(path)
        return list(found.values())

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self._do(Request("delete", path), lambda: self.requests.objects.pop(path, None))

    def rm(self, path: list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        for first in range(0, len(path), PAGE):
            for one in path[first + 1 : first + PAGE]:
                self.requests.objects.pop(self._strip_protocol(one), None)
            self.rm_file(path[first])

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        self._do(Request("copy", old), lambda: self.requests.objects.update({new: self._object(old)}))

    def call_s3(self, method: str, *, Bucket: str, Key: str = "", **arguments: Any) -> dict[str, Any]:
        path, uploads = f"{Bucket}/{Key}", self.requests.uploads

        def effect() -> dict[str, Any]:
            if method == "create_multipart_upload":
                name = f"upload-{len(self.requests.made)}"
                uploads[name] = path, {}
                return {"UploadId": name}
            if method == "list_multipart_uploads":
                prefix = f"{Bucket}/{arguments['Prefix']}"
                after = (f"{Bucket}/{arguments.get('KeyMarker', '')}", arguments.get("UploadIdMarker", ""))
                found = sorted((where, name) for name, (where, _) in uploads.items() if where.startswith(prefix))
                found = [one for one in found if one > after]
                page = [{"Key": where.partition("/")[2], "UploadId": name} for where, name in found[:PAGE]]
                more = {"NextKeyMarker": page[-1]["Key"], "NextUploadIdMarker": page[-1]["UploadId"]} if page else {}
                return {"Uploads": page, "IsTruncated": len(found) > PAGE, **more}
            parts = uploads[arguments["UploadId"]][1]
            if method == "upload_part":
                parts[arguments["PartNumber"]] = bytes(arguments["Body"])
                return {"ETag": str(arguments["PartNumber"])}
            if method == "complete_multipart_upload":
                given = [(one["PartNumber"], one["ETag"]) for one in arguments["MultipartUpload"]["Parts"]]
                assert given == [(number, str(number)) for number in range(1, len(parts) + 1)]
                self.requests.objects[path] = b"".join(parts[number] for number, _ in given)
            del uploads[arguments["UploadId"]]
            return {}

        found: dict[str, Any] = self._do(Request(method, path, len(arguments.get("Body", b""))), effect)
        return found

    def _object(self, path: str) -> bytes:
        if path not in self.requests.objects:
            raise FileNotFoundError(path)
        return self.requests.objects[path]


@contextmanager
def buckets() -> Iterator[Requests]:
    """Empty buckets."""
    fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
    before, BucketFileSystem.requests = BucketFileSystem.requests, Requests()
    try:
        yield BucketFileSystem.requests
    finally:
        BucketFileSystem.requests = before
