"""What a request asks for besides its prompt: sampling, limits, stops, streaming; and its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replica.kv_cache.tier_transport import PeerOffer
from replica.model.sampling import Sampling, StopRule
from replica.request import Request
from replica.server.client_error import ClientError
from replica.server.fields import MOST_SHOWN, Fields
from replica.server.prompts import Prompt
from replica.server.salt_rule import SaltRule

DEFAULT_COMPLETION_TOKENS = 16
UNSUPPORTED = {
    "prompt_logprobs": "log-probabilities are computed for generated tokens only: use logprobs",
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "ask for the form in the prompt",
    ),
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
    "truncate_prompt_tokens": "shorten the prompt",
    "prompt_embeds": "give the prompt as text or token ids",
    "chat_template": "this replica uses the model's own",
    "chat_template_kwargs": "this replica gives the model's template no values but messages and tools",
    "documents": "put their text into a message",
    "functions": "use tools",
}
"""Fields that would change the answer, and what to do without them."""
MOST_CHOICES = 64
MOST_LOGPROBS = 20
MOST_STOP_STRINGS = 16
MOST_DIGITS = 10
"""Of a token id; Python refuses to read thousands of them."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A request's settings, checked."""

    sampling: Sampling
    stops: StopRule
    max_tokens: int | None
    """``None``: as many as fit, ``unasked_tokens`` at most."""
    unasked_tokens: int | None
    choices: int
    stream: bool
    stream_usage: bool
    skip_special_tokens: bool
    priority: int
    salt: str | None


