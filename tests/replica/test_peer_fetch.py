"""KV pulled from another replica over TCP: taken when it is what was asked for, computed otherwise."""

import asyncio
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.config import ConfigError, parse_config
from replica.contract.kv_source import kv_source_value
from replica.contract.prefill_cost import PrefillCost
from replica.engine import Engine
from replica.engine_limits import TierLimits
from replica.kv_cache.cache_settings import CacheSettings
from replica.kv_cache.fetch_plan import Tier
from replica.kv_cache.tier_settings import TierCounters
from replica.kv_cache.tier_transport import PeerOffer
from replica.model.load import load_model
from replica.model.paged_kv import PagedKv
from replica.peers.peer_limits import PeerLimits
from replica.server.app import Running
from tests.replica.models import finish_all, greedy_request, make_engine, token_ids
from tests.replica.peer_rig import FAULTS, SECRET, LendingPeer, lending_engine
from tests.replica.serving import gauge, get, post, replica, until

PROMPT = tuple((7 * i) % 251 for i in range(200))
WHOLE = 12
"""Blocks of it that can be fetched: its last token is computed."""
PATIENT = PrefillCost(1.0, 0.1)
"""Whatever a peer has is waited for."""
HASTY = PrefillCost(0.01, 2e-3)
"""0.4 s for the whole prompt."""


def asking_engine(secret: str = SECRET, prefill: PrefillCost = PATIENT, **limits: Any) -> Engine:
    tiers = TierLimits(prefill=prefill, peers=PeerLimits(secret))
    return make_engine(**({"batch_invariant": True, "tiers": tiers} | limits))


def ask(engine: Engine, source: PeerOffer | None, salt: str | None = None) -> int:
    """Tokens that were cached; the answer must be right, and nothing left held."""
    request = replace(greedy_request("a", PROMPT, 8), source=source, salt=salt)
    deltas = finish_all(engine, [request])["a"]
    alone = make_engine(prefix_caching=False, batch_invariant=True)
    assert token_ids(deltas) == token_ids(finish_all(alone, [greedy_request("a", PROMPT, 8)])["a"])
    assert engine.load().kv_usage == 0.0
    return deltas[-1].cached_tokens


def counted(engine: Engine) -> TierCounters:
    assert engine.tier_counters is not None
    return engine.tier_counters


def test_a_prompt_that_a_peer_has_computed_is_not_computed_again() -> None:
    with LendingPeer(lending_engine([(PROMPT, None)])) as peer:
        engine = asking_engine()
        assert ask(engine, peer.offer()) == WHOLE * 16
        assert counted(engine).fetched[Tier.PEER] == WHOLE
        assert peer.server.counters.blocks == WHOLE and peer.server.counters.whole == 1
        assert ask(engine, peer.offer()) == WHOLE * 16, "and now it is here"
        assert peer.server.counters.blocks == WHOLE
        engine.close()


@pytest.mark.parametrize(
    ("has", "wants"),
    [("blocks", "radix"), ("radix", "blocks")],
)
def test_blocks_and_trees_give_each_other_kv(has: str, wants: str) -> None:
    kinds = {"blocks": CacheSettings(), "radix": CacheSettings("radix", 4)}
    with LendingPeer(lending_engine([(PROMPT, None)], cache=kinds[has])) as peer:
        engine = asking_engine(cache=kinds[wants])
        assert ask(engine, peer.offer()) >= WHOLE * 16
        assert counted(engine).fetched[Tier.PEER] == WHOLE
        engine.close()


def test_what_lies_on_the_peers_host_is_given_too() -> None:
    tiers = TierLimits(64 * 2**20, peers=PeerLimits(SECRET))
    lender = lending_engine([(PROMPT, None)], kv_blocks=14, max_model_len=224, tiers=tiers)
    other = tuple(random.Random(1).randrange(256) for _ in range(150))
    finish_all(lender, [greedy_request("other", other, 1)])
    assert counted(lender).saved > 0, "the other prompt pushed blocks out of the device"
    with LendingPeer(lender) as peer:
        engine = asking_engine()
        assert ask(engine, peer.offer()) == WHOLE * 16
        engine.close()


