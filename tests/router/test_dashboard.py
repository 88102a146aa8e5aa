"""The dashboard in a real browser, in front of a router with fake replicas; and its headers without one."""

import json
import re
from pathlib import Path
from typing import Any

from router.proxy.traffic_report import replica_traffic, traffic_state
from tests.fakes.chromium import Page, chromium, needs_chromium
from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Hang, Send, chunk, delta, event
from tests.fakes.proxy_rig import CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router

ALERTS = (Path(__file__).parents[2] / "configs/prometheus/alerts.yml").read_text().split()
HOSTILE = "<img src=x onerror='window.owned=1'><script>window.owned=1</script>"
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 750}}
ANSWER = [
    Send(
        STREAM_HEAD
        + chunk(delta("hi"))
        + chunk(event({"choices": [], "usage": USAGE}))
        + chunk(DONE_EVENT)
        + LAST_CHUNK
    )
]


def _url(rig: RouterRig) -> str:
    return f"http://{rig.router.admin.address}/dashboard"


async def _row(page: Page, name: str) -> dict[str, str]:
    """A replica's row, label by label, as it is to be read."""
    script = f"""Object.fromEntries([...[...document.querySelectorAll('#replicas tr')]
        .find((row) => row.querySelector('span').textContent === {json.dumps(name)}).children]
        .map((cell) => [cell.dataset.label, cell.textContent]))"""
    row: dict[str, str] = await page.evaluate(script)
    return row


@needs_chromium
def test_shows_live_figures_and_what_replicas_are_called_as_text() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].default = rig.replicas[1].default = ANSWER
        await rig.until_health("r0", "healthy")
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#replicas tr').length === 3")
            assert await page.text("#link") == "● live"
            assert (await _row(page, "r0"))["Health"].startswith("● healthy")
            assert (await _row(page, HOSTILE))["Health"].startswith("✕ ejected")
            assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0

            for _ in range(4):
                assert (await rig.ask(CHAT_STREAM)).status == 200
            await page.until("document.getElementById('figure-reasons').innerText.includes('balanced 4')")
            assert "75.0%" in await page.text("#figure-hits")
            assert "4 streams" in await page.text("#figure-ttft50")
            assert re.search(r"\d ms", await page.text("#figure-ttft99"))
            assert (await _row(page, "r1"))["Hit share"] == "75.0%last minute"

            rig.replicas[0].plans.append([Send(STREAM_HEAD + chunk(delta("hi"))), Hang()])
            client = await rig.client()
            await client.post(CHAT_STREAM)
            await page.until("document.getElementById('figure-flight').innerText.includes('1')")
            assert (await _row(page, "r0"))["In flight"] == "10 queued, 1 decoding"
            client.leave()
            await page.until("document.getElementById('figure-left').innerText.includes('1')")

            rig.router.fleet.drained(0, 0.0, on=True)
            await page.until("document.getElementById('replicas').innerText.includes('‖ draining')")
            assert not page.problems
            assert await page.evaluate("window.owned === undefined")

    with_router(
        scenario, replicas=2, others=[{"url": "http://127.0.0.1:9", "name": HOSTILE}], policy=ROUND_ROBIN
    )


ROUND_ROBIN = {"kind": "round_robin"}


@needs_chromium
def test_explains_a_request_by_the_keyboard_alone() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.until_health("r1", "healthy")
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#replicas tr').length === 2")
            await page.evaluate(
                "document.getElementById('body').select(); document.getElementById('body').focus()"
            )
            body = {"model": "m", "messages": [{"role": "user", "content": "word " * 500}]}
            await page.type(json.dumps(body))
            await page.press("Tab")
            await page.press("Tab")
            await page.press("Enter")
            await page.until("document.querySelectorAll('#candidates tr').length === 2")
            told = (await rig.admin("/explain", "POST", json.dumps(body).encode())).json()
            rows = await page.evaluate(
                "[...document.querySelectorAll('#candidates tr')].map((row) => [...row.children]"
                ".map((cell) => cell.textContent))"
            )
            assert {row[0].removeprefix("➤ ").removesuffix("chosen") for row in rows} == {"r0", "r1"}
            assert [row[0].startswith("➤") for row in rows] == [True, False]  # the least total is chosen
            for row in rows:
                wait, prefill, imposed, total = (float(value.replace(",", "")) for value in row[3:])
                assert abs(wait + prefill + imposed - total) < 0.3 and prefill > 0
            assert f"{told['prompt_tokens']} prompt tokens →" in await page.text("#verdict")

            await page.evaluate(
                "document.getElementById('body').select(); document.getElementById('body').focus()"
            )
            await page.type("{}")
            for key in ("Tab", "Tab", "Enter"):
                await page.press(key)
            await page.until("document.getElementById('verdict').innerText.includes('no prompt found')")
            problems = [one for one in page.problems if "400 (Bad Request)" not in one]
            assert not problems

    with_router(scenario, replicas=2, policy={"kind": "predicted_finish"})


