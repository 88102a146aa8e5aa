"""What a router has learned, in pieces: written down for a router that starts, or into a file.

Which replicas hold which prompts, how fast they are, what the traffic is like, and the operators' orders.
What is in flight is not in it: that ends with the router.
"""

from collections.abc import Iterable, Iterator

from router.routing.fleet import Fleet
from router.routing.peer_events import PeerEvent, PromptStored, ReplicaDrained
from router.state.wire import FleetLearned, Knowledge, ReplicaLearned

CHUNK_KEYS = 2_048
"""A chunk has about so many block keys: 18 KB, some 0.3 ms to make and 1 ms to take in."""


def written_down(fleet: Fleet) -> Iterator[list[Knowledge]]:
    """All of it, in chunks, the least recently used prompts first. The fleet may go on between chunks."""
    ratio, traffic = fleet.token_ratio, fleet.traffic
    chunk: list[Knowledge] = [
        FleetLearned(
            fleet.speed.learned,
            *ratio.learned,
            traffic.output_tokens,
            traffic.allowed_ttft_s,
            fleet.tenants.most_routers,
        )
    ]
    replicas = fleet.replicas.staying
    for replica in replicas:
        chunk.append(ReplicaLearned(replica.name, replica.cost.learned))
        if replica.drain_version:
            chunk.append(ReplicaDrained(replica.name, replica.draining, replica.drain_version))
    keys_in_chunk = 0
    for replica in replicas:
        if replica not in fleet.replicas:
            continue  # it left meanwhile
        for naming, keys, namespace in fleet.caches.chains(replica.index):
            chunk.append(PromptStored(replica.name, keys, naming, fleet.tenants.one_of(namespace)))
            keys_in_chunk += len(keys)
            if keys_in_chunk >= CHUNK_KEYS:
                yield chunk
                chunk, keys_in_chunk = [], 0
                if replica not in fleet.replicas:
                    break
    if chunk:
        yield chunk


def taken_in(fleet: Fleet, router: str, pieces: Iterable[Knowledge], now: float) -> None:
    """``router`` wrote this down. What this one has seen more of itself stays."""
    events: list[PeerEvent] = []
    by_name = {replica.name: replica for replica in fleet.replicas.staying}
    for piece in pieces:
        if isinstance(piece, FleetLearned):
            fleet.speed.resumed(piece.learned)
            fleet.token_ratio.resumed(piece.prompt_tokens, piece.prompt_units)
            fleet.traffic.resumed(piece.output_tokens, piece.allowed_ttft_s)
            fleet.tenants.seen(piece.routers)
        elif isinstance(piece, ReplicaLearned):
            if piece.replica in by_name:
                by_name[piece.replica].cost.resumed(piece.learned)
        elif isinstance(piece, PromptStored | ReplicaDrained):
            events.append(piece)
    fleet.peers.told(router, events, now)
