"""Objects of a bucket, by fsspec: the requests of checkpoints in an object store, and what is done when one fails.

    put             a whole object, which replaces one of that name
    put_if_absent   the same, unless there is one: of two that call it one succeeds
    upload          a large object in parts, several at a time
    read            a range of bytes
    size, names     one object; one level of names, with their sizes
    delete

A request that failed for a reason that may pass (a server's 5xx, a lost connection, a timeout) is sent again after a
pause that doubles, at most `ATTEMPTS` times. Whatever else a library raises becomes an `OSError` in one line. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from .errors import CheckpointError, CheckpointIOError

# Of one request; the pauses between them are 6 s all together, or up to 9.
ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.2
# Bytes of a part of a large object, and how many are sent at a time. S3 takes 10,000 parts of an object.
PART_NBYTES = 32 << 20
PARTS_AT_A_TIME = 4

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
# What looks like a URL and is none: a Path has one slash, a chain has several protocols, no protocol has capitals.
_NO_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(:/|::)")
# Packages of fsspec's, by the protocol that they bring, where the name does not say it.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
# One attempt by the library: here requests are repeated, in a stated time.
_S3_CONFIG = {"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 15}
# What does not pass by waiting, of errors that have a number.
_LASTING = frozenset({errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE})
_LASTING_KINDS = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
# Classes of botocore and aiohttp that are no `OSError`, and pass.
_PASSING_NAMES = frozenset({"HTTPClientError", "ConnectionError", "ClientError", "ResponseParserError"})
_PASSING_STATUS, _FORBIDDEN, _SERVER, _PRECONDITION = (408, 409, 429), (401, 403), 500, 412

_Result = TypeVar("_Result")


def is_url(path: str) -> bool:
    """Whether `path` is a place that fsspec reaches, and not one of this machine's file systems.

    >>> is_url("s3://bucket/run"), is_url("file:///run"), is_url("/run")
    (True, False, False)
    """
    found = _URL.match(path)
    return found is not None and found[1] not in ("file", "local")


def location(given: str | os.PathLike[str]) -> str:
    """The absolute path or the URL in `given`, without a slash at its end. Raises `ValueError` for what is neither.

    >>> location("s3://bucket/run/"), location("file:///run/x")
    ('s3://bucket/run', '/run/x')
    """
    text = os.fspath(given)
    found = _URL.match(text)
    if found is None:
        if _NO_URL.match(text):
            raise ValueError(
                f"expected a directory, or a URL as a string such as 's3://bucket/run', found {given!r}: a Path leaves "
                f"out a slash of a URL; a directory of that name is ./{text}"
            )
        return os.path.abspath(text)
    if not is_url(text):
        return os.path.abspath(found[2])
    if not found[2].strip("/"):
        raise ValueError(f"expected the name of a bucket in {text!r}, found none")
    return text.rstrip("/")


# ---- errors ----------------------------------------------------------------------------------------------------------


def passes(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, _LASTING_KINDS):
        return False
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS or status >= _SERVER
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, TimeoutError) or bool(names & _PASSING_NAMES)


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of botocore, gcsfs or azure."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status_code", "status", "code"):
            status = getattr(one, name, None)
            if isinstance(status, int) and status >= 100:
                return status
    return None


def _is_no_bucket(error: BaseException) -> bool:
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else None
    return code == "NoSuchBucket" or "bucket does not exist" in str(error)


def _refused(what: str, error: Exception, attempts: int) -> OSError:
    """`error` as one line. Of an object that is not there, `FileNotFoundError`."""
    text = " ".join(str(error).split()) or type(error).__name__
    if _is_no_bucket(error):
        return CheckpointIOError(errno.ENXIO, f"{what}: no such bucket: {text}")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"{what}: not found")
    if isinstance(error, PermissionError) or _status(error) in _FORBIDDEN:
        return CheckpointIOError(errno.EACCES, f"{what}: no permission: {text}; look at the credentials and policy")
    if "redentials" in type(error).__name__ + text:
        return CheckpointIOError(
            errno.EACCES,
            f"{what}: no credentials: {text}; set those of the store on each host, as its package reads them",
        )
    number = getattr(error, "errno", None) or errno.EIO
    tried = f" (sent {attempts} times)" if attempts > 1 else ""
    return CheckpointIOError(number, f"{what}: {text}{tried}")


# ---- requests --------------------------------------------------------------------------------------------------------


class Store:
    """The objects whose names begin with `url`. Names are relative to it. Threads may share one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._root = _system(url)

    def put(self, name: str, data: bytes) -> None:
        """Write the object `name`."""
        self._absent_is_no_bucket(name, lambda: self._system.pipe_file(self._path(name), data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write the object `name` if there is none. Whether it has this data, after that.

        The answer to a request that succeeded may get lost, and its repetition finds the object: so its bytes decide.
        """
        try:
            put = self._system.pipe_file
            self._absent_is_no_bucket(name, lambda: put(self._path(name), data, mode="create"))
        except FileExistsError:
            return self.read(name, 0, len(data) + 1) == data
        return True

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of an object, or those up to its end. Raises `FileNotFoundError`."""
        if start == stop:
            return b""
        found: bytes = self._try(
            "reading", name, lambda: self._system.cat_file(self._path(name), start=start, end=stop)
        )
        return found

    def size(self, name: str) -> int:
        """Bytes of an object. Raises `FileNotFoundError`."""
        return int(self.facts(name)["size"])

    def facts(self, name: str) -> dict[str, Any]:
        """The size of an object, and its time by a name that depends on the store."""
        found: dict[str, Any] = self._try("looking at", name, lambda: self._system.info(self._path(name)))
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, f"{self.url}/{name}: not found")
        return found

    def names(self, under: str = "") -> dict[str, int | None]:
        """One level of names after `under`, with the bytes of each object; None for a name that others begin with."""

        def listed() -> list[dict[str, Any]]:
            try:
                found: list[dict[str, Any]] = self._system.ls(self._path(under), detail=True)
                return found
            except FileNotFoundError as error:
                if _is_no_bucket(error):
                    raise
                return []

        found = {}
        for one in self._try("listing", under, listed):
            name = one["name"].rstrip("/").rpartition("/")[2]
            # An object whose name ends in a slash is what consoles show as an empty folder.
            if not one["name"].endswith("/") or one["type"] == "directory":
                found[name] = None if one["type"] == "directory" else int(one["size"])
        return found

    def delete(self, name: str) -> None:
        """Remove one object; nothing if there is none. Raises if the store refuses."""
        with contextlib.suppress(FileNotFoundError):
            self._try("removing", name, lambda: self._system.rm_file(self._path(name)))

    def delete_all(self, names: Iterable[str]) -> None:
        """Remove objects in few requests. Stores do not say which of them they refused."""
        paths = [self._path(name) for name in names]
        if paths:
            with contextlib.suppress(FileNotFoundError):
                self._try("removing", "", lambda: self._system.rm(paths))

    def copy(self, name: str, to: str) -> None:
        """Copy an object within the store, to the URL `to`."""
        _, target = _system(to)
        self._try("copying", name, lambda: self._system.cp_file(self._path(name), target))

    def upload(self, name: str) -> Upload:
        """A new object, to be written from beginning to end."""
        return Upload(self, name)

    def uploads(self) -> list[tuple[str, str]]:
        """Objects whose upload has not ended, each with the id of the upload: invisible, and paid for. A killed process
        leaves them."""
        if not self.has_parts:
            return []
        bucket, _, key = self._root.partition("/")
        prefix = f"{key}/" if key else ""
        call = self._system.call_s3
        uploads, after = list[tuple[str, str]](), dict[str, str]()
        while True:
            page = self._try(
                "listing",
                "",
                lambda: call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after),  # noqa: B023
            )
            uploads += [(one["Key"].removeprefix(prefix), one["UploadId"]) for one in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return uploads
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def give_up(self, name: str, upload: str) -> None:
        """End an upload of `uploads`, of which nothing stays."""
        with contextlib.suppress(OSError):  # it ended by itself
            self.multipart("abort_multipart_upload", name, UploadId=upload)

    def multipart(self, method: str, name: str, **arguments: Any) -> Any:
        """One request of S3's interface to upload an object in parts."""
        bucket, _, key = self._path(name).partition("/")
        call = self._system.call_s3
        return self._absent_is_no_bucket(name, lambda: call(method, Bucket=bucket, Key=key, **arguments))

    @property
    def has_parts(self) -> bool:
        """Whether objects can be uploaded in parts."""
        return hasattr(self._system, "call_s3")

    def prove(self) -> None:
        """Write an object, under a name of its own, twice, and remove it: that is all that a save needs. Raises
        `CheckpointIOError` for no bucket, credentials or permission, `CheckpointError` if the store cannot refuse to
        replace an object."""
        if not self._writes_once():
            raise CheckpointError(
                f"{self.url}: expected a store that writes an object only if there is none, found fsspec's "
                f"{type(self._system).__name__}, which looks and then writes: two savers could both commit there; save "
                f"to a directory or to a store of objects"
            )
        name = f".fullshard-{random.getrandbits(64):016x}"
        self.put(name, b"first")
        try:
            replaced = self.put_if_absent(name, b"second")
        finally:
            with contextlib.suppress(OSError):
                self.delete(name)
        if replaced:
            raise CheckpointError(
                f"{self.url}: expected a store that writes an object only if there is none (If-None-Match), found that "
                f"it replaced one: two savers could both commit there"
            )

    def _writes_once(self) -> bool:
        """Whether the package has a conditional write of its own; the one that all inherit is none."""
        import fsspec

        return getattr(self._system.pipe_file, "__func__", None) is not fsspec.AbstractFileSystem.pipe_file

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _absent_is_no_bucket(self, name: str, request: Callable[[], _Result]) -> _Result:
        try:
            return self._try("writing", name, request)
        except FileNotFoundError:
            raise CheckpointIOError(errno.ENXIO, f"writing {self.url}/{name}: no such bucket") from None

    def _try(self, doing: str, name: str, request: Callable[[], _Result]) -> _Result:
        what = f"{doing} {self.url}/{name}" if name else f"{doing} {self.url}"
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return request()
            except Exception as error:
                if isinstance(error, FileExistsError) or _status(error) == _PRECONDITION:
                    raise FileExistsError(errno.EEXIST, f"{what}: there is one already") from None
                if attempt == ATTEMPTS or not passes(error):
                    raise _refused(what, error, attempt) from error
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause *= 2
        raise AssertionError


class Upload:
    """A new object that is written in pieces: in parts, several at a time, where the store takes parts; else as a whole
    at the end. Nothing is visible before `end`; `drop` leaves nothing."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._buffer = bytearray()
        self._id: str | None = None
        self._sent: list[Future[str]] = []
        self._free = threading.Semaphore(PARTS_AT_A_TIME)
        # Called with bytes that have arrived, on any thread.
        self.advance: Callable[[int], object] = lambda _: None

    def write(self, data: memoryview) -> None:
        """Append `data`, which may be changed afterwards."""
        self._buffer += data
        while self._store.has_parts and len(self._buffer) >= 2 * PART_NBYTES:
            self._send(PART_NBYTES)

    def end(self) -> None:
        """Send the rest, and make the object visible."""
        if self._id is None:
            self._store.put(self._name, bytes(self._buffer))
            self.advance(len(self._buffer))
            return
        while self._buffer:
            self._send(min(len(self._buffer), PART_NBYTES))
        parts = [{"PartNumber": number, "ETag": one.result()} for number, one in enumerate(self._sent, 1)]
        self._request("complete_multipart_upload", MultipartUpload={"Parts": parts})
        self._id = None

    def drop(self) -> None:
        """Free what it holds; without `end`, what was sent goes."""
        self._buffer = bytearray()
        if self._id is not None:
            for one in self._sent:
                one.exception()
            with contextlib.suppress(OSError):
                self._request("abort_multipart_upload")
            self._id = None

    def _send(self, nbytes: int) -> None:
        if self._id is None:
            self._id = self._store.multipart("create_multipart_upload", self._name)["UploadId"]
        self._free.acquire()
        for one in self._sent:
            if one.done():
                one.result()  # raises what has failed
        part = bytes(memoryview(self._buffer)[:nbytes])
        del self._buffer[:nbytes]
        number = len(self._sent) + 1
        self._sent.append(started(lambda: self._send_part(number, part)))

    def _send_part(self, number: int, part: bytes) -> str:
        try:
            found = self._request("upload_part", PartNumber=number, Body=part)
        finally:
            self._free.release()
        self.advance(len(part))
        return str(found["ETag"])

    def _request(self, method: str, **arguments: Any) -> Any:
        return self._store.multipart(method, self._name, UploadId=self._id, **arguments)


# ---- threads ---------------------------------------------------------------------------------------------------------


def started(work: Callable[[], _Result]) -> Future[_Result]:
    """The result of `work`, which a thread of its own does. No executor: those reject work when the interpreter shuts
    down, and the last save may still run then."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="fullshard-store", daemon=True).start()
    return future


def side_by_side(work: Sequence[Callable[[], object]], threads: int = 16) -> None:
    """Call each of `work`, several at a time; raises the first failure of the first thread that has one."""

    def share(first: int) -> None:
        for one in work[first::threads]:
            one()

    for future in [started(lambda n=n: share(n)) for n in range(min(threads, len(work)))]:  # type: ignore[misc]
        future.result()


# ---- the libraries ---------------------------------------------------------------------------------------------------

_systems: dict[tuple[int, str, str], Any] = {}
_LOCK = threading.Lock()


def _system(url: str) -> tuple[Any, str]:
    """fsspec's file system of `url`, one for each process, and the path of `url` in it."""
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError:
        raise CheckpointError(f"{url}: expected the package fsspec, found none: pip install 'fullshard[s3]'") from None
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a") and "config_kwargs" not in fsspec.config.conf.get("s3", {}):
        options["config_kwargs"] = _S3_CONFIG
    # Which file system it is may be in the name, as of hdfs://host.
    key = os.getpid(), protocol, url.partition("://")[2].partition("/")[0]
    with _LOCK:
        try:
            if key not in _systems:
                _systems[key], _ = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
                if protocol in ("s3", "s3a"):
                    _systems[key].retries = 1
            return _systems[key], str(fsspec.core.strip_protocol(url)).rstrip("/")
        except Exception as error:
            package = _PACKAGES.get(protocol)
            need = f"the package {package} for {protocol}://" if package else f"a protocol of fsspec in {protocol}://"
            how = f": pip install {_quoted(package)}" if package else ""
            raise CheckpointError(f"{url}: expected {need}, found none ({error}){how}") from None


def _quoted(package: str) -> str:
    return "'fullshard[s3]'" if package == "s3fs" else package