@needs_chromium
def test_asks_for_the_key_once_and_keeps_it_nowhere() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.getElementById('ask').open")
            assert await page.evaluate("document.querySelectorAll('#replicas tr').length") == 0
            for key in ("sk-wrong", "sk-admin"):
                await page.until("document.activeElement.id === 'key' && document.activeElement.value === ''")
                await page.type(key)
                await page.press("Enter")
                if key == "sk-wrong":
                    await page.until("document.getElementById('key-problem').innerText !== ''")
            await page.until("document.querySelectorAll('#replicas tr').length === 1")
            assert not await page.evaluate("document.getElementById('ask').open")
            kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
            assert await page.evaluate(kept) == [0, 0, "", _url(rig)]
            await page.go_to(_url(rig))
            await page.until("document.getElementById('ask').open")
            problems = [one for one in page.problems if "401 (Unauthorized)" not in one]
            assert not problems

    with_router(scenario, keys={"public": ["sk-new"], "admin": ["sk-admin"]})


TENANTS = [
    {
        "name": name,
        "namespace": name,
        "weight": weight,
        "limits": {"requests_per_s": 10.0, "tokens_per_s": None, "concurrent": 8, "share": 0.5},
        "in_flight": 2,
        "held": 1,
        "requests": 20,
        "charged_tokens": 5_000,
        "statuses": {"200": 17, "429": 3},
        "turned_away": {"tenant_rate": 3},
        "prompt_tokens": 4_000,
        "cached_tokens": 1_000,
        "output_tokens": 70,
        "ttft_mean_ms": 120.0,
        "fleet": {"in_flight": 6, "requests": 40, "charged_tokens": 9_000},
    }
    for name, weight in (("search", 1.0), ("<b>chat</b>", 2.0))
]
"""As ``/fleet`` has them."""

TOO_WIDE = (
    "[document.documentElement, ...document.querySelectorAll('.scroll')]"
    ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
)
CARDS = """((body) => [...document.querySelectorAll(`${body} tr`)].map((row) =>
    Object.fromEntries([...row.children].map((one) => [one.dataset.label, one.textContent]))))"""


async def _cards(page: Page, body: str) -> list[dict[str, str]]:
    """The rows of a table, each label by label."""
    rows: list[dict[str, str]] = await page.evaluate(f"{CARDS}({json.dumps(body)})")
    return rows


@needs_chromium
def test_decisions_stream_by_with_reason_saved_ms_and_outcome_and_can_be_filtered() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replicas[0].default = rig.replicas[1].default = ANSWER
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#replicas tr').length === 2")
            for name in ("one", "two", "three"):
                body = {**CHAT_STREAM, "messages": [{"role": "user", "content": "word " * 2_000 + name}]}
                assert (await rig.ask(body, x_request_id=name)).status == 200
            await page.until("document.querySelectorAll('#decisions tr').length === 3")
            latest, _, first = await _cards(page, "#decisions")
            assert first["When, request"].endswith("one") and first["Reason"] == "cold"
            assert (latest["Reason"], latest["Replica"]) == ("warm", first["Replica"])
            assert float(latest["Saved ms"].replace(",", "")) > 0 and "cached there" in latest["Why"]
            assert latest["Outcome"].startswith("● 200first token")
            await page.evaluate("document.getElementById('decision-filter').focus()")
            await page.type("two")
            await page.until("document.querySelectorAll('#decisions tr').length === 1")
            await page.evaluate(
                "byId('decision-filter').value = ''; byId('reason').value = 'cold';"
                "byId('reason').dispatchEvent(new Event('input'))"
            )
            (only,) = await _cards(page, "#decisions")
            assert only["When, request"].endswith("one")
            # 3 requests, all there were
            await page.until(f"{CARDS}('#prefixes').map(row => row.Requests).join() === '3100.0%'")
            (prefix,) = await _cards(page, "#prefixes")
            await page.size(360, 740)
            assert await page.evaluate(TOO_WIDE) == []
            assert prefix["Cached on"] == first["Replica"].removesuffix("m")
            assert not page.problems

    with_router(scenario, replicas=2, policy={"kind": "predicted_finish"})