def test_what_the_peer_has_no_more_is_computed_and_the_peer_is_asked_again() -> None:
    with LendingPeer(lending_engine([(PROMPT[:64], None)])) as peer:
        engine = asking_engine()
        assert ask(engine, peer.offer()) == 64, "four blocks are there, the rest was promised"
        assert (counted(engine).gone, counted(engine).failed_fetches) == (1, 0)
        assert peer.server.counters.partial == 1
        assert engine.reset_prefix_cache()
        assert ask(engine, peer.offer(blocks=4)) == 64
        engine.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_breaks_on_the_way_is_computed(fault: str) -> None:
    with LendingPeer(lending_engine([(PROMPT, None)]), [fault]) as peer:
        engine = asking_engine(prefill=HASTY)
        cached = ask(engine, peer.offer())
        assert cached < WHOLE * 16 and peer.links[0].connections == 1
        counters = counted(engine)
        assert counters.corrupt + counters.failed_fetches + counters.late_fetches == 1
        assert fault != "flipped" or counters.failed_fetches == 0
        engine.close()


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        engine = asking_engine()
        assert ask(engine, PeerOffer(f"127.0.0.1:{bound.getsockname()[1]}", WHOLE)) == 0
        assert counted(engine).failed_fetches == 1
        assert engine.reset_prefix_cache()
        assert ask(engine, PeerOffer(f"127.0.0.1:{bound.getsockname()[1]}", WHOLE)) == 0
        assert counted(engine).failed_fetches == 1, "it is left alone for a while"
        engine.close()


@pytest.mark.parametrize("stranger", ["secret", "model", "kernels", "int8", "salt"])
def test_strangers_give_and_get_nothing(stranger: str) -> None:
    with LendingPeer(lending_engine([(PROMPT, "theirs")])) as peer:
        engine = {
            "secret": lambda: asking_engine("another"),
            "model": lambda: asking_engine(model=load_model("tiny", seed=3)),
            "kernels": lambda: asking_engine(batch_invariant=False),
            "int8": lambda: asking_engine(kv_int8=True),
            "salt": asking_engine,
        }[stranger]()
        request = replace(greedy_request("a", PROMPT, 4), source=peer.offer(), salt="ours")
        assert finish_all(engine, [request])["a"][-1].cached_tokens == 0
        assert peer.server.counters.blocks == 0
        assert (peer.server.counters.refused == 1) == (stranger != "salt")
        engine.close()


def test_a_peer_that_signs_anothers_kv_with_the_wrong_secret_is_not_believed() -> None:
    lender = lending_engine([(PROMPT, None)])
    honest = lender.lend

    def lies(prompt: Any, wanted: Any) -> list[tuple[bytes, memoryview]]:
        return [(name, memoryview(bytes(len(content)))) for name, content in honest(prompt, wanted)]

    lender.lend = lies  # type: ignore[method-assign]
    with LendingPeer(lender) as peer:
        peer.server._key = b"a key that it made up" * 2
        engine = asking_engine()
        assert ask(engine, peer.offer()) == 0
        assert peer.server.counters.refused == 1
        engine.close()


def test_pulling_that_takes_longer_than_computing_is_not_tried() -> None:
    with LendingPeer(lending_engine([(PROMPT, None)])) as peer:
        engine = asking_engine(prefill=PrefillCost(0.0, 1e-6))
        assert ask(engine, peer.offer()) == 0
        assert peer.links[0].connections == 0 and counted(engine).recomputed == WHOLE
        engine.close()


def test_other_requests_go_on_while_a_peer_is_silent() -> None:
    with LendingPeer(lending_engine([(PROMPT, None)]), ["silent"]) as peer:
        engine = asking_engine()
        waiting = replace(greedy_request("waits", PROMPT, 2), source=peer.offer())
        engine.add(waiting)
        engine.add(greedy_request("runs", PROMPT[::-1], 30))
        done: list[str] = []
        while "runs" not in done:
            done += [delta.request_id for delta in engine.step() if delta.finish_reason]
        assert done == ["runs"], "the other still waits for its peer"
        engine.abort("waits")
        assert not engine.has_work
        engine.check_invariants()
        engine.close()