def chat_settings(body: Fields, end_ids: frozenset[int], vocab: int, salts: SaltRule) -> Settings:
    """The settings of a chat request.

    Raises:
        ClientError: which field is wrong, and what was expected.
    """
    wanted, alternatives = body.boolean("logprobs", False), body.integer("top_logprobs", 0, MOST_LOGPROBS)
    if alternatives and not wanted:
        raise ClientError("top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (alternatives or 0) if wanted else None
    max_tokens = body.integer("max_completion_tokens", 1) or body.integer("max_tokens", 1)
    return _settings(body, end_ids, vocab, salts, logprobs, max_tokens)


def completion_settings(body: Fields, end_ids: frozenset[int], vocab: int, salts: SaltRule) -> Settings:
    """The settings of a completion request.

    Raises:
        ClientError: which field is wrong, and what was expected.
    """
    logprobs = body.integer("logprobs", 0, MOST_LOGPROBS)
    if body.boolean("echo", False) and logprobs is not None:
        raise ClientError(
            "echo with logprobs is not supported: prompt log-probabilities are not computed", param="logprobs"
        )
    if body.given("suffix"):
        raise ClientError("suffix is not supported; put all text into prompt", param="suffix")
    settings = _settings(
        body, end_ids, vocab, salts, logprobs, body.integer("max_tokens", 1), DEFAULT_COMPLETION_TOKENS
    )
    best_of = body.integer("best_of", 1, MOST_CHOICES)
    if best_of is not None and best_of != settings.choices:
        raise ClientError("best_of other than n is not supported; ask for n choices", param="best_of")
    return settings


def sequences_of(
    prompts: Sequence[Prompt],
    settings: Settings,
    request_id: str,
    max_model_len: int,
    source: PeerOffer | None = None,
) -> list[Request]:
    """One engine request per prompt and choice, prompts first: choice c of prompt p is ``p * n + c``.

    ``source``: another replica that has KV of the prompt.

    Raises:
        ClientError: prompt and output do not fit in the context.
    """
    requests: list[Request] = []
    for prompt in prompts:
        room = max_model_len - len(prompt.tokens)
        max_tokens = settings.max_tokens
        if max_tokens is None:
            max_tokens = min(room, settings.unasked_tokens or room)
        if max_tokens > room:
            raise ClientError(
                f"This model's maximum context length is {max_model_len} tokens. However, you requested "
                f"{len(prompt.tokens) + max_tokens} tokens ({len(prompt.tokens)} in the prompt, {max_tokens} "
                "in the completion). Please reduce the length of the prompt or max_tokens.",
                param="max_tokens",
            )
        for choice in range(settings.choices):
            sampling = settings.sampling
            if sampling.seed is not None and choice:
                sampling = replace(sampling, seed=sampling.seed + choice)
            requests.append(
                Request(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt=prompt.tokens,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stops=settings.stops,
                    skip_special_tokens=settings.skip_special_tokens,
                    priority=settings.priority,
                    salt=settings.salt,
                    source=source,
                )
            )
    return requests


def _settings(
    body: Fields,
    end_ids: frozenset[int],
    vocab: int,
    salts: SaltRule,
    logprobs: int | None,
    max_tokens: int | None,
    unasked_tokens: int | None = None,
) -> Settings:
    _refuse_unsupported(body)
    stream = body.boolean("stream", False)
    options = body.table("stream_options")
    if options is not None and not stream:
        raise ClientError("stream_options needs stream: true", param="stream_options")
    top_k = body.integer("top_k", -1)
    sampling = Sampling(
        temperature=body.number("temperature", 1.0, 0.0, 100.0),
        top_p=body.number("top_p", 1.0, 0.0, 1.0),
        top_k=top_k if top_k is not None and top_k > 0 else None,
        min_p=body.number("min_p", 0.0, 0.0, 1.0),
        seed=body.integer("seed", -(2**63), 2**63 - 1),
        presence_penalty=body.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=body.number("repetition_penalty", 1.0, 1e-3, 100.0),
        logit_bias=_logit_bias(body, vocab),
        logprobs=logprobs,
    )
    stop_ids = body.integers("stop_token_ids")
    for token in stop_ids:
        if not 0 <= token < vocab:
            raise ClientError(f"stop_token_ids: {token} is not a token id", param="stop_token_ids")
    min_tokens = body.integer("min_tokens", 0) or 0
    most = max_tokens or unasked_tokens
    if most is not None and min_tokens > most:
        raise ClientError(
            f"min_tokens {min_tokens} is more than max_tokens {most}; lower it", param="min_tokens"
        )
    return Settings(
        sampling=sampling,
        stops=StopRule(
            end_ids=frozenset() if body.boolean("ignore_eos", False) else end_ids,
            stop_ids=frozenset(stop_ids),
            stop_strings=_stop_strings(body),
            include_stop=body.boolean("include_stop_str_in_output", False),
            min_tokens=min_tokens,
        ),
        max_tokens=max_tokens,
        unasked_tokens=unasked_tokens,
        choices=body.integer("n", 1, MOST_CHOICES) or 1,
        stream=stream,
        stream_usage=options.boolean("include_usage", False) if options is not None else False,
        skip_special_tokens=body.boolean("skip_special_tokens", True),
        priority=body.integer("priority", -(2**31), 2**31 - 1) or 0,
        salt=salts.salt(body),
    )


def _refuse_unsupported(body: Fields) -> None:
    """Settings that would change the answer if they were silently dropped."""
    layout = body.table("response_format")
    if layout is not None and layout.text("type") not in (None, "text"):
        raise ClientError(
            f"response_format: type {layout.text('type')!r} is not supported, only 'text'; "
            "ask for the format in the prompt",
            param="response_format",
        )
    for name, instead in UNSUPPORTED.items():
        if body.given(name) not in (None, [], {}):
            raise ClientError(f"{name} is not supported; {instead}", param=name)
    if body.boolean("use_beam_search", False):
        raise ClientError("use_beam_search is not supported; leave it out", param="use_beam_search")


def _stop_strings(body: Fields) -> tuple[str, ...]:
    stop = body.given("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise body.wrong("stop", "a non-empty string or a list of them")
    if len(stops) > MOST_STOP_STRINGS:
        raise ClientError(f"stop: {len(stops)} strings, at most {MOST_STOP_STRINGS}", param="stop")
    return tuple(stops)


def _logit_bias(body: Fields, vocab: int) -> tuple[tuple[int, float], ...]:
    table = body.table("logit_bias")
    if table is None:
        return ()
    biases = []
    for key in table.values:
        if not (key.isascii() and key.isdecimal() and len(key) <= MOST_DIGITS) or int(key) >= vocab:
            shown = key if len(key) <= MOST_SHOWN else key[:MOST_SHOWN] + "..."
            raise ClientError(
                f"logit_bias: {shown!r} is not a token id below {vocab}", param=f"logit_bias.{shown}"
            )
        biases.append((int(key), table.number(key, 0.0, -100.0, 100.0)))
    return tuple(biases)
