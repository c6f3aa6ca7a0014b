"""Chat and prompt/completion samples to token ids, with the loss on the answers only.

Two ways to find the answers, by what the tokenizer's chat template offers:

* a template with {% generation %} says itself which tokens are answers (`return_assistant_tokens_mask`);
* for any other, the conversation is rendered up to before and up to after each answer. Both must be prefixes of the whole
  rendering. Templates that render a turn differently once others follow (Qwen3 drops earlier reasoning) fail that; there a
  marker in place of the answer's content shows where the content stands, provided that all around it stays the same. Where
  that fails as well the answer's place would be a guess, and the sample is refused.

The end-of-turn token of an answer is always in the loss: without it a model never learns to stop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from bigtrain.errors import DataError

IGNORE = -100  # the label that torch's cross entropy and every transformers model leave out of the loss
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWERERS = ("assistant", "gpt", "bot", "chatbot", "model", "ai")  # as other formats and models call it
_PROBE = "zqxprobezqx"

Message = dict[str, Any]
Encoded = tuple[list[int], list[int]]  # ids and labels, equally long, not shifted


def clean_messages(raw: Any, sample: int) -> list[Message]:
    """Checks one `messages` value and drops the None fields that Arrow adds to make all rows alike.

    Raises:
        DataError: not a non-empty list of {"role": ..., "content": ...}.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or len(raw) == 0:
        raise DataError(f"sample {sample}: messages must be a non-empty list of role and content, not {raw!r:.200}")
    messages = []
    for place, entry in enumerate(raw):
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            sharegpt = isinstance(entry, dict) and {"from", "value"} <= entry.keys()
            how = "; rename 'from' to 'role' (human: user, gpt: assistant) and 'value' to 'content'" if sharegpt else ""
            raise DataError(f"sample {sample}: message {place} needs a 'role', got {entry!r:.200}{how}")
        message = {key: value for key, value in entry.items() if value is not None}
        if not message.keys() & {"content", "tool_calls"}:
            raise DataError(f"sample {sample}: message {place} ({message['role']}) has no 'content'")
        content = message.get("content", "")
        if not isinstance(content, str | list):
            raise DataError(
                f"sample {sample}: the content of message {place} ({message['role']}) is {type(content).__name__} ({content!r:.80}), "
                "not a string"
            )
        messages.append(message)
    _refuse_other_names(messages, sample)
    return messages


def _refuse_other_names(messages: list[Message], sample: int) -> None:
    """Answers under another name than 'assistant' would be context, and not learned.

    Raises:
        DataError: with the name.
    """
    for place, message in enumerate(messages):
        if message["role"] != "assistant" and message["role"].strip().lower() in _ANSWERERS:
            raise DataError(
                f"sample {sample}: message {place} has the role {message['role']!r}: answers, which the loss is on, have the role "
                "'assistant'; rename it in the data"
            )


