"""Bodies of a request in two steps: the prompt alone for a prefill replica; the whole, with its KV's source.

The shapes are vLLM's (its disaggregated serving examples and the NIXL connector): the first step asks for one
token with ``kv_transfer_params.do_remote_decode``, its answer's ``kv_transfer_params`` go into the second.
Replicas of ours need neither: they are told by the header ``x-warmroute-kv-source``.
"""

from typing import Any

import orjson

SPLIT_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
_REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_THE_REPLY = (
    "best_of",
    "echo",
    "logprobs",
    "min_tokens",
    "prompt_logprobs",
    "stream_options",
    "top_logprobs",
)
"""What speaks of the reply, and may not fit one of one token."""


def splittable(body: bytes) -> bool:
    """The prompt in ``body`` can be computed apart: there is one, and the request does not itself say how.

    >>> splittable(b'{"prompt": "a", "n": 2}'), splittable(b'{"prompt": ["a", "b"]}'), splittable(b"[]")
    (True, False, False)
    """
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(request, dict) or "kv_transfer_params" in request or request.get("use_beam_search"):
        return False
    prompt = request.get("prompt")
    # Of several prompts each would need its own transfer.
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)


def prefill_body(body: bytes, *, kv_params: bool) -> bytes:
    """The first step's: the same prompt, one token, not streamed. ``kv_params``: with vLLM's parameters.

    >>> prefill_body(b'{"prompt": "a", "max_tokens": 50, "stream": true, "min_tokens": 9}', kv_params=False)
    b'{"prompt":"a","max_tokens":1,"stream":false,"n":1}'
    """
    request: dict[str, Any] = orjson.loads(body)
    asked = {key: value for key, value in request.items() if key not in _OF_THE_REPLY}
    asked |= {"max_tokens": 1, "stream": False, "n": 1}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    if kv_params:
        asked["kv_transfer_params"] = _REMOTE_DECODE
    return orjson.dumps(asked)


def transfer_params(answer: bytes) -> bytes | None:
    """What the first step's answer says of where its KV lies, as JSON; None: nothing.

    >>> transfer_params(b'{"choices": [], "kv_transfer_params": {"remote_port": 7}}'), transfer_params(b"{")
    (b'{"remote_port":7}', None)
    """
    try:
        found = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    params = found.get("kv_transfer_params") if isinstance(found, dict) else None
    return orjson.dumps(params) if isinstance(params, dict) and params else None


def with_transfer_params(body: bytes, params: bytes) -> bytes:
    """The second step's body: ``body``, a JSON object, byte for byte, with one field more.

    >>> with_transfer_params(b'{"n": 1.0 } ', b'{"a":1}'), with_transfer_params(b"{}", b"{}")
    (b'{"n": 1.0 ,"kv_transfer_params":{"a":1}}', b'{"kv_transfer_params":{}}')
    """
    inside = body.rstrip()[:-1]
    comma = b"" if inside.rstrip()[-1:] == b"{" else b","
    return b'%b%b"kv_transfer_params":%b}' % (inside, comma, params)
