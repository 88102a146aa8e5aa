"""A DNS server on a UDP port that knows SRV records and can fail."""

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
        self.rcode = dns.rcode.NOERROR
        self.questions = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._transport.get_extra_info('sockname')[1]}"

    def stop(self) -> None:
        """Close the port."""
        if self._transport is not None:
            self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """One question."""
        self.questions += 1
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.rcode)
        if self.records and self.rcode == dns.rcode.NOERROR:
            name = question.question[0].name
            answer.answer.append(dns.rrset.from_text_list(name, 1, "IN", "SRV", self.records))
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), addr)
