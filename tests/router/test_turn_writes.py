"""Bytes that wait for the end of a turn of the loop: which do, in which order they go, who gets none."""

import asyncio
from typing import Any

from router.proxy.client_connection import ClientConnection
from router.proxy.turn_writes import ALONE_TURNS, AT_ONCE, MOST_WAITING, SHORT_BYTES, LateWriter, TurnWrites
from tests.fakes.proxy_rig import CHAT, Rig, with_rig


class _Wire(asyncio.Transport):
    """Notes what is written, in ``log`` with its name."""

    def __init__(self, name: str, log: list[tuple[str, bytes]]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.broken = self.aborted = False

    def write(self, data: Any) -> None:
        if self.broken:
            raise RuntimeError("the handler is closed")
        self.log.append((self.name, bytes(data)))

    def abort(self) -> None:
        self.aborted = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class _Desk:
    """Writers of one data plane, by name."""

    def __init__(self, names: str) -> None:
        self.log: list[tuple[str, bytes]] = []
        self.writes = TurnWrites()
        self.wires = {name: _Wire(name, self.log) for name in names}
        self.writers: dict[str, LateWriter] = {}
        for name, wire in self.wires.items():
            writer = self.writers[name] = LateWriter(self.writes)
            writer.transport = wire


async def _turn() -> None:
    await asyncio.sleep(0)


def test_what_is_written_in_one_turn_goes_at_its_end_in_order() -> None:
    async def scenario() -> None:
        desk = _Desk("ab")
        a, b = desk.writers["a"], desk.writers["b"]
        a.write(b"1")
        b.write(b"2")
        a.write(b"3")
        assert desk.log == []
        await _turn()
        assert desk.log == [("a", b"13"), ("b", b"2")]
        await _turn()
        assert len(desk.log) == 2

    asyncio.run(scenario())


def test_who_always_writes_alone_does_not_wait_until_others_join() -> None:
    async def scenario() -> None:
        desk = _Desk("ab")
        a, b = desk.writers["a"], desk.writers["b"]
        for turn in range(ALONE_TURNS):
            a.write(b"alone")
            assert len(desk.log) == turn
            await _turn()
        for _ in range(3):  # it stays so while it is alone, but for one turn in which that is seen
            known = len(desk.log)
            for count in range(AT_ONCE):
                b.write(b"at once")
                assert len(desk.log) == known + count + 1
            b.write(b"waits")
            assert desk.log[-1] == ("b", b"at once")
            await _turn()
            assert desk.log[-1] == ("b", b"waits")
        for _ in range(AT_ONCE):
            a.write(b"at once")
        a.write(b"waits")
        b.write(b"waits, too")
        await _turn()
        a.write(b"waits again")
        assert desk.log[-2:] == [("a", b"waits"), ("b", b"waits, too")]

    asyncio.run(scenario())


def test_long_bytes_do_not_wait_and_pass_nothing_that_waits() -> None:
    async def scenario() -> None:
        desk = _Desk("ab")
        a, b = desk.writers["a"], desk.writers["b"]
        b.write(b"b")
        a.write(b"head")
        a.write(b"x" * SHORT_BYTES)
        assert [(name, len(data)) for name, data in desk.log] == [("a", 4), ("a", SHORT_BYTES)]
        a.write(b"tail")
        await _turn()
        assert dict(desk.log[2:]) == {"a": b"tail", "b": b"b"}
        assert (
            b"".join(data for name, data in desk.log if name == "a") == b"head" + b"x" * SHORT_BYTES + b"tail"
        )

    asyncio.run(scenario())


def test_only_so_many_wait() -> None:
    async def scenario() -> None:
        desk = _Desk("".join(chr(ord("A") + place) for place in range(MOST_WAITING + 1)))
        for writer in desk.writers.values():
            writer.write(b"x")
        assert len(desk.log) == MOST_WAITING
        await _turn()
        assert [name for name, _ in desk.log] == list(desk.writers)

    asyncio.run(scenario())


def test_who_cannot_write_keeps_nobody_from_it() -> None:
    async def scenario() -> None:
        desk = _Desk("abc")
        desk.wires["b"].broken = True
        for writer in desk.writers.values():
            writer.write(b"x")
        desk.writers["a"].drop_unsent()
        await _turn()
        assert desk.log == [("c", b"x")]
        assert desk.wires["b"].aborted and not desk.wires["c"].aborted

    asyncio.run(scenario())


def test_a_client_that_has_sent_all_it_will_gets_the_answer_that_waits() -> None:
    """It closes its side in the turn in which it is answered; after that the transport would take no more."""

    async def scenario(rig: Rig) -> None:
        log: list[tuple[str, bytes]] = []
        client = ClientConnection(rig.plane)
        client.connection_made(_Wire("client", log))
        client.data_received(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert log == []
        client.eof_received()
        assert len(log) == 1 and log[0][1].startswith(b"HTTP/1.1 200 ")
        client.connection_lost(None)

    with_rig(scenario)


def test_many_clients_at_once_get_their_own_answers_on_few_connections() -> None:
    """Connections to replicas change hands within a turn, before what was written to them has gone."""

    async def scenario(rig: Rig) -> None:
        clients = [await rig.client() for _ in range(40)]
        for _ in range(5):
            for client in clients:
                await client.post(CHAT)
            assert [(await client.answer()).status for client in clients] == [200] * len(clients)
        assert len(rig.replica.requests) == 5 * len(clients)
        assert rig.counters.in_flight == 0

    with_rig(scenario)
