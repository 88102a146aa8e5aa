"""A running router, asked on its admin port: what it has seen of hits, and what that says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from router.admin_client import ask_admin
from sim.diagnose.diagnosis import Diagnosis
from sim.diagnose.report import DiagnosisReport, ReportTable

ASK_LIMIT_S = 10.0
FULL_SHARE = 0.95
"""An index this full forgets: the replica's cache does, too."""
SPILL_SHARE = 0.1
LOW_RATIO = 0.5
ENOUGH_TOKENS = 1_000
MOST_EXPLAINED = 5


class RouterError(Exception):
    """Nobody answers, or not as a router does."""


@dataclass(frozen=True, slots=True)
class LiveRouter:
    """``GET /fleet`` and the counters of ``GET /metrics``."""

    url: str
    fleet: Mapping[str, Any]
    counters: Mapping[str, float]
    """Sums over labels, by name without ``_total``."""
    decisions: Mapping[str, float]
    """By reason."""
    fallbacks: Mapping[str, float]
    """Prompts of exact mode read as text, by reason."""

    @property
    def replicas(self) -> Sequence[Mapping[str, Any]]:
        """Their states."""
        states: Sequence[Mapping[str, Any]] = self.fleet["replicas"]
        return states

    @property
    def capacities(self) -> list[int]:
        """KV tokens per replica, as its metrics told or the index assumes."""
        return [max(1, int(one["index"]["capacity_tokens"])) for one in self.replicas]

    @property
    def capacities_told(self) -> bool:
        """All of these by the replicas' metrics."""
        return all((one.get("reported") or {}).get("capacity_tokens") for one in self.replicas)


def ask_router(url: str) -> LiveRouter:
    """Ask the router at admin address ``url``. Raises ``RouterError``."""
    base = url.rstrip("/")
    fleet = orjson.loads(_get(base + "/fleet"))
    if not isinstance(fleet, dict) or "replicas" not in fleet:
        raise RouterError(f"{base} is not a router's admin port: /fleet names no replicas")
    counters: dict[str, float] = {}
    decisions: dict[str, float] = {}
    fallbacks: dict[str, float] = {}
    for family in text_string_to_metric_families(_get(base + "/metrics").decode()):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            counters[name] = counters.get(name, 0.0) + sample.value
            by_reason = {"warmroute_decisions": decisions, "warmroute_text_fallbacks": fallbacks}.get(name)
            if by_reason is not None:
                reason = sample.labels.get("reason", "")
                by_reason[reason] = by_reason.get(reason, 0.0) + sample.value
    return LiveRouter(base, fleet, counters, decisions, fallbacks)


