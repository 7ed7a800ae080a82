"""Requests to an object store one by one: what is repeated and how often, what is an error at once, and in which words;
conditional writes; uploads in parts."""

from __future__ import annotations

import errno
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.checkpoint import bucket, store
from fullshard.checkpoint.errors import CheckpointError, CheckpointIOError
from fullshard.checkpoint.store import ATTEMPTS, PARTS_AT_A_TIME, Store, is_url, location, passes
from tests.harness.bucket import Request, Requests, buckets


@pytest.fixture
def requests() -> Iterator[Requests]:
    with buckets() as found:
        yield found


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause, without waiting."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


class ServerError(Exception):
    """As libraries raise them that have no classes of Python's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class HTTPClientError(Exception):
    """As botocore names what was lost on the way."""


PASSING = [
    OSError(errno.EREMOTEIO, "We encountered an internal error. Please try again."),
    OSError(errno.EBUSY, "Please reduce your request rate."),
    TimeoutError("The read timed out"),
    ConnectionResetError("reset by peer"),
    ServerError(500),
    ServerError(503),
    ServerError(429),
    HTTPClientError("lost"),
]
LASTING = [
    PermissionError("Access Denied"),
    FileNotFoundError("no"),
    OSError(errno.EINVAL, "The specified bucket is not valid."),
    ServerError(403),
    ServerError(404),
    ValueError("a fault of a program"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes_is_sent_again_after_growing_pauses(
    error: Exception, requests: Requests, pauses: list[float]
) -> None:
    def fault(_: Request) -> None:
        if len(requests.made) < ATTEMPTS:
            raise error

    requests.fault = fault
    Store("bucket://b/x").put("a", b"1")
    assert requests.objects == {"b/x/a": b"1"} and requests.count("put") == ATTEMPTS
    assert len(pauses) == ATTEMPTS - 1
    for number, pause in enumerate(pauses):
        assert 0.5 <= pause / (store.FIRST_PAUSE_SECONDS * 2**number) <= 1.5


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_it_is_an_error_after_a_stated_number_of_attempts(
    error: Exception, requests: Requests, pauses: list[float]
) -> None:
    def fault(_: Request) -> None:
        raise error

    requests.fault = fault
    with pytest.raises(CheckpointIOError, match=f"writing bucket://b/x/a: .* .sent {ATTEMPTS} times.") as found:
        Store("bucket://b/x").put("a", b"1")
    assert requests.count("put") == ATTEMPTS and "\n" not in str(found.value)
    assert sum(pauses) < 10


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_what_lasts_is_an_error_at_once(error: Exception, requests: Requests, pauses: list[float]) -> None:
    def fault(_: Request) -> None:
        raise error

    requests.fault = fault
    assert not passes(error)
    with pytest.raises(CheckpointIOError, match="writing bucket://b/x/a: "):
        Store("bucket://b/x").put("a", b"1")
    assert requests.count("put") == 1 and not pauses


def test_of_two_writers_one_succeeds(requests: Requests) -> None:
    here = Store("bucket://b/x")
    assert here.put_if_absent("a", b"first")
    assert not here.put_if_absent("a", b"second")
    assert requests.objects == {"b/x/a": b"first"}


def test_a_conditional_write_whose_answer_was_lost_has_succeeded(requests: Requests, pauses: list[float]) -> None:
    """Its repetition finds the object, and the bytes say whose it is."""

    def lose(request: Request) -> None:
        if request.kind == "put?" and requests.count("put?") == 1:
            raise TimeoutError("The read timed out")

    requests.lost = lose
    assert Store("bucket://b/x").put_if_absent("a", b"mine")
    assert requests.count("put?") == 2


def test_a_store_without_conditional_writes_is_refused(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    Store("bucket://b/x").prove()
    assert not requests.objects and len(requests.made) == 4
    here = Store("bucket://b/x")
    monkeypatch.setattr(here, "put_if_absent", lambda name, data: [here.put(name, data)] != [])
    with pytest.raises(CheckpointError, match=r"expected a store .* \(If-None-Match\), found that it replaced one"):
        here.prove()
    assert not requests.objects


def test_a_file_system_that_looks_and_then_writes_is_refused(tmp_path: Path) -> None:
    """fsspec's own way to write once, which most of its file systems inherit, is no guard between processes."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Inherits(LocalFileSystem):  # type: ignore[misc]
        protocol = "looks"

    fsspec.register_implementation("looks", Inherits, clobber=True)
    with pytest.raises(CheckpointError, match="found fsspec's Inherits, which looks and then writes"):
        Store(f"looks://{tmp_path}").prove()
    assert not list(tmp_path.iterdir())
    Store("memory://b/x").prove()


def test_a_large_object_is_sent_in_parts_side_by_side(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 100)
    requests.fault = lambda request: time.sleep(0.003) if request.kind == "upload_part" else None
    data, arrived = bytes(range(256)) * 5, list[int]()
    upload = Store("bucket://b/x").upload("a")
    upload.advance = arrived.append
    for first in range(0, len(data), 70):
        piece = bytearray(data[first : first + 70])
        upload.write(memoryview(piece))
        piece[:] = bytes(len(piece))  # the caller's memory is free at once
    assert "b/x/a" not in requests.objects
    upload.end()
    upload.drop()
    assert requests.objects == {"b/x/a": data} and not requests.uploads
    assert requests.count("upload_part") == 13 and sum(arrived) == len(data)
    assert 1 < requests.most_at_a_time <= PARTS_AT_A_TIME


