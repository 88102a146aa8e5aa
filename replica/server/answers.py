"""Deltas to OpenAI's JSON: whole answers and stream chunks, for chat and for completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from replica.model.sampling import Drawn
from replica.model.tokenizer import Tokenizer
from replica.request import Delta

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class Choice:
    """One sequence's reply so far."""

    text: str = ""
    tokens: list[Drawn] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def take(self, delta: Delta) -> None:
        """Add a delta."""
        self.text += delta.text
        self.tokens += visible_tokens(delta)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.output_tokens = delta.output_tokens


def visible_tokens(delta: Delta) -> tuple[Drawn, ...]:
    """The delta's tokens without the one that ended the reply and is no part of its text."""
    ended_by_token = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
    return delta.tokens[:-1] if ended_by_token else delta.tokens


def usage(choices: Sequence[Choice], choices_per_prompt: int) -> dict[str, Any]:
    """Token counts; a prompt with several choices counts once, with the fewest cached tokens any saw."""
    groups = [choices[at : at + choices_per_prompt] for at in range(0, len(choices), choices_per_prompt)]
    prompt_tokens = sum(group[0].prompt_tokens for group in groups)
    output_tokens = sum(choice.output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(min(choice.cached_tokens for choice in group) for group in groups)
        },
    }


class AnswerForm:
    """What chat and completions have in common; ``created`` and the id are the same in every chunk."""

    whole_object = ""
    chunk_object = ""

    def __init__(self, answer_id: str, model: str, tokenizer: Tokenizer, logprobs: int | None) -> None:
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any]) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        listed = [self.whole_choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "object": self.whole_object, "choices": listed, "usage": counts}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks that come before a choice's first text."""
        raise NotImplementedError

    def delta(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """The chunk of one delta; ``offset``: characters of the choice's text before it."""
        raise NotImplementedError

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """One choice of a whole answer."""
        raise NotImplementedError


class ChatAnswer(AnswerForm):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The role, before any content."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def delta(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """Content, and the finish reason in the last one."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._content_logprobs(visible_tokens(delta)),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return self.chunk([choice])

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """The assistant's message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._content_logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _content_logprobs(self, tokens: Sequence[Drawn]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._entry(drawn.token, drawn.logprob),
                    "top_logprobs": [self._entry(one.token, one.logprob) for one in drawn.top],
                }
                for drawn in tokens
            ]
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionAnswer(AnswerForm):
    """/v1/completions; ``echoes`` is per choice the text put before its reply (echo: true)."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        logprobs: int | None,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(answer_id, model, tokenizer, logprobs)
        self._echoes = echoes

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The prompt, if it is to be echoed."""
        if not self._echoes:
            return []
        choice = {"index": index, "text": self._echoes[index], "logprobs": None, "finish_reason": None}
        return [self.chunk([choice])]

    def delta(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """Text, and the finish reason in the last one."""
        return self.chunk(
            [
                {
                    "index": index,
                    "text": delta.text,
                    "logprobs": self._token_logprobs(visible_tokens(delta), offset),
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                }
            ]
        )

    def whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """The text."""
        return {
            "index": index,
            "text": (self._echoes[index] if self._echoes else "") + choice.text,
            "logprobs": self._token_logprobs(choice.tokens, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _token_logprobs(self, tokens: Sequence[Drawn], offset: int) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        texts = [self._tokenizer.token_text(drawn.token) for drawn in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(drawn.logprob) for drawn in tokens],
            "tokens": texts,
            "top_logprobs": [self._top(drawn) for drawn in tokens] if self._logprobs else None,
        }

    def _top(self, drawn: Drawn) -> dict[str, float]:
        listed = {self._tokenizer.token_text(one.token): _finite(one.logprob) for one in drawn.top}
        listed.setdefault(self._tokenizer.token_text(drawn.token), _finite(drawn.logprob))
        return listed


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