def test_the_server_answers_so_many_peers_and_lets_nobody_hold_its_blocks() -> None:
    limits = {"connections": 2, "bytes_in_flight": 2**16, "serve_s": 1.0}
    with LendingPeer(lending_engine([(PROMPT, None)]), **limits) as peer:
        host, _, port = peer.server.address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(2)]
        assert all(len(one.recv(100)) == 24 for one in idle), "both were greeted"
        engine = asking_engine()
        assert ask(engine, peer.offer()) == 0
        assert peer.server.counters.busy == 1 and counted(engine).failed_fetches == 1
        for one in idle:
            assert one.recv(100) == b"", "whoever says nothing is cut"
            one.close()
        assert peer.engine.load().kv_usage == 0.0
        engine.close()
        second = asking_engine()
        assert ask(second, peer.offer()) == WHOLE * 16, "there is room again"
        second.close()


def test_more_than_can_be_answered_are_closed_at_once() -> None:
    with LendingPeer(lending_engine([(PROMPT, None)]), connections=1, serve_s=2.0) as peer:
        host, _, port = peer.server.address.rpartition(":")
        asking = [socket.create_connection((host, int(port))) for _ in range(5)]
        greeted = [len(one.recv(100)) for one in asking]
        assert greeted == [24, 24, 24, 24, 0] and peer.server.counters.busy == 1
        for one in asking:
            one.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        b"wrpeer00" + bytes(8),
        b"wrpeer01" + b"\xff" * 8,
        b"wrpeer01" + bytes(40),
    ],
    ids=["http", "older", "endless", "unsigned"],
)
def test_what_is_no_question_is_refused(said: bytes) -> None:
    with LendingPeer(lending_engine([(PROMPT, None)])) as peer:
        host, _, port = peer.server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(10.0)
            connection.sendall(said)
            answer = b""
            while data := connection.recv(100):
                answer += data
        assert answer[24:] == b"R" and peer.server.counters.refused == 1
        engine = asking_engine()
        assert ask(engine, peer.offer()) == WHOLE * 16, "others are served as before"
        engine.close()


