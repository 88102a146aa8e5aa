"""How ``warmroute top`` shows a fleet: a picture on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

SIGNS = {
    "healthy": ("●", "blue"),
    "suspect": ("▲", "yellow"),
    "probation": ("◐", "yellow"),
    "draining": ("‖", "yellow"),
    "leaving": ("⇥", "yellow"),
    "ejected": ("✕", "bold red"),
}
_COLUMNS = (
    "replica", "health", "in flight", "queued ms", "held", "decoding", "speed", "index / capacity", "credit",
    "hit share", "decisions", "errors",
)  # fmt: skip
_MATTER_MOST = (
    "health", "in flight", "queued ms", "errors", "hit share", "held", "decoding", "credit", "speed",
    "index / capacity", "decisions",
)  # fmt: skip
"""Beside the name: what a narrow terminal shows first."""
_AROUND = 3
"""Characters of a column beside its cells: padding and the gap."""
_NAME_SHARE, _NAME_LEAST = 1 / 3, 12
"""Of the width, and in characters; longer names go on in the next line where others need the room."""
_UNSAFE = dict.fromkeys((*range(32), *range(127, 160)), "�")


def picture(figures: dict[str, Any]) -> RenderableType:
    """The whole fleet as a table with its traffic above and the other routers below."""
    parts: list[RenderableType] = [Text(_traffic_line(figures["traffic"])), _Replicas(figures["replicas"])]
    parts += [Text(line) for line in _rest(figures)]
    return Group(*parts, Text(_state_line(figures["state"]), style="dim"))


class _Replicas:
    """The table of replicas, with as many columns as are whole in the width there is."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = [self._row(row) for row in rows]

    @staticmethod
    def _row(row: dict[str, Any]) -> dict[str, Text]:
        cells = {column: Text(cell) for column, cell in zip(_COLUMNS, _cells(row), strict=True)}
        sign, style = SIGNS.get(row["health"], ("?", "dim"))
        cells["health"] = Text(f"{sign} {row['health']}", style=style)
        if row["cache_alert"]:
            cells["credit"].stylize("bold red")
        return cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = self._that_fit(options.max_width)
        table = Table(box=box.SIMPLE_HEAD, expand=False, padding=(0, 1))
        for column in shown:
            left = column in ("replica", "health", "decisions")
            folds = column == "replica"
            table.add_column(column, justify="left" if left else "right", no_wrap=not folds, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[column] for column in shown))
        yield table

    def _that_fit(self, width: int) -> list[str]:
        widest = {
            column: max((cell_len(column), *(row[column].cell_len for row in self._rows))) + _AROUND
            for column in _COLUMNS
        }
        name = min(widest["replica"], max(_NAME_LEAST, int(_NAME_SHARE * width)) + _AROUND)
        left, shown = width - 1 - name, {"replica"}
        for column in _MATTER_MOST:
            if widest[column] <= left:
                left -= widest[column]
                shown.add(column)
        return [column for column in _COLUMNS if column in shown]


def lines(figures: dict[str, Any]) -> list[str]:
    """The same as lines, for pipes and logs."""
    out = [_traffic_line(figures["traffic"])]
    for row in figures["replicas"]:
        out.append("  ".join(f"{name}: {cell}" for name, cell in zip(_COLUMNS, _cells(row), strict=True)))
    return [*out, *_rest(figures), _state_line(figures["state"])]


def _rest(figures: dict[str, Any]) -> list[str]:
    """Tenants, the hottest prefixes, the last decisions: a line each."""
    return [
        *map(_tenant_line, figures["tenants"]),
        *map(_prefix_line, figures["prefixes"]),
        *map(_decision_line, figures["decisions"]),
    ]


def _tenant_line(tenant: dict[str, Any]) -> str:
    rates = [tenant[f"{what}_per_s"] for what in ("requests", "tokens")]
    requests, tokens = ("-" if rate is None else f"{rate:,.1f}" for rate in rates)
    return (
        f"tenant {_safe(tenant['tenant'])}: {tenant['in_flight']} in flight, {tenant['held']} held, "
        f"{requests} requests/s, {tokens} tokens/s, hit share {_percent(tenant['hit_share'])}, "
        f"router's own errors: {_counts(tenant['turned_away']) or 'none'}"
    )


def _prefix_line(prefix: dict[str, Any]) -> str:
    homes = ", ".join(map(_safe, prefix["replicas"])) or "nobody"
    return (
        f"prefix {prefix['prefix']}: {prefix['requests']} of the last requests, {_tokens(prefix['tokens'])} "
        f"tokens, on {homes}"
    )


def _decision_line(one: dict[str, Any]) -> str:
    status = "tried again" if one["retried"] else "runs" if one["status"] is None else str(one["status"])
    ttft = "" if one["ttft_ms"] is None else f", first token {one['ttft_ms']:.0f} ms"
    return (
        f"{one['age_s']:5.1f} s ago  {one['reason']:<8} {_safe(one['replica'])}: "
        f"saves {one['saved_ms']:.0f} ms, waits {one['wait_ms']:.0f} ms; {status}{ttft}  "
        f"{_safe(one['request_id'])}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _safe(row["replica"]),
        row["health"],
        str(row["in_flight"]),
        f"{row['queued_ms']:.0f}",
        str(row["held"]),
        str(row["decoding"]),
        f"x{row['prefill_factor']:.2f} / x{row['decode_factor']:.2f}",
        f"{_tokens(row['index_tokens'])} / {_tokens(row['capacity_tokens'])}",
        ("! " if row["cache_alert"] else "") + _percent(row["cache_credit"]),
        _percent(row["hit_share"]),
        _counts(row["decisions"]) or "-",
        str(row["errors"]),
    ]


def _traffic_line(traffic: dict[str, Any]) -> str:
    rate = traffic["requests_per_s"]
    ttft = " / ".join(_milliseconds(value) for value in traffic["ttft_s"].values())
    return (
        f"{traffic['requests']} requests" + ("" if rate is None else f" ({rate:.1f}/s)") + f", "
        f"{traffic['in_flight']} in flight, {traffic['held']} held; TTFT p50 / p90 / p99 {ttft}; "
        f"hit share {_percent(traffic['hit_share'])}, {traffic['spills']} spills, "
        f"{_percent(traffic['spill_share'])} lately "
        f"({_counts(traffic['decisions']) or 'no decisions'}); {traffic['retries']} retries, "
        f"{traffic['broken_streams']} broken streams, errors: {_counts(traffic['errors']) or 'none'}"
    )


def _state_line(state: dict[str, Any]) -> str:
    if state["kind"] == "memory":
        return "one router: state is shared with nobody"
    fault = f"; {_safe(state['fault'])}" if state["fault"] else ""
    peers = ", ".join(
        f"{_safe(peer['router'])} ({peer['outstanding']} outstanding)" for peer in state["peers"]
    )
    return f"{state['state']} for {state['since_s']:.0f} s, other routers: {peers or 'none'}{fault}"


def _safe(text: str) -> str:
    """Names come from elsewhere: without what steers a terminal.

    >>> _safe("gpu\\x1b[2J")
    'gpu�[2J'
    """
    return text.translate(_UNSAFE)


def _tokens(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.0f} k" if value >= 1e4 else f"{value:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1_000.0:.0f} ms"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda one: -one[1]))
