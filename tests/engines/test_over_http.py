"""A router before servers that answer as engines do: what it finds out stands in /fleet and in the log."""

import logging

import pytest

from tests.engines.test_engine_contract import pages
from tests.fakes.fake_replica import Plan, SeenRequest, Send, sized
from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig, with_router

KEY = "0123456789abcdef"


def speaking(kind: str) -> object:
    """Probes are answered as that engine does; what it does not have is 404."""
    answers = pages(kind)

    def answer(probe: SeenRequest) -> Plan:
        if probe.target == b"/health":
            return [Send(sized(b""))]
        body = answers.get(probe.target.decode())
        return [Send(sized(b"{}", 404, "Not Found"))] if body is None else [Send(sized(body))]

    return answer


def test_a_mixed_fleet_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    kinds = ("llamacpp", "sglang", "tgi", "openai")

    async def scenario(rig: RouterRig) -> None:
        for replica, kind in zip(rig.replicas, kinds, strict=True):
            replica.probe = speaking(kind)  # type: ignore[assignment]
            await replica.start()
        fleet = list(rig.router.fleet.replicas)
        await until(lambda: all(one.last_report for one in fleet[:3]) and fleet[3].models is not None)
        shown = await rig.fleet()
        assert [shown[f"r{at}"]["engine"] for at in range(4)] == ["llamacpp", "sglang", "tgi", None]
        told = [shown[f"r{at}"]["reported"] for at in range(3)]
        assert [(one["running"], one["waiting"]) for one in told] == [(4, 46), (162, 2_826), (4, 7)]
        assert [replica.kv_tokens for replica in fleet] == [1_024, 20_480, None, None]

    with caplog.at_level(logging.INFO, "warmroute.prober"):
        with_router(scenario, replicas=4, down=4)
    lines = [record.getMessage() for record in caplog.records]
    for line in ("replica r0 runs llama.cpp", "replica r1 runs SGLang", "replica r2 runs TGI"):
        assert lines.count(line) == 1


@pytest.mark.parametrize(
    ("accepts", "signing_key", "told"),
    [
        ("none", None, "takes no cache_salt"),
        ("none", KEY, "takes no cache_salt"),
        ("signed", None, "takes only a cache_salt that is signed"),
        ("signed", KEY, None),
        ("any", None, None),
    ],
)
def test_a_replica_that_refuses_tenants_salts_is_told_of_once(
    caplog: pytest.LogCaptureFixture, accepts: str, signing_key: str | None, told: str | None
) -> None:
    info = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="9",cache_salts="{accepts}"}} 1\n'
    answers = {b"/health": b"", b"/v1/models": pages("warmroute")["/v1/models"], b"/metrics": info.encode()}

    async def scenario(rig: RouterRig) -> None:
        (replica,) = rig.replicas
        replica.probe = lambda probe: [Send(sized(answers[probe.target]))]
        await replica.start()
        await until(lambda: sum(one.target == b"/metrics" for one in replica.probes) >= 3)

    tenants = {"salt_secret": KEY, "members": [{"name": "acme", "keys": ["acme-key"]}]}
    if signing_key is not None:
        tenants["salt_signing_key"] = signing_key
    with caplog.at_level(logging.WARNING, "warmroute.prober"):
        with_router(scenario, replicas=1, down=1, tenants=tenants)
    lines = [one.getMessage() for one in caplog.records if "cache_salt" in one.getMessage()]
    assert [told in line for line in lines] == [True] if told else not lines
