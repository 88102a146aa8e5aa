"""What Grafana and Prometheus are given is true: every metric and label they name is on a live /metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.fake_replica import DONE_EVENT, LAST_CHUNK, STREAM_HEAD, Reset, Send, chunk, delta
from tests.fakes.proxy_rig import CHAT_STREAM, until
from tests.fakes.router_rig import RouterRig, with_router

ROOT = Path(__file__).resolve().parents[1]
PROMETHEUS = ROOT / "configs/prometheus"
DASHBOARDS = sorted((ROOT / "configs/grafana/dashboards").glob("*.json"))
OF_PROMETHEUS = {"instance", "job", "le"}
GRID_COLUMNS = 24
UNITS = {"none", "short", "s", "percentunit", "reqps", "ops"}
_NAME = re.compile(r"\bwarmroute[\w:]+")
_SELECTOR = re.compile(r"(warmroute_\w+)\{([^}]*)\}")
_STRING = re.compile(r'"[^"]*"')


def _rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"]: rule["expr"] for rule in _rules("recording.yml")}
ALERTS = {rule["alert"]: rule for rule in _rules("alerts.yml")}


def _panels() -> Iterator[dict[str, Any]]:
    for path in DASHBOARDS:
        yield from json.loads(path.read_text())["panels"]


TENANT = {"name": "acme", "keys": ["sk-a"], "limits": {"requests_per_s": 1}}


def _expressions() -> dict[str, str]:
    """Every PromQL expression there is, by where it stands."""
    panels = {
        f"panel {panel['title']}, {target['refId']}": target["expr"]
        for panel in _panels()
        for target in panel["targets"]
    }
    return panels | RECORDED | {name: rule["expr"] for name, rule in ALERTS.items()}


@cache
def _exposed() -> dict[str, set[str]]:
    """Label names by series name, of a router that has served requests, with shared state and KV events."""
    found: dict[str, set[str]] = {}

    async def scenario(rig: RouterRig) -> None:
        done = [Send(STREAM_HEAD + chunk(delta("hi")) + chunk(DONE_EVENT) + LAST_CHUNK)]
        rig.replica.plans.extend([done, [Reset()], done, done])
        for _ in range(3):
            await rig.ask(CHAT_STREAM, Authorization="Bearer sk-public")
        await rig.get("/nowhere")
        assert (await rig.ask(CHAT_STREAM, Authorization="Bearer sk-a")).status == 200
        assert (await rig.ask(CHAT_STREAM, Authorization="Bearer sk-a")).status == 429
        page = (await rig.admin("/metrics")).body.decode()
        for family in text_string_to_metric_families(page):
            found[family.name + ("_total" if family.type == "counter" else "")] = set()
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)

    nobody = "127.0.0.1:9"
    with_router(
        scenario,
        others=[{"url": f"http://{nobody}", "name": "k", "kv_events": f"tcp://{nobody}"}],
        keys={"public": ["sk-public"]},
        tenants={"salt_secret": "a-secret-of-more-than-16", "routers": 2, "members": [TENANT]},
        discovery=[{"kind": "file", "path": "/nowhere.yaml"}],
        # Their metrics are there, reached and written or not.
        state={"kind": "redis", "url": f"redis://{nobody}", "snapshot": "/nowhere/state"},
    )
    return found


@pytest.mark.parametrize("place", _expressions())
def test_every_metric_and_label_is_there(place: str) -> None:
    expression = _expressions()[place]
    names = set(_NAME.findall(_STRING.sub('""', expression)))
    if "up{" not in expression:
        assert names, "the expression names no metric"
    for name in names:
        assert name in (RECORDED if ":" in name else _exposed()), name
    for name, labels in _SELECTOR.findall(expression):
        asked = set(re.findall(r"(\w+)\s*[=!]~?", _STRING.sub('""', labels)))
        assert asked <= _exposed()[name] | OF_PROMETHEUS, name
    grouped = {
        label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(",")
    }
    known = set().union(*(_exposed()[name] for name in names if ":" not in name))
    assert grouped <= known | OF_PROMETHEUS


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_why_and_what_to_do_and_names_its_row_in_the_runbook(name: str) -> None:
    rule = ALERTS[name]
    told = rule["annotations"]
    assert rule["labels"]["severity"] in ("critical", "warning") and told["summary"]
    reason, remedy = told["description"].split(". ", 1)
    assert reason and remedy and "{{" not in told["description"]
    file, _, anchor = told["runbook_url"].partition("#")
    row = f'| <a id="{anchor}"></a>`{name}` |'
    (found,) = [line for line in (ROOT / file).read_text().splitlines() if line.startswith(row)]
    _, _, meaning, what_to_do, _ = found.split("|")
    assert meaning.strip() and what_to_do.strip()


def test_without_any_replica_the_gauge_of_usable_ones_stays() -> None:
    async def scenario(rig: RouterRig) -> None:
        assert "\nwarmroute_usable_replicas 1.0\n" in (await rig.admin("/metrics")).body.decode()
        await rig.reload(discovery=[{"kind": "file", "path": "/nowhere.yaml"}])
        await until(lambda: not rig.router.fleet.replicas)
        page = (await rig.admin("/metrics")).body.decode()
        assert "\nwarmroute_usable_replicas 0.0\n" in page and "warmroute_replica_up{" not in page

    with_router(scenario)


def test_prometheus_reads_the_rules_and_grafana_the_dashboard() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert all((PROMETHEUS / file).is_file() for file in config["rule_files"])
    provisioning = ROOT / "configs/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert source["url"].split("//")[1].split(":")[0] in compose
    (provider,) = yaml.safe_load((provisioning / "dashboards/warmroute.yml").read_text())["providers"]
    mounted = {volume.split(":")[1] for volume in compose["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted and DASHBOARDS
    for panel in _panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}


def test_every_panel_says_what_it_shows_and_in_which_unit_and_has_a_place_of_its_own() -> None:
    """As Grafana 11.6's types of a dashboard want it; the units are its ids."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert board["uid"] and len(board["uid"]) <= 40 and board["title"] and "id" not in board
        panels, taken = board["panels"], set()
        for panel in panels:
            assert panel["title"] and panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
            assert {"calcs", "displayMode", "placement", "showLegend"} <= panel["options"]["legend"].keys()
            place = panel["gridPos"]
            assert place["w"] > 0 and place["h"] > 0 and min(place["x"], place["y"]) >= 0
            assert place["x"] + place["w"] <= GRID_COLUMNS, panel["title"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{panel['title']} lies on another"
            taken |= cells
            refs = [target["refId"] for target in panel["targets"]]
            assert refs and len(refs) == len(set(refs))
        assert (
            len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
        )
        variables = {one["name"] for one in board["templating"]["list"]}
        asked = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
        assert asked <= variables


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_prometheus_accepts_config_rules_and_expressions(tmp_path: Path) -> None:
    for panel in _panels():
        for number, target in enumerate(panel["targets"]):
            rule = {"record": f"panel:{panel['id']}_{number}", "expr": _as_grafana_sends(target["expr"])}
            (tmp_path / f"{panel['id']}_{number}.yml").write_text(
                yaml.safe_dump({"groups": [{"name": "panel", "rules": [rule]}]})
            )
    rules = yaml.safe_load((ROOT / "tests/alerts_test.yml").read_text())
    rules["rule_files"] = [str(PROMETHEUS / file) for file in ("recording.yml", "alerts.yml")]
    for one in (alert for test in rules["tests"] for alert in test["alert_rule_test"]):
        annotations = ALERTS[one["alertname"]]["annotations"]
        for expected in one.get("exp_alerts", ()):
            expected["exp_annotations"] |= {key: annotations[key] for key in ("description", "runbook_url")}
    alerts = tmp_path / "alerts.test"
    alerts.write_text(yaml.safe_dump(rules))
    for command in (
        ["check", "config", str(PROMETHEUS / "prometheus.yml")],
        ["check", "rules", *map(str, sorted(tmp_path.glob("*.yml")))],
        ["test", "rules", str(alerts)],
    ):
        ran = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr


def _as_grafana_sends(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$router", ".*")
