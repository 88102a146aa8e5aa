"""A second pool that only decodes: prompts are prefilled in the first and their KV moves over the network.

A request is prefilled in the first pool, its KV is sent to a replica of the second, and that one generates
every token, the first included (as vLLM's and llm-d's disaggregated serving do). Time to first token
therefore holds the transfer and the wait for a decode slot.

The default times of a transfer are llm-d's measurements of pulling KV from a peer (gpt-oss-120b, H200, 2026):
2,048 tokens 35 ms, 8,192 57, 16,384 86, 32,768 165, 49,152 235: about 26 ms + 4.3 µs a token.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from replica.batch import Batch
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from sim.event_queue import EventQueue
from sim.replica_row import ReplicaRow
from sim.simulated_replica import ReplicaEvents, ReplicaSettings
from sim.step_time.step_time import StepTime


@dataclass(frozen=True, slots=True)
class DecodePoolSettings:
    """The second pool and the way to it."""

    replicas: int
    policy: str = "least_loaded"
    transfer_s: float = 0.026
    """Of any KV, however short."""
    transfer_token_s: float = 4.3e-6
    """Per prompt token, on top."""


@dataclass(frozen=True, slots=True)
class TransferredStepTime:
    """Steps of a replica whose prompts arrive computed: a new request costs what one more decode costs."""

    step_time: StepTime

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``; its prefill rows are KV that is already there."""
        chunks = batch.prefills
        if not chunks:
            return self.step_time.seconds(batch)
        arrived = [chunk for chunk in chunks if chunk.samples]
        context = batch.decode_context_tokens + sum(chunk.start + chunk.count for chunk in arrived)
        return self.step_time.seconds(Batch((), batch.decode_sequences + len(arrived), context, 0))


class _Decode:
    """One request in the second pool."""

    __slots__ = ("finished", "first_token", "flight")

    def __init__(
        self,
        flight: InFlight,
        first_token: Callable[[], None],
        finished: Callable[[int], None],
    ) -> None:
        self.flight = flight
        self.first_token = first_token
        self.finished = finished


class DecodePool:
    """Takes prefilled requests, moves their KV, decodes them."""

    def __init__(
        self,
        queue: EventQueue,
        pool: DecodePoolSettings,
        replica: ReplicaSettings,
        step_time: StepTime,
        *,
        block_tokens: int,
        seed: int,
        network_delay_s: float,
    ) -> None:
        self._queue = queue
        self._settings = pool
        self._block_tokens = block_tokens
        self._delay_s = network_delay_s
        self._fleet = Fleet(
            [ReplicaSpec(f"decode-{index}", f"sim://decode-{index}") for index in range(pool.replicas)],
            POLICIES[pool.policy](random.Random(f"{seed} decode {pool.policy}")),
            FleetSettings(),
            layout=UniformLayout(block_tokens),
            tokens_per_unit=1.0,
            use_index=False,
        )
        # The whole prompt arrives at once, and blocks that were moved are nobody else's.
        settings = replace(
            replica,
            max_batched_tokens=max(replica.max_batched_tokens, replica.max_model_len),
            prefix_caching=False,
        )

        def make(one: ReplicaSettings) -> Scheduler:
            return one.scheduler(block_tokens)

        self._row = ReplicaRow(
            queue,
            [settings] * pool.replicas,
            TransferredStepTime(step_time),
            ReplicaEvents(self._first_token, self._finished, self._refused),
            make,
        )

    def take(
        self,
        name: str,
        prompt: Prompt,
        output_tokens: int,
        first_token: Callable[[], None],
        finished: Callable[[int], None],
    ) -> None:
        """``prompt`` is prefilled: move it and generate. ``finished`` gets how many tokens; 0: refused."""
        settings = self._settings
        now = self._queue.now
        flight = self._fleet.sent(prompt, self._fleet.decide(prompt, now), now)
        sequence = Sequence.of_blocks(
            name,
            prompt.keys,
            prompt.units,
            output_tokens,
            block_size=self._block_tokens,
            parameters=_Decode(flight, first_token, finished),
        )
        arrives_s = now + settings.transfer_s + settings.transfer_token_s * prompt.units
        self._queue.at(arrives_s, self._row.accept, flight.replica.index, sequence)

    def _first_token(self, sequence: Sequence) -> None:
        request = _decode(sequence)
        self._queue.at(self._queue.now + self._delay_s, self._first_token_seen, request)

    def _first_token_seen(self, request: _Decode) -> None:
        self._fleet.first_token(request.flight, self._queue.now)
        request.first_token()

    def _finished(self, sequence: Sequence) -> None:
        self._queue.at(self._queue.now + self._delay_s, self._finished_seen, sequence)

    def _finished_seen(self, sequence: Sequence) -> None:
        request = _decode(sequence)
        usage = Usage(sequence.prompt_tokens, sequence.output_tokens, 0)
        self._fleet.finished(request.flight, self._queue.now, usage)
        request.finished(sequence.output_tokens)

    def _refused(self, sequence: Sequence) -> None:
        request = _decode(sequence)
        self._fleet.refused(request.flight, self._queue.now)
        request.finished(0)


def _decode(sequence: Sequence) -> _Decode:
    request = sequence.parameters
    assert isinstance(request, _Decode)
    return request