def ask_explain(url: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """``POST /explain``: where the router would send ``body``. Raises ``RouterError``."""
    answer = orjson.loads(_get(url.rstrip("/") + "/explain", orjson.dumps(dict(body))))
    if not isinstance(answer, dict) or "matched_tokens" not in answer:
        raise RouterError(f"{url}/explain answered without matched_tokens")
    return answer


def _get(url: str, body: bytes | None = None) -> bytes:
    try:
        return ask_admin(url, body, limit_s=ASK_LIMIT_S)
    except (OSError, ValueError) as error:
        asked = "" if "admin port" in str(error) else "; is it a router's admin port?"
        raise RouterError(f"{error}{asked}") from error


def router_report(router: LiveRouter) -> DiagnosisReport:
    """What the router has seen since its start."""
    counters = router.counters
    prompt, cached = (counters.get(f"warmroute_{name}_tokens", 0.0) for name in ("prompt", "cached"))
    verdict = [
        f"{cached / prompt:.1%} of {prompt:,.0f} prompt tokens were cached, as replicas reported since "
        "the router's start."
        if prompt
        else "No replica has reported prompt tokens yet: send traffic to engines that tell usage."
    ]
    return DiagnosisReport(
        title=f"{router.url}: {len(router.replicas)} replicas",
        verdict=tuple(verdict),
        tables=(_replicas(router), _decisions(router)),
        findings=tuple(router_findings(router)),
    )


def _replicas(router: LiveRouter) -> ReportTable:
    rows = []
    for one in router.replicas:
        reported, cache, index = one.get("reported") or {}, one["cache"], one["index"]
        queried, hits = reported.get("prefix_queried_tokens"), reported.get("prefix_hit_tokens")
        predicted = cache["predicted_tokens"]
        rows.append(
            (
                str(one["name"]),
                str(one["health"]) + (", draining" if one["draining"] else ""),
                f"{one['requests']:,}",
                f"{hits / queried:.1%}" if queried else "",
                f"{predicted:,.0f}",
                f"{cache['cached_tokens']:,.0f}",
                f"{index['tokens'] / max(1, index['capacity_tokens']):.0%}",
                f"{index['capacity_tokens']:,}",
            )
        )
    columns = (
        "replica",
        "health",
        "requests",
        "engine hit rate",
        "believed",
        "cached",
        "index full",
        "capacity",
    )
    return ReportTable("Replicas", columns, tuple(rows))


def _decisions(router: LiveRouter) -> ReportTable:
    total = sum(router.decisions.values())
    ranked = sorted(router.decisions.items(), key=lambda one: -one[1])
    return ReportTable(
        "Decisions",
        ("reason", "requests", "share"),
        tuple((reason, f"{count:,.0f}", f"{count / total:.1%}") for reason, count in ranked if total),
        tuple(count / total for _, count in ranked if total),
    )


def router_findings(router: LiveRouter) -> list[tuple[str, tuple[str, ...]]]:
    """(headline, lines) of what stands out."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for one in router.replicas:
        found += _replica_findings(one)
    decisions, spills = sum(router.decisions.values()), router.decisions.get("spill", 0.0)
    if decisions and spills > SPILL_SHARE * decisions:
        found.append(
            (
                f"{spills / decisions:.0%} of requests left a warmer replica because waiting there cost more",
                ("do: more replicas, or see with `warmroute explain` which prompts are long and popular",),
            )
        )
    fallbacks = {reason: count for reason, count in router.fallbacks.items() if count}
    if fallbacks:
        reasons = ", ".join(f"{reason} {count:,.0f}" for reason, count in sorted(fallbacks.items()))
        found.append(
            (
                "prompts of a model in exact mode were read as text",
                (f"by reason: {reasons}", "do: check models.NAME.tokenizer and chat_template"),
            )
        )
    return found


def _replica_findings(one: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    found: list[tuple[str, tuple[str, ...]]] = []
    name, cache, index = one["name"], one["cache"], one["index"]
    predicted, cached = cache["predicted_tokens"], cache["cached_tokens"]
    if predicted >= ENOUGH_TOKENS and not cached:
        found.append(
            (
                f"{name} has never reported a hit, {predicted:,.0f} tokens were believed to be cached",
                (
                    "do: is prefix caching on? does the template write a date or an id at the top? "
                    "compare /tokenize of two prompts",
                ),
            )
        )
    elif predicted >= ENOUGH_TOKENS and cached < LOW_RATIO * predicted:
        found.append(
            (
                f"{name} had {cached / predicted:.0%} of what was believed to be cached",
                ("do: exact mode (models:) or KV events; check the engine's KV memory and block size",),
            )
        )
    if index["tokens"] > FULL_SHARE * index["capacity_tokens"]:
        found.append(
            (
                f"the index of {name} is full: its cache of {index['capacity_tokens']:,} tokens evicts",
                ("do: diagnose a request log with --capacity to see how much more would help",),
            )
        )
    told, configured = cache["block_size"]["reported"], cache["block_size"]["configured"]
    if told and configured and told != configured:
        found.append(
            (
                f"{name}: block_size {configured} in the config, {told} in the engine",
                ("do: remove block_size from the config",),
            )
        )
    if not one["usable"]:
        found.append((f"{name} takes no traffic: {one['health']}", ("do: see its log; its cache goes cold",)))
    return found


def explained(router: LiveRouter, diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    """What the router believes of the latest prompts of a log: one finding, or none without words."""
    bodies = [one.row.body for one in diagnosis.sample.words if one.row is not None and one.row.body]
    lines = []
    for body in bodies[-MOST_EXPLAINED:]:
        answer = ask_explain(router.url, body)
        lines.append(
            f"{answer['prompt_tokens']:,} tokens -> {answer['replica']} ({answer['reason']}): "
            f"{answer['matched_tokens']:,} matched"
        )
    return [("where the router would send the latest prompts now", tuple(lines))] if lines else []