def test_a_part_is_repeated_alone_and_a_failed_upload_leaves_nothing(
    requests: Requests, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 100)
    failures = 1

    def fault(request: Request) -> None:
        if request.kind == "upload_part" and requests.count("upload_part") <= failures:
            raise ServerError(503)

    requests.fault = fault
    upload = Store("bucket://b/x").upload("a")
    upload.write(memoryview(bytes(350)))
    upload.end()
    assert requests.count("upload_part") == 5 and len(requests.objects["b/x/a"]) == 350
    failures = 10**6
    upload = Store("bucket://b/x").upload("b")
    with pytest.raises(CheckpointIOError):
        upload.write(memoryview(bytes(1000)))
        upload.end()
    upload.drop()
    assert "b/x/b" not in requests.objects and not requests.uploads


def test_an_upload_that_a_killed_process_left_is_given_up(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PART_NBYTES", 100)
    for name in ("mine/a", "mine-too/a"):
        Store("bucket://b/x").upload(name).write(memoryview(bytes(250)))
    here = Store("bucket://b/x")
    assert [name for name, _ in here.uploads()] == ["mine-too/a", "mine/a"]
    here.give_up(*here.uploads()[1])
    assert [path for path, _ in requests.uploads.values()] == ["b/x/mine-too/a"]


def test_uploads_of_many_are_listed_in_pages(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.bucket.PAGE", 3)
    here = Store("bucket://b/x")
    for number in range(8):
        here.multipart("create_multipart_upload", f"a{number}")
    assert [name for name, _ in here.uploads()] == [f"a{number}" for number in range(8)]
    assert requests.count("list_multipart_uploads") == 3


def test_what_is_forbidden_and_what_lacks_says_what_to_do(requests: Requests) -> None:
    class NoCredentialsError(Exception):
        """As botocore names it."""

    for error, words in (
        (ServerError(403), "no permission: status 403; look at the credentials and policy"),
        (NoCredentialsError("Unable to locate credentials"), "no credentials: .*; set those of the store on each host"),
    ):

        def fault(_: Request, error: Exception = error) -> None:
            raise error

        requests.fault = fault
        with pytest.raises(CheckpointIOError, match=words) as found:
            Store("bucket://b/x").put("a", b"1")
        assert found.value.errno == errno.EACCES


def test_names_are_one_level(requests: Requests) -> None:
    requests.objects |= {"b/x/a": b"1", "b/x/c/d": b"23", "b/xy/z": b"", "b/x/e": b"456"}
    assert Store("bucket://b/x").names() == {"a": 1, "c": None, "e": 3}
    assert Store("bucket://b/x").names("c") == {"d": 2} and Store("bucket://b/none").names() == {}


def test_paths_and_urls() -> None:
    assert location("relative") == str(Path("relative").absolute())
    assert location(Path("/a/b")) == "/a/b" and location("file:///a/b") == "/a/b"
    assert location("memory://b/x/") == "memory://b/x" and is_url("gs://b") and not is_url("a://b".replace(":", ""))
    # A Path of a URL, and its text; a chain; a protocol that fsspec does not know in capitals.
    for text in (Path("s3://b/x"), "s3:/b/x", "simplecache::s3://b/x", "S3://b/x", Path("file:///a")):
        with pytest.raises(ValueError, match="expected a directory, or a URL as a string"):
            location(text)
    assert location("./s3:/b") == str(Path("s3:/b").absolute())
    with pytest.raises(ValueError, match="expected the name of a bucket"):
        location("s3://")
    with pytest.raises(CheckpointError, match="expected a protocol of fsspec in nonsense://, found none"):
        Store("nonsense://b/x")


def test_a_package_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    for protocol, package in (("gs", "gcsfs"), ("az", "adlfs"), ("abfs", "adlfs")):
        words = f"expected the package {package} for {protocol}://, found none.*pip install {package}"
        with pytest.raises(CheckpointError, match=words):
            Store(f"{protocol}://b/x")
    # What fsspec knows, and cannot be made of a URL alone.
    with pytest.raises(CheckpointError, match="expected a protocol of fsspec in reference://, found none") as found:
        Store("reference://b/x")
    assert "\n" not in str(found.value)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"expected the package fsspec, found none: pip install 'fullshard\[s3\]"):
        Store("s3://b/x")


def test_requests_of_the_first_of_10000_ranks(requests: Requests) -> None:
    """As the page counts them: of lists each page is one."""
    bucket._proven.clear()
    saving = bucket.begin("bucket://b/run/step-1", "0" * 32)
    assert [one.kind for one in requests.made] == ["put", "put?", "get", "delete", "list", "list"]
    names = [f"data-{rank:05d}.safetensors" for rank in range(10_000)]
    requests.objects |= {f"b/run/step-1/{saving.name}/{name}": b"data" for name in names}
    assert saving.sizes(names) == [4] * 10_000
    saving.commit(b"{}")
    saving.end()
    made = Counter(one.kind for one in requests.made[4:])
    assert made == {"list": 25, "put": 1, "put?": 1, "list_multipart_uploads": 1} and made.total() == 28
    before = len(requests.made)
    assert bucket.remove("bucket://b/run/step-1") and not requests.objects
    # Two lists, and pages; the next pointer, that of the save, the manifest, pages of files, and its own again.
    made = Counter(one.kind for one in requests.made[before:])
    assert made == {"list": 2 + 11, "get": 1, "put?": 1, "list_multipart_uploads": 1, "delete": 3 + 10}
