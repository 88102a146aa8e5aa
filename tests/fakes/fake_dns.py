"""A DNS server on a UDP port, and on the TCP port of that number, that knows SRV records and can fail."""

import asyncio

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class FakeDns(asyncio.DatagramProtocol):
    """Answers every question with ``records``."""

    def __init__(self) -> None:
        self.records: list[str] = []
        """Data of SRV records: priority, weight, port, target."""
        self.ttl = 1
        self.aliases: list[str] = []
        """The name asked for is an alias (CNAME) of the first, that of the next, and so on; the last has
        ``records``."""
        self.truncates = False
        """Answers over UDP have no records: one has to ask over TCP."""
        self.questions_by_tcp = 0
        self.rcode = dns.rcode.NOERROR
        self.questions = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._by_tcp, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", port))
        self.address = f"127.0.0.1:{port}"

    def stop(self) -> None:
        """Close the port."""
        if self._transport is not None:
            self._transport.close()
        if self._server is not None:
            self._server.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """One question."""
        assert self._transport is not None
        self._transport.sendto(self._answer(data, truncated=self.truncates), addr)

    async def _by_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        self.questions_by_tcp += 1
        answer = self._answer(data, truncated=False)
        writer.write(len(answer).to_bytes(2) + answer)
        writer.close()

    def _answer(self, data: bytes, *, truncated: bool) -> bytes:
        self.questions += 1
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.rcode)
        if truncated:
            answer.flags |= dns.flags.TC
        elif self.rcode == dns.rcode.NOERROR:
            name = question.question[0].name.to_text()
            for alias in self.aliases:
                answer.answer.append(dns.rrset.from_text(name, self.ttl, "IN", "CNAME", alias))
                name = alias
            if self.records:
                answer.answer.append(dns.rrset.from_text_list(name, self.ttl, "IN", "SRV", self.records))
        return answer.to_wire()