def test_a_peer_without_memory_for_copies_gives_nothing_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(kv: PagedKv, slots: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with LendingPeer(lending_engine([(PROMPT, None)])) as peer:
        engine = asking_engine()
        with monkeypatch.context() as patch:
            patch.setattr(PagedKv, "read", refuses)
            assert ask(engine, peer.offer()) == 0
        assert counted(engine).gone == 1
        second = asking_engine()
        assert ask(second, peer.offer()) == WHOLE * 16
        for one in (engine, second):
            one.close()


# Over HTTP


def peer_config(**peers: Any) -> dict[str, Any]:
    return {
        "batch_invariant": True,
        "tiers": {"prefill_us_per_token": 50_000, "peers": {"secret": SECRET} | peers},
    }


def prompt_body(max_tokens: int = 8) -> dict[str, Any]:
    return {"prompt": list(PROMPT), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def peer_address(one: Running) -> str:
    assert one.peers is not None
    return one.peers.address


def test_two_replicas_over_http() -> None:
    async def main() -> None:
        async with (
            replica(**peer_config(listen="127.0.0.1:0")) as first,
            replica(**peer_config(allow=[f"127.0.0.0/8:{peer_address(first).rpartition(':')[2]}"])) as second,
        ):
            _, computed = await post(first.url + "/v1/completions", prompt_body())
            header = {"x-warmroute-kv-source": kv_source_value(peer_address(first), len(PROMPT))}
            status, pulled = await post(second.url + "/v1/completions", prompt_body(), **header)
            assert status == 200
            assert pulled["choices"] == computed["choices"]
            assert pulled["usage"]["prompt_tokens_details"]["cached_tokens"] == WHOLE * 16
            _, page = await get(second.url + "/metrics")
            assert await gauge(first.url, "warmroute:kv_peer_served_blocks_total") == WHOLE
            assert f"{WHOLE}.0" in next(line for line in page.splitlines() if 'medium="PEER"' in line)

    asyncio.run(main())


def test_only_whom_the_operator_allows_or_a_router_signs_is_asked() -> None:
    async def main() -> None:
        with LendingPeer(lending_engine([(PROMPT, None)])) as peer:
            address = peer.links[0].address
            port = address.rpartition(":")[2]
            config = peer_config(allow=[f"10.0.0.0/8:{port}", "*.pods:1"], router_key="router's")
            async with replica(**config) as one:

                async def cached(value: str) -> int:
                    header = {"x-warmroute-kv-source": value}
                    status, reply = await post(one.url + "/v1/completions", prompt_body(1), **header)
                    assert status == 200
                    found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                    await post(one.url + "/reset_prefix_cache", {})
                    return found

                refused = [
                    address,
                    f"localhost:{port}",
                    kv_source_value(address, None, b"no router's"),
                    "::",
                    "x",
                ]
                assert [await cached(value) for value in refused] == [0] * len(refused)
                assert peer.links[0].connections == 0, "nobody was connected to"
                assert await cached(kv_source_value(address, None, b"router's")) == WHOLE * 16
                _, page = await get(one.url + "/metrics")
                counts = {
                    line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
                    for line in page.splitlines()
                    if line.startswith("warmroute:kv_sources_total{")
                }
                assert counts == {"taken": 1.0, "refused": 3.0, "malformed": 2.0}

    asyncio.run(main())


def test_the_replica_goes_on_when_its_peer_dies_mid_way() -> None:
    async def main() -> None:
        async with replica(**peer_config(listen="127.0.0.1:0")) as first:
            await post(first.url + "/v1/completions", prompt_body(1))
            with socket.create_server(("127.0.0.1", 0)) as dead:
                address = f"127.0.0.1:{dead.getsockname()[1]}"
                async with replica(**peer_config(allow=[address])) as second:
                    asked = asyncio.create_task(
                        post(
                            second.url + "/v1/completions",
                            prompt_body(),
                            **{"x-warmroute-kv-source": address},
                        )
                    )
                    connection, _ = await asyncio.to_thread(dead.accept)
                    connection.close()
                    status, reply = await asked
                    _, computed = await post(first.url + "/v1/completions", prompt_body())
                    assert status == 200 and reply["choices"] == computed["choices"]
                    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

                    async def idle() -> bool:
                        return await gauge(second.url, "vllm:num_requests_running") == 0.0

                    await until(idle)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("peers", "complaint"),
    [
        ({}, "tiers.peers.secret: Field required"),
        ({"secret": ""}, "tiers.peers.secret"),
        ({"secret": "${NOBODY_SETS_THIS}"}, "NOBODY_SETS_THIS is not set"),
        ({"secret": {"file": "/nowhere"}}, "the file cannot be read"),
        ({"secret": "s", "listen": "nowhere"}, "expected HOST:PORT"),
        ({"secret": "s", "allow": ["10.0.0.0/8"]}, "expected HOST:PORT, NETWORK/BITS:PORT or *.NAME:PORT"),
        ({"secret": "s", "allow": ["*:80"]}, "allows every host"),
        ({"secret": "s", "connections": 0}, "tiers.peers.connections"),
        ({"secret": "s", "routerkey": "x"}, "unknown key"),
    ],
)
def test_wrong_keys_are_named(peers: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"model": "tiny", "tiers": {"peers": peers}}, "replica.yaml")
    assert complaint in str(error.value) and str(error.value).startswith("replica.yaml: tiers.peers")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-a-file\n")
    config = parse_config(
        {"model": "tiny", "tiers": {"peers": {"secret": {"file": str(tmp_path / "secret")}}}}, "replica.yaml"
    )
    assert config.tiers is not None and "from-a-file" not in repr(config)
    assert config.tiers.limits().peers is not None
    assert "from-a-file" not in repr(config.tiers.limits())