@needs_chromium
def test_what_needs_attention_stands_first_and_names_its_alert() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.getElementById('attention').innerText.includes('Nothing needs')")
            await rig.replicas[0].kill()
            await page.until("document.getElementById('attention').innerText.includes('r0 is ejected')")
            assert "WarmrouteReplicaEjected" in await page.text("#attention")
            rig.router.fleet.drained(1, 0.0, on=True)
            await page.until(
                "document.getElementById('attention').innerText.includes('no replica may take work')"
            )
            await page.evaluate(
                "byId('wellness').value = 'unwell'; byId('wellness').dispatchEvent(new Event('input'))"
            )
            assert len(await _cards(page, "#replicas")) == 2
            rig.router.fleet.drained(1, 0.0, on=False)
            await page.until("document.querySelectorAll('#replicas tr').length === 1")
            assert "no replica" not in await page.text("#attention")
            told = set(re.findall(r"Warmroute\w+", await page.evaluate("problems.toString()")))
            assert told <= set(ALERTS), told - set(ALERTS)

    with_router(scenario, replicas=2)


@needs_chromium
def test_tenants_are_shown_where_there_are_some() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = ANSWER
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#tenants tr').length > 0")
            for _ in range(3):
                await rig.ask(CHAT_STREAM, Authorization="Bearer sk-a")
            await page.until(f"{CARDS}('#tenants').some((one) => one['Turned away'].startsWith('1'))")
            rows = {one["Tenant"]: one for one in await _cards(page, "#tenants")}
            acme = rows["acme"]
            assert "turned away in the last minute: tenant_" in await page.text("#attention")
            assert "errors of this router" not in await page.text("#attention")
            assert acme["In flight"] == "0of 8; 0 held here" and acme["Hit share"] == "75.0%last minute"
            assert acme["Turned away"].startswith("1tenant") and acme["Requests/s"].endswith("of 2/s")
            assert acme["Tokens/s"].endswith("no limit") and "boltweight 2.0" in rows
            await page.until("document.querySelectorAll('#decisions tr').length === 2")
            assert {one["Replica"] for one in await _cards(page, "#decisions")} == {"r0m · acme"}
            await page.evaluate("document.getElementById('tenant-filter').focus()")
            await page.type("acme")
            await page.until("document.querySelectorAll('#tenants tr').length === 1")
            assert not page.problems

    limits = {"requests_per_s": 2, "concurrent": 8}
    members = [
        {"name": "acme", "keys": ["sk-a"], "limits": limits},
        {"name": "bolt", "keys": ["sk-b"], "weight": 2},
    ]
    with_router(scenario, tenants={"salt_secret": "a-secret-of-more-than-16", "members": members})


@needs_chromium
def test_every_part_is_reached_by_the_keyboard() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#replicas tr').length === 1")
            assert await page.evaluate("byId('tenants-part').hidden && byId('to-tenants').hidden")
            wanted = "button, input, select, textarea, a[href], [tabindex='0']"
            wanted = f"[...document.querySelectorAll(`{wanted}`)].filter((one) => one.checkVisibility())"
            await page.evaluate(
                f"window.wanted = {wanted}; window.met = new Set(); document.activeElement.blur()"
            )
            count = await page.evaluate("wanted.length")
            for _ in range(count + 5):
                await page.press("Tab")
                await page.evaluate("met.add(document.activeElement)")
            assert (
                await page.evaluate("wanted.filter((one) => !met.has(one)).map((one) => one.outerHTML)") == []
            )

    with_router(scenario)