class ChatEncoder:
    """Encodes conversations with one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template and an end token.

    Raises:
        DataError: it has no chat template, or neither marks answers nor reports character offsets.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the data is chat (column 'messages') but the tokenizer has no chat template: use an instruct model's "
                "tokenizer, set tokenizer.chat_template, or render the text yourself into a 'text' column"
            )
        self.tokenizer = tokenizer
        self._spoken: set[str] = set()  # roles, and "tools", that the template is known to write
        self.marks_answers = bool(_GENERATION.search(tokenizer.get_chat_template()))
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer and reports no character offsets, so the answers of a chat "
                "cannot be found in its tokens; load the fast one (use_fast=True)"
            )

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Id -> text of the tokens that the tokenizer holds as special."""
        added = {i: t.content for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        return added | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens))

    @cached_property
    def _behind(self) -> tuple[int | None, str]:
        """What the template writes after an answer: the special token that ends it, or else the text that opens the user's turn."""
        user, tokenizer = _PROBE[::-1], self.tokenizer
        probe = [{"role": "user", "content": user}, {"role": "assistant", "content": _PROBE}]
        try:
            head, _, rest = self._render(probe, None).partition(user)
            marked = self._marked(probe, None) if self.marks_answers else ([], [])
        except Exception:  # a template may demand more of a conversation than the probe has; the end token remains
            return None, ""
        if declared := [token for token, keep in zip(*marked) if keep and token in self.special_tokens]:
            return declared[-1], ""
        between, _, tail = rest.rpartition(_PROBE)
        tokens = tokenizer(tail, add_special_tokens=False)["input_ids"]
        token = next((token for token in tokens if token in self.special_tokens), None)
        if token is None or token == tokenizer.eos_token_id:
            return token, ""
        opening = tail[max(0, tail.find(self.special_tokens[token])) :].strip()
        opens = head.rstrip().endswith(opening) and not between.rstrip().endswith(opening)
        return (None, opening) if opens else (token, "")

    @cached_property
    def turn_end(self) -> int | None:
        """Id that a model learns to end an answer with: the special token that the template writes after one, else the end token.

        What opens the user's turn is no end of the answer, even where the template writes it at once.
        """
        return self.tokenizer.eos_token_id if self._behind[0] is None else self._behind[0]

    @cached_property
    def turn_ends(self) -> frozenset[int]:
        """Ids that end an answer: the end token, and the special token that the template writes after an answer."""
        return frozenset({self.tokenizer.eos_token_id, self.turn_end} - {None})

    def _render(self, messages: list[Message], tools: Any, prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)

    def encode(self, messages: list[Message], sample: int, *, tools: Any = None, first_answer: int = 0) -> Encoded:
        """Token ids and labels of one conversation.

        Args:
            messages: as `clean_messages` returns them.
            sample: index, for messages.
            tools: handed to the template.
            first_answer: answers among the messages before this index are context, not targets.

        Raises:
            DataError: the template refuses the conversation, or the place of an answer cannot be known.
        """
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_answer]
        try:
            if self.marks_answers and first_answer == 0:
                ids, labels = self._by_template(messages, tools, bool(answers), sample)
            else:
                ids, labels = self._by_prefixes(messages, tools, answers, sample)
        except DataError:
            raise
        except Exception as error:
            roles = [m["role"] for m in messages]
            raise DataError(
                f"sample {sample}: the chat template refuses this conversation (roles {roles}): {type(error).__name__}: {error}"
            ) from error
        self._refuse_unspeakable(messages, tools, sample)
        self._refuse_unspoken(messages, tools, sample)
        if answers and answers[-1] == len(messages) - 1:
            self._end(ids, labels)
        return ids, labels

    def _refuse_unspeakable(self, messages: list[Message], tools: Any, sample: int) -> None:
        """Templates for text alone print a list of content parts as Python does, and leave tool calls out.

        Raises:
            DataError: with what would be learned instead.
        """
        listed = [m["content"] for m in messages if not isinstance(m.get("content", ""), str)]
        called = any(m["role"] == "assistant" and m.get("tool_calls") for m in messages)
        text = self._render(messages, tools) if listed or called else ""
        if printed := [content for content in listed if str(content) in text]:
            raise DataError(
                f"sample {sample}: the chat template prints the content {printed[0]!r:.200} as it stands: it takes text alone. "
                "Make each content a string"
            )
        if called and text == self._without_calls(messages, tools):
            raise DataError(
                f"sample {sample}: the chat template leaves out tool calls, so that an answer that is one would be learned as "
                "an empty one. Use a tokenizer whose template has them, or write them into the content"
            )

    def _refuse_unspoken(self, messages: list[Message], tools: Any, sample: int) -> None:
        """Templates write the roles that they know, and many pass over any other without a word. Each role is tried once.

        Raises:
            DataError: with the role whose messages would be left out, or that the tools would be.
        """
        for place, message in enumerate(messages):
            role, content = message["role"], message.get("content")
            if role in self._spoken or not isinstance(content, str) or not content.strip():
                continue
            marked = [*messages]
            marked[place] = message | {"content": _PROBE}
            if (text := self._tried(marked, tools)) is not None and _PROBE not in text:
                raise DataError(
                    f"sample {sample}: the chat template leaves out message {place}, whose role is {role!r}: rename the role in the "
                    "data, remove such messages, or use a tokenizer whose template has it"
                )
            self._spoken.add(role)
        if tools and "tools" not in self._spoken:
            if self._tried(messages, tools) == self._tried(messages, None):
                raise DataError(
                    f"sample {sample}: the chat template leaves out the tools: remove the column 'tools', or use a tokenizer whose "
                    "template has them"
                )
            self._spoken.add("tools")

    def _tried(self, messages: list[Message], tools: Any) -> str | None:
        """The rendering; None where the template refuses it."""
        try:
            return self._render(messages, tools)
        except Exception:
            return None

    def _without_calls(self, messages: list[Message], tools: Any) -> str | None:
        """The conversation without its tool calls; None where the template refuses that, so that it looks at them."""
        return self._tried([{"content": "", **{k: v for k, v in m.items() if k != "tool_calls"}} for m in messages], tools)

    def _marked(self, messages: list[Message], tools: Any) -> tuple[list[int], list[int]]:
        """Ids, and 1 for each that the template marks as an answer's."""
        out = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(out["input_ids"]), list(out["assistant_masks"])

    def _by_template(self, messages: list[Message], tools: Any, has_answer: bool, sample: int) -> Encoded:
        ids, mask = self._marked(messages, tools)
        if has_answer and not any(mask):
            raise DataError(
                f"sample {sample}: the chat template has {{% generation %}} but marks no token of this conversation as "
                "answer; put {% generation %} around the assistant's content in the template"
            )
        for i in range(1, len(ids)):  # many templates close the block before the end-of-turn token
            if mask[i - 1] and not mask[i] and ids[i] in self.turn_ends and ids[i - 1] not in self.turn_ends:
                mask[i] = 1
        return ids, [token if keep else IGNORE for token, keep in zip(ids, mask)]

    def _by_prefixes(self, messages: list[Message], tools: Any, answers: list[int], sample: int) -> Encoded:
        text = self._render(messages, tools)
        return encode_spans(self.tokenizer, text, [self._span(text, messages, tools, i, sample) for i in answers])

    def _span(self, text: str, messages: list[Message], tools: Any, answer: int, sample: int) -> tuple[int, int]:
        """Characters [start, end) of one answer with its end-of-turn token in the whole rendering."""
        if answer == 0:
            raise DataError(
                f"sample {sample}: the conversation begins with an answer, and the chat template does not mark answers: "
                "put a user message before it or add {% generation %} to the template"
            )
        before = self._render(messages[:answer], tools, prompt=True)
        after = self._render(messages[: answer + 1], tools)
        if not after.startswith(before) or not text.startswith(after):
            return self._span_of_content(text, messages, tools, answer, sample)
        stripped = after.rstrip()
        if (opening := self._behind[1]) and stripped.endswith(opening):
            after = stripped.removesuffix(opening)
        elif stripped.endswith(tuple(self.special_tokens.values())):
            after = stripped  # the line break after an end-of-turn token belongs to the next turn
        return len(before), len(after)

    def _span_of_content(self, text: str, messages: list[Message], tools: Any, answer: int, sample: int) -> tuple[int, int]:
        """Characters of an answer's content and the turn end behind it, for templates that look ahead.

        Raises:
            DataError: what stands around the content depends on it, so its place is not certain.
        """
        content = messages[answer].get("content")
        marked = [*messages]
        marked[answer] = messages[answer] | {"content": _PROBE}
        around = self._render(marked, tools).split(_PROBE)
        start, end = len(around[0]), len(text) - len(around[-1])
        certain = (
            isinstance(content, str)
            and bool(content.strip())
            and len(around) == 2
            and text.startswith(around[0])
            and text.endswith(around[1])
            and text[start:end].strip() == content.strip()
        )
        if not certain:
            raise DataError(
                f"sample {sample}: message {answer}: the chat template renders earlier messages differently once later ones "
                "follow, so the tokens of the answer cannot be told from the prompt. Add {% generation %} to the template, "
                "or split the conversation into one sample per answer"
            )
        ends = [self.special_tokens[token] for token in self.turn_ends if token in self.special_tokens]
        behind = len(text) - len(text[end:].lstrip())
        return start, next((behind + len(mark) for mark in ends if text.startswith(mark, behind)), end)

    def _end(self, ids: list[int], labels: list[int]) -> None:
        """Appends the end token, in the loss, when the template closed the last answer without any; a user's turn opened there goes."""
        last = next((token for token in reversed(labels) if token != IGNORE), None)
        if last in self.turn_ends:
            return
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError("neither the chat template nor the tokenizer has an end token; set tokenizer.eos_token")
        if opening := self._behind[1]:
            mark = self.tokenizer(opening, add_special_tokens=False)["input_ids"][0]
            begin = len(ids) - 1 - ids[::-1].index(mark) if mark in ids else len(ids)
            if self.tokenizer.decode(ids[begin:]).strip() == opening:
                del ids[begin:], labels[begin:]
        ids.append(eos)
        labels.append(eos)


def encode_spans(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, special: bool = False) -> Encoded:
    """Tokens of `text`; labels where a token shares a character with one of the [start, end) spans, else -100."""
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = list(out["input_ids"])
    labels = [IGNORE] * len(ids)
    for place, (start, end) in enumerate(out["offset_mapping"]):
        if any(start < stop and end > begin for begin, stop in spans):
            labels[place] = ids[place]
    return ids, labels
