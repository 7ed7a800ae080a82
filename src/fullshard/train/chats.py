"""Conversations as the chat template of a tokenizer writes them, and which of their tokens are an assistant's.

```
{"messages": [{"role": "user", "content": ..}, {"role": "assistant", "content": ..}, ..]} -> text -> tokens, mask
template with {% generation %}: the mask of transformers
without: of each assistant's message what the template adds for it after its generation prompt
```
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fullshard.keys import ConfigError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a line of a corpus, and where that is: "line 3 of FILE"."""

    where: str
    messages: tuple[dict[str, Any], ...]


def conversation_of(value: Any, where: str) -> Conversation:
    """The conversation that is under the key of a line. Raises `ConfigError` for what is none."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: expected a list of messages, found {_kind(value)}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = f"the keys {', '.join(message) or 'none'}" if isinstance(message, dict) else _kind(message)
            raise ConfigError(f'{where}: message {number}: expected an object with "role" and "content", found {found}')
    return Conversation(where, tuple(value))


def chat_tokens(tokenizer: Any, chat: Conversation, assistant_only: bool) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation by the chat template of a tokenizer of transformers, and whether each has a loss:
    all, or those of the assistant.

    Raises `ConfigError` where there is no template, it raises, or it does not tell what an assistant's message is.
    """
    if tokenizer.chat_template is None:
        raise ConfigError("data.messages_key: expected a chat_template of the tokenizer, found none; add one to it")
    messages = list(chat.messages)
    if assistant_only and not tokenizer.is_fast:
        raise ConfigError(f'data.loss_on = "assistant": needs a fast tokenizer, found {type(tokenizer).__name__}')
    try:
        if assistant_only and GENERATION.search(tokenizer.get_chat_template()):
            found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            return list(found["input_ids"]), [bool(counts) for counts in found["assistant_masks"]]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=assistant_only)
        tokens = list(found["input_ids"])
        if not assistant_only:
            return tokens, [True] * len(tokens)
        spans = _assistant_spans(tokenizer, chat, text)
    except ConfigError:
        raise
    except Exception as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{chat.where}: the chat template cannot write it: {line}") from None
    places = found["offset_mapping"]
    return tokens, [any(begin < last and first < end for first, last in spans) for begin, end in places]


def _assistant_spans(tokenizer: Any, chat: Conversation, text: str) -> list[tuple[int, int]]:
    """Where the assistant's messages are in the text of all, by the texts of the messages before, and with each."""
    spans = []
    for number, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(list(chat.messages[:number]), tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(list(chat.messages[: number + 1]), tokenize=False)
        if not (text.startswith(after) and after.startswith(before)):
            raise ConfigError(
                f'{chat.where}: data.loss_on = "assistant": expected a chat template that writes message {number + 1} '
                "the same whatever follows, found another text; put {% generation %} into the template, or have "
                'data.loss_on = "all"'
            )
        spans.append((len(before), len(after)))
    return spans


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else type(value).__name__
