"""The engine: ``step()`` schedules a batch, runs it through the model, commits it, and tells what is new."""

import random
import time
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from replica.batch import Batch, Work
from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.engine_limits import EngineLimits
from replica.kv_cache.cache import Cache
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.kv_cache.tier_settings import TierCounters
from replica.model.load import LoadedModel
from replica.model.reply_text import ReplyText
from replica.model.runner import ModelRunner, NotFinite
from replica.model.sampler import Draws
from replica.model.sampling import Drawn
from replica.request import Delta, Request
from replica.scheduler import Scheduler
from replica.sequence import Sequence
from replica.tier_movers.engine_tiers import EngineTiers

DISK_PATIENCE_S = 0.005
"""How long a step that has nothing to compute waits for a disk, and a request that comes meanwhile for it."""
MOST_FAILED_STEPS = 3
"""This many steps in a row in which the model fails for every row: the engine, not a request, is broken."""


class EngineBroken(RuntimeError):
    """The engine cannot compute any more."""


@dataclass(slots=True)
class _Reply:
    """What the engine keeps of a request beside the scheduler's sequence."""

    request: Request
    sequence: Sequence
    draws: Draws
    text: ReplyText
    unsent: list[Drawn] = field(default_factory=list)


class Engine:
    """A model behind a scheduler. Not thread-safe: one thread calls everything."""

    def __init__(self, model: LoadedModel, limits: EngineLimits, seed: int = 0) -> None:
        """``seed`` is where requests without a seed of their own get theirs from.

        Raises OSError when the folder of the disk tier cannot be used, ValueError for a tier below one block.
        """
        self.limits = limits
        kv_cache = limits.make_cache()
        cache: Cache[Any] = kv_cache
        self._states: StateCheckpoints | None = None
        if model.shape.recurrent:
            if limits.tiers is not None:
                raise ValueError(
                    f"model {model.name} has recurrent layers, whose states stay on the device: KV below "
                    "it would never be hit; remove tiers"
                )
            self._states = limits.make_states()
            cache = HybridCache(kv_cache, self._states)
        self._runner = ModelRunner(
            model,
            blocks=cache.blocks,
            block_size=cache.block_size,
            batch_invariant=limits.batch_invariant,
            kv_int8=limits.kv_int8,
            states=self._states,
        )
        self._kv = self._runner.kv
        self._scheduler = Scheduler(cache, limits.scheduler_limits(cache.block_size))
        self._tiers: EngineTiers | None = None
        if limits.tiers is not None:
            self._tiers = EngineTiers(model, limits, limits.tiers, self._kv, self._scheduler)
        self._tokenizer = model.tokenizer
        self._seeds = random.Random(seed)
        self._replies: dict[str, _Reply] = {}
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        """``step`` has something to do."""
        return self._scheduler.has_work or (self._tiers is not None and self._tiers.busy)

    @property
    def preemptions(self) -> int:
        """Counter: how often a running request lost its blocks and had to recompute."""
        return self._scheduler.preemptions

    @property
    def tier_counters(self) -> TierCounters | None:
        """What became of blocks on lower tiers; None without any."""
        return self._tiers.counters if self._tiers is not None else None

    @property
    def fingerprint(self) -> str:
        """Of all that KV depends on beside tokens; empty where no other process gets or gives any."""
        return self._tiers.fingerprint if self._tiers is not None else ""

    def lend(self, prompt: Sequence, wanted: abc.Sequence[int]) -> list[tuple[bytes, memoryview]]:
        """(chained hash, KV) of the blocks ``wanted`` of ``prompt``, up to the first that is not here.

        Between two steps only. For other replicas; ``prompt`` is no request and may be asked for again.
        """
        return self._tiers.lend(prompt, wanted) if self._tiers is not None else []

    @property
    def states(self) -> StateCheckpoints | None:
        """Recurrent states and what became of their checkpoints; None for a model without any."""
        return self._states

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run here (RequestTooLong), or its id is in use.
        """
        sequence = Sequence(
            request.request_id,
            request.prompt,
            request.max_tokens,
            priority=request.priority,
            salt=request.salt,
        )
        if request.request_id in self._replies:
            raise ValueError(f"request id {request.request_id} is in use: give each request its own")
        self._scheduler.check(sequence)
        stops = request.stops
        self._replies[request.request_id] = _Reply(
            request,
            sequence,
            Draws(
                request.sampling,
                self._seeds.getrandbits(63),
                stops.end_ids | stops.stop_ids,
                stops.min_tokens,
            ),
            ReplyText(self._tokenizer, stops, skip_special_tokens=request.skip_special_tokens),
        )
        if self._tiers is None or not self._tiers.fetch_for(sequence, request.source):
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks; nothing if it is over already."""
        self._scheduler.abort(request_id)
        if self._tiers is not None:
            self._tiers.abort(request_id)
        self._replies.pop(request_id, None)

    def step(self) -> list[Delta]:
        """Run one batch; what it added, per request that has something to tell.

        Raises:
            EngineBroken: several steps in a row failed as a whole.
        """
        if self._tiers is not None:
            self._tiers.advance()
        batch = self._scheduler.schedule()
        if self._tiers is not None:
            self._tiers.save_evicted()
        if batch.empty:
            if self._tiers is not None:
                self._tiers.advance(DISK_PATIENCE_S)
            return []
        began_s = time.monotonic()
        drawn, failed = self._run(batch)
        if self._tiers is not None:
            self._tiers.ran(batch, time.monotonic() - began_s)
        deltas = [self._fail(request_id, message) for request_id, message in failed.items()]
        # A failed request left the scheduler; commit drops its row and so publishes none of its blocks.
        self._scheduler.commit(batch, {name: token.token for name, token in drawn.items()})
        for request_id, token in drawn.items():
            delta = self._advance(self._replies[request_id], token)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def prepare(self) -> bool:
        """Do a bit, a few ms, of what later steps need, while there is no work; False: nothing is left."""
        return self._kv.take_ahead()

    def load(self) -> LoadReport:
        """Gauges and counters of scheduler and cache."""
        load = self._scheduler.load()
        if self._tiers is None:
            return load
        return replace(load, waiting=(load.waiting or 0) + len(self._tiers.waiting))

    def stranded_tokens(self) -> int:
        """Positions whose KV is resident but can never be hit. O(blocks)."""
        return self._scheduler.cache.stranded_tokens()

    def take_events(self) -> list[CacheEvent]:
        """Cache events since the last call, in order."""
        events = self._scheduler.take_events()
        if self._tiers is not None:
            below = self._tiers.take_events()  # in any case, or they pile up
            if self.limits.record_events:
                events += below
        return events

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, on every tier; False, changing nothing, while requests run."""
        done = self._scheduler.reset_cache()
        if done and self._tiers is not None:
            self._tiers.forget_all()
        return done

    def close(self) -> None:
        """Let go of threads and files. Nothing may be called after it."""
        if self._tiers is not None:
            self._tiers.close()

    def check_invariants(self) -> None:
        """Raise AssertionError unless scheduler, cache and replies agree; for tests."""
        self._scheduler.check_invariants()
        known = {s.request_id for s in (*self._scheduler.running, *self._scheduler.waiting)}
        if self._tiers is not None:
            self._tiers.check_invariants()
            known |= {sequence.request_id for sequence in self._tiers.waiting}
        assert known == set(self._replies), "replies and sequences differ"

    def _run(self, batch: Batch) -> tuple[dict[str, Drawn], dict[str, str]]:
        """Tokens drawn and failures, by request. When the batch fails, each row is tried alone.

        Trying again is safe: a row writes the same KV into the same blocks.
        """
        drawn: dict[str, Drawn] = {}
        failed: dict[str, str] = {}
        ran = 0
        try:
            works, logits = self._runner.run(batch)
        except Exception:
            for row in batch.rows:
                try:
                    works, logits = self._runner.run(Batch((row,), 0, 0, row.count))
                except NotFinite as error:
                    ran += 1  # the model works; this request breaks it
                    failed[row.sequence.request_id] = _message(error)
                except Exception as error:
                    failed[row.sequence.request_id] = _message(error)
                else:
                    ran += 1
                    self._draw(works, logits, drawn, failed)
        else:
            ran = len(batch.rows)
            self._draw(works, logits, drawn, failed)
        self._failed_steps = 0 if ran else self._failed_steps + 1
        if self._failed_steps >= MOST_FAILED_STEPS:
            raise EngineBroken(f"the last {self._failed_steps} steps failed: {next(iter(failed.values()))}")
        return drawn, failed

    def _draw(
        self, works: tuple[Work, ...], logits: torch.Tensor, drawn: dict[str, Drawn], failed: dict[str, str]
    ) -> None:
        for row, work in enumerate(works):
            sequence = work.sequence
            try:
                drawn[sequence.request_id] = self._replies[sequence.request_id].draws.draw(
                    logits[row], sequence.token_ids, sequence.prompt_tokens
                )
            except Exception as error:
                failed[sequence.request_id] = _message(error)

    def _advance(self, reply: _Reply, drawn: Drawn) -> Delta | None:
        """Take a committed token into the reply; ends the request when a stop rule says so."""
        stops, sequence = reply.request.stops, reply.sequence
        reply.unsent.append(drawn)
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        text = ""
        if drawn.token in stops.end_ids or drawn.token in stops.stop_ids:
            finish_reason = "stop"
            stop_reason = drawn.token if drawn.token in stops.stop_ids else None
        else:
            text = reply.text.push(drawn.token)
            if reply.text.stopped_by is not None:
                finish_reason, stop_reason = "stop", reply.text.stopped_by
            elif sequence.output_tokens >= reply.request.max_tokens:
                finish_reason = "length"
        if finish_reason is not None:
            text += reply.text.close()
            if finish_reason == "length" and reply.text.stopped_by is not None:
                finish_reason, stop_reason = "stop", reply.text.stopped_by
            self._scheduler.finish(sequence, finish_reason)
            del self._replies[sequence.request_id]
        elif not text:
            return None
        tokens, reply.unsent = tuple(reply.unsent), []
        return Delta(
            sequence.request_id,
            text,
            tokens,
            sequence.prompt_tokens,
            sequence.cached_tokens,
            sequence.output_tokens,
            finish_reason,
            stop_reason,
        )

    def _fail(self, request_id: str, message: str) -> Delta:
        reply = self._replies.pop(request_id)
        sequence = reply.sequence
        self._scheduler.finish(sequence, "error")
        return Delta(
            request_id,
            "",
            (),
            sequence.prompt_tokens,
            sequence.cached_tokens,
            sequence.output_tokens,
            finish_reason="error",
            error=message,
        )


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
