"""``warmroute bench decision``: the routing code alone, by size of prompt and fleet."""

import json

import pytest

import warmroute
from sim.bench.decision import LOADS, decision_cost

SMALL = ["bench", "decision", "--replicas", "2,5", "--sizes", "1", "--requests", "30", "--rounds", "1"]


def test_every_load_and_fleet_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main([*SMALL, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["load"], one["replicas"]) for one in results] == [
        ("busy", 2), ("busy", 5), ("full", 2), ("full", 5)
    ]  # fmt: skip
    assert all(one["read_us"] > 0 and one["choose_us"] > 0 and one["later_us"] > 0 for one in results)


def test_the_table_says_how_much_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "5 : 2" in printed and printed.count("; all ×") == len(LOADS)


@pytest.mark.parametrize("load", LOADS)
def test_requests_wait_in_the_full_fleet_alone(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from router.routing.fleet import Fleet

    waiting = []
    submit = Fleet.submit

    def watched(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        outcome = submit(self, *args, **kwargs)
        waiting.append(self.held)
        return outcome

    monkeypatch.setattr(Fleet, "submit", watched)
    decision_cost(8, 1, load, 100)
    measured = waiting[-100:]
    assert sum(measured) > 600 if load == "full" else sum(measured) < 100
