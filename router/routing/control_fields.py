"""Fields of a request that steer the engine or its peers rather than ask for an answer.

Engines read them from the request's body because their own orchestrators put them there: where KV is pulled
from, which rank computes, who goes first. Clients may set none of them unless the operator allows it.
"""

import re
from collections.abc import Collection
from typing import Any, Final

CONTROL_FIELDS: Final = frozenset(
    {
        "bootstrap_host",
        "bootstrap_pair_key",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "ec_transfer_params",
        "kv_transfer_params",
        "priority",
        "routed_dp_rank",
    }
)
XARGS: Final = "vllm_xargs"
"""vLLM reads what stands in this object as if its scheduler had been given it."""
MAY_SET_CONTROLS: Final = CONTROL_FIELDS | {XARGS}
"""A request without any of these sets none."""
_SPELLED: Final = tuple(name.encode() for name in sorted(CONTROL_FIELDS))
_ESCAPED_LETTER = re.compile(rb"\\u00(?:[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")
_BEFORE_OBJECT: Final = b"\xef\xbb\xbf\xff\xfe \t\r\n"


def control_fields(request: dict[str, Any]) -> tuple[str, ...]:
    """Those that ``request`` sets.

    >>> control_fields({"model": "m", "priority": 0, "kv_transfer_params": {}})
    ('kv_transfer_params', 'priority')
    >>> control_fields({"model": "m", "vllm_xargs": {"kv_transfer_params": "x", "mine": 1}})
    ('kv_transfer_params',)
    """
    if MAY_SET_CONTROLS.isdisjoint(request):
        return ()
    found = CONTROL_FIELDS.intersection(request)
    xargs = request.get(XARGS)
    if type(xargs) is dict:
        found |= CONTROL_FIELDS.intersection(xargs)
    return tuple(sorted(found))


def refused_field(controls: Collection[str], allowed: Collection[str], unreadable: bytes) -> str | None:
    """A field that a request sets and only the operator may; "" if it cannot be read but seems to.

    ``controls``: those it sets, as far as it could be read. ``unreadable``: the body, where it could not.

    >>> refused_field(("priority",), {"priority"}, b""), refused_field(("priority",), (), b"")
    (None, 'priority')
    """
    if controls:
        return next((field for field in controls if field not in allowed), None)
    return "" if unreadable and may_hide_control_field(unreadable) else None


def may_hide_control_field(body: bytes) -> bool:
    r"""Whether a ``body`` that we cannot read might set one when a more lenient JSON reader reads it.

    Python's takes ``NaN``, lone surrogates, a byte order mark, UTF-16 and UTF-32.

    >>> may_hide_control_field(b'{"n":NaN,"priority":0}'), may_hide_control_field(b'{"n":NaN}')
    (True, False)
    >>> may_hide_control_field('{"priority":0}'.encode("utf-16"))
    True
    >>> may_hide_control_field(b'{"n":NaN,"\\u0070riority":0}')
    True
    """
    if body[:64].replace(b"\0", b"").lstrip(_BEFORE_OBJECT)[:1] != b"{":
        return False
    plain = body.replace(b"\0", b"")
    return any(name in plain for name in _SPELLED) or _ESCAPED_LETTER.search(plain) is not None
