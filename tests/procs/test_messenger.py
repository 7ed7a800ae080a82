"""Blocks of messages that one rank leaves with an exception: the others raise in the same block, wherever they were."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from fullshard import PeerFailed
from fullshard.comm.messages import Messenger, messenger
from tests.harness.pool import pool


class Broken(Exception):
    pass


def _until(is_so: Callable[[], object]) -> None:
    while not is_so():
        time.sleep(0.01)


def _hears(texts: Messenger) -> None:
    """Wait until this rank knows that another one failed."""
    assert texts.line is not None and texts.line.data_group is not None
    _until(texts.line.data_group.scope.causes)


def _comes_after_it_failed(rank: int) -> list[int]:
    """Rank 0 leaves the second block before rank 1 begins it, and does not come back before that one raised too."""
    texts, store = messenger(None, "test"), dist.distributed_c10d._get_default_store()
    with texts.together("the first block"):
        texts.largest([rank])
    if rank == 0:
        with pytest.raises(Broken), texts.together("the second block"):
            raise Broken
        _until(lambda: store.check(["the other one raised"]))
    else:
        _hears(texts)
        with pytest.raises(PeerFailed, match="the second block.*rank 0 raised.*Broken"):
            with texts.together("the second block"):
                raise AssertionError("it is not begun")
        store.set("the other one raised", "")
    with texts.together("the third block"):
        return texts.largest([rank])


def _was_through(rank: int) -> list[int]:
    """Rank 0 leaves a block after all of its messages: the other one is through, and meets it in the next."""
    texts = messenger(None, "test")
    if rank == 0:
        with pytest.raises(Broken), texts.together("the first block"):
            texts.largest([rank])
            raise Broken
    else:
        with texts.together("the first block"):
            texts.largest([rank])
        _hears(texts)
    with texts.together("the second block"):
        return texts.largest([rank])


def _is_a_block_behind(rank: int) -> list[int]:
    """Rank 0 leaves the block after the one that rank 1 begins, in which it has nothing left to do."""
    texts = messenger(None, "test")
    with texts.together("the first block"):
        texts.largest([rank])
    if rank == 1:
        _hears(texts)
    with texts.together("the second block"):
        pass
    with pytest.raises(PeerFailed if rank else Broken), texts.together("the third block"):
        raise Broken
    with texts.together("the fourth block"):
        return texts.largest([rank])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case", [_comes_after_it_failed, _was_through, _is_a_block_behind], ids=lambda one: one.__name__
)
def test_all_ranks_raise_in_the_block_that_one_of_them_left(case: Callable[[int], list[int]]) -> None:
    assert pool(2).run(case, timeout=30) == [[1], [1]]


def _waits_for_the_one_that_comes_late(rank: int) -> list[int]:
    """Rank 2 waits for rank 1, which only begins what rank 0 left: rank 0 had sent all that rank 2 waits for."""
    texts = messenger(None, "test")
    with texts.together("the first block"):
        texts.largest([rank])
    with pytest.raises(Broken if rank == 0 else PeerFailed), texts.together("the second block"):
        if rank == 0:
            raise Broken
        texts.collect(b"")
    with texts.together("the third block"):
        return texts.largest([rank])


@pytest.mark.slow
def test_three_ranks_raise() -> None:
    assert pool(3).run(_waits_for_the_one_that_comes_late, timeout=30) == [[2]] * 3
