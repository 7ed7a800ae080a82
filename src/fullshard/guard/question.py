"""Questions to the ranks of a mesh about what is long when it is told in full."""

from __future__ import annotations

import hashlib

from .errors import RanksDisagree
from .scope import Scope
from .structure import shown_ranks, variants


def ask(scope: Scope, what: str, text: str) -> dict[int, str] | None:
    """Whether all ranks of `scope` have the same `text`: None, or else a digest of what each rank has.

    All of them make this call. `RanksDisagree` on all where some are at another question.
    """
    answer = scope.agree(what, hashlib.blake2s(text.encode(), digest_size=16).hexdigest())
    if answer is None or not any(": " in told for told in answer.values()):
        return answer
    _refuse_by_its_own_words(scope, answer)
    questions = variants({rank: told.rpartition(": ")[0] for rank, told in answer.items()})
    found = ", ".join(f"{shown_ranks(ranks)} at {question}" for question, ranks in questions.items())
    raise RanksDisagree(
        f"expected all ranks to come to the same places in the same order, found {found}; make the same calls with the "
        f"same arguments and settings (FULLSHARD_GUARD) on all ranks",
        what=what,
        by_rank=answer,
    )


def _refuse_by_its_own_words(scope: Scope, answer: dict[int, str]) -> None:
    """Raise `RanksDisagree` where some ranks are at a question that explains itself."""
    for asked, explain in scope.explained_by.items():
        asking = [rank for rank, told in answer.items() if told.startswith(f"{asked}: ")]
        others = [rank for rank in answer if rank not in asking]
        if asking and others:
            text = explain(answer[asking[0]].removeprefix(f"{asked}: "), asking, others[0])
            raise RanksDisagree(text, what=asked, by_rank=answer)


def tell(scope: Scope, what: str, text: str) -> dict[int, str]:
    """The texts of all ranks of `scope`, which came to this call by the same answer of `ask`."""
    answer = scope.agree(what, text)
    return dict.fromkeys(scope.ranks, text) if answer is None else answer
