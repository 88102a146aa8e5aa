"""A tenant's request on its way in: what it may not choose is taken out, its cache salt is put in.

A client never chooses the namespace its prompts are cached in: whatever it gives as a salt is combined with
the tenant into one that only the router can make. Bytes that are not touched stay as they came; a request
that brings salts of its own is written anew, so that no engine can find a second one in it.
"""

import json
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from router.proxy.crowded_body import Parser
from router.proxy.form_fields import content_types, is_form, set_in_form
from router.proxy.request_head import RequestHead
from router.proxy.router_error import BODY_UNREADABLE, SALT_IN_FORM, RouterError
from router.proxy.tenancy import Caller
from router.routing.flat_request import whole_request

SALT_FIELDS = ("cache_salt", "extra_key")
"""vLLM, SGLang and our replica take the first; SGLang puts the second behind it."""
CONTAINERS = ("extra_body", "nvext", "vllm_xargs")
"""Objects in which gateways and engines pass fields on that are not OpenAI's."""
UPLOADS = (b"/v1/audio/", b"/v1/files", b"/v1/images/")
"""What comes here as a form has no place for a salt: engines read none there."""
ADAPTERS = "lora_path"
"""SGLang answers with these, one for each prompt, whatever the model's name says."""
SALT_HEADERS = frozenset({b"cache-salt", b"cache_salt", b"x-cache-salt", b"x-warmroute-tenant"})
"""No engine we know reads them; none ever shall."""


def without_salts(lines: list[bytes]) -> list[bytes]:
    """Header ``lines`` as a replica may get them."""
    return [line for line in lines if line[: line.find(b":")].lower() not in SALT_HEADERS]


def without_salt(body: bytes, salt_bytes: int) -> bytes:
    """A body that was taken in, for replicas that take no salt."""
    return body[: len(body) - salt_bytes] + b"}" if salt_bytes and body else body


class TakenIn(NamedTuple):
    """A request that may go on."""

    body: bytes
    """As replicas get it."""
    request: dict[str, Any] | None
    """What is in it, with the salt; ``None`` if it is no JSON."""
    salt_bytes: int = 0
    """At the body's end; without them, closed by a brace, it is what replicas get that take no salt."""


def take_in(
    caller: Caller, head: RequestHead | None, body: bytes, parse: Parser = whole_request
) -> TakenIn | RouterError:
    """The request as the tenant's, or why it is refused. Without a ``head`` it is no upload.

    Refused is what the router cannot read and an engine might: its salt could not be known.
    """
    if not body:
        return TakenIn(body, None)
    request = parse(body)
    if request is None:
        if head is None or not _is_upload(head):
            return BODY_UNREADABLE
        field = set_in_form(content_types(head), body, _SALTED)
        if field is not None:
            return replace(SALT_IN_FORM, param=field or None)
        return caller.model_refusal(None) or TakenIn(body, None)
    refusal = _model_refusal(caller, request)
    if refusal is not None:
        return refusal
    own = None
    if not _SALTED.isdisjoint(request):
        own = _own_salt(request)
        whole = request if parse is whole_request else whole_request(body)
        if whole is None:
            return BODY_UNREADABLE
        try:
            body = _without_salts(whole)
        except orjson.JSONEncodeError:  # it is nested too deeply
            return BODY_UNREADABLE
    salt = request["cache_salt"] = caller.salt(own)
    end = body.rfind(b"}")
    comma = (
        b"," if len(request) > 1 or parse is not whole_request else b""
    )  # that has many values, if not here
    added = b'%b"cache_salt":"%b"}' % (comma, salt.encode())
    return TakenIn(body[:end] + added, request, len(added))


_SALTED = frozenset((*SALT_FIELDS, *CONTAINERS))


def _model_refusal(caller: Caller, request: dict[str, Any]) -> RouterError | None:
    """Why the tenant may not have what answers ``request``: its model, or SGLang's adapters of that."""
    model = request.get("model")
    refusal = caller.model_refusal(model if type(model) is str else None)
    adapters = request.get(ADAPTERS)
    if refusal is not None or not adapters:
        return refusal
    for one in adapters if type(adapters) is list else (adapters,):
        refusal = None if one is None else caller.model_refusal(one if type(one) is str else None)
        if refusal is not None:
            return replace(refusal, param=ADAPTERS)
    return None


def _own_salt(request: dict[str, Any]) -> str | None:
    """What the client asks to be kept apart by, in one text."""
    own = {field: request.pop(field) for field in SALT_FIELDS if field in request}
    own = {field: value for field, value in own.items() if value is not None and value != ""}
    return json.dumps(own, sort_keys=True) if own else None


def _without_salts(request: dict[str, Any]) -> bytes:
    """``request`` as it is without them, every name once; whole numbers of over 64 bits became floats.

    Cost: O(bytes), 4 ns each: all other clients wait for it.
    """
    for field in SALT_FIELDS:
        request.pop(field, None)
    for name in CONTAINERS:
        container = request.get(name)
        if type(container) is dict:
            for field in SALT_FIELDS:
                container.pop(field, None)
    return orjson.dumps(request)


def _is_upload(head: RequestHead) -> bool:
    return head.path.startswith(UPLOADS) and is_form(content_types(head))
