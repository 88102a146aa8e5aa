"""W3C trace context in a request's header lines: what came, and what is left without it."""

from collections.abc import Sequence

TRACE_FIELDS = ("traceparent", "tracestate")


def trace_context(lines: Sequence[bytes]) -> dict[str, str]:
    """``traceparent`` and ``tracestate`` among header ``lines``; those given twice joined by a comma.

    >>> trace_context([b"X-A: b", b"TraceParent: 00-a-b-01", b"tracestate: a=1", b"tracestate: b=2"])
    {'traceparent': '00-a-b-01', 'tracestate': 'a=1,b=2'}
    """
    found: dict[str, str] = {}
    for line in lines:
        name = _name(line)
        if name in TRACE_FIELDS:
            value = line.partition(b":")[2].strip().decode("latin-1")
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def without_trace_context(lines: Sequence[bytes]) -> list[bytes]:
    """The other lines, as they are.

    >>> without_trace_context([b"X-A: b", b"TraceParent: 00-a-b-01"])
    [b'X-A: b']
    """
    return [line for line in lines if _name(line) not in TRACE_FIELDS]


def _name(line: bytes) -> str:
    return line.partition(b":")[0].lower().decode("latin-1")