@needs_chromium
def test_fits_a_phone_sorts_filters_and_carries_a_large_fleet() -> None:
    others = [
        {"url": f"http://127.1.0.{n}:9", "name": f"replica-{n:03}", "tags": ["abc"[n % 3]]}
        for n in range(256)
    ]

    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#replicas tr').length === 257")
            names = (
                "[...document.querySelectorAll('#replicas td:first-child span')].map((it) => it.textContent)"
            )
            await page.evaluate("document.querySelector('#columns button').click()")
            assert (await page.evaluate(names))[0] == "r0"
            await page.evaluate("document.querySelector('#columns button').click()")
            assert (await page.evaluate(names))[0] == "replica-255"
            await page.evaluate("document.getElementById('filter').focus()")
            await page.type("replica-25")
            await page.until("document.querySelectorAll('#replicas tr').length === 6")
            await page.evaluate("drawTenants(TENANTS)".replace("TENANTS", json.dumps(TENANTS)))
            for dark in (False, True):
                await page.size(360, 740, dark=dark)
                assert await page.evaluate(TOO_WIDE) == []
            assert not page.problems

    with_router(scenario, others=others, health={"interval_s": 5.0})


@needs_chromium
def test_shows_a_source_of_replicas_that_fails() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.querySelectorAll('#sources li').length === 1")
            assert (await page.text("#sources")).startswith("✕ file /nowhere.yaml fails")

    with_router(scenario, discovery=[{"kind": "file", "path": "/nowhere.yaml"}])


@needs_chromium
def test_says_when_the_router_is_gone() -> None:
    async def scenario(rig: RouterRig) -> None:
        async with chromium(_url(rig)) as page:
            await page.until("document.getElementById('link').innerText === '● live'")
            await rig.router.admin.stop()
            await page.until("document.getElementById('link').innerText.startsWith('✕ no answer')")
            assert await page.evaluate("document.querySelectorAll('#replicas tr').length") == 1

    with_router(scenario)


def test_runs_only_its_own_script_and_reaches_only_its_own_port() -> None:
    async def scenario(rig: RouterRig) -> None:
        answer = await rig.admin("/dashboard")  # without a key: it holds no data
        assert answer.status == 200 and answer.field("content-type") == "text/html; charset=utf-8"
        rules = dict(
            rule.split(" ", 1) for rule in (answer.field("content-security-policy") or "").split("; ")
        )
        assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
        assert rules["connect-src"] == "'self'" and rules["script-src"].startswith("'sha256-")
        assert "unsafe" not in str(rules)
        page = answer.body.decode()
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
        assert (await rig.get("/dashboard")).status in (401, 404)  # not on the public port

    with_router(scenario, keys={"public": ["sk-new"], "admin": ["sk-admin"]})


def test_fleet_tells_the_traffic_it_shows() -> None:
    async def scenario(rig: RouterRig) -> None:
        rig.replica.default = ANSWER
        for _ in range(3):
            await rig.ask(CHAT_STREAM)
        await until(lambda: rig.router.counters.requests != {})
        state: dict[str, Any] = (await rig.admin("/fleet")).json()
        traffic = state["traffic"]
        assert (traffic["requests"], traffic["decisions"]) == (3, {"only": 3})
        assert (traffic["prompt_tokens"], traffic["cached_tokens"]) == (3_000, 2_250)
        assert sum(traffic["ttft"]["counts"]) == 3
        assert len(traffic["ttft"]["counts"]) == len(traffic["ttft"]["bounds_s"]) + 1
        (replica,) = state["replicas"]
        assert replica["traffic"] == {"statuses": {"200": 3}, "decisions": {"only": 3}}
        assert replica["cache"]["prompt_tokens"] == 3_000
        counters = rig.router.counters
        assert traffic_state(counters)["in_flight"] == 0
        assert replica_traffic(counters, "nobody") == {"statuses": {}, "decisions": {}}

    with_router(scenario)
