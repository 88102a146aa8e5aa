"""The requests of a trace as they go over HTTP, so that a simulated router reads what a real one reads.

Not only the words: that a request is streamed and how long its answer may be change what a router learns and
expects.
"""

from collections.abc import Callable, Sequence
from typing import Any

from router.routing.prompt_blocks import Prompt, text_prompt
from sim.replay import ReplaySettings, made_up_messages, request_body
from sim.workload.arrivals import plan_arrivals
from sim.workload.prompt_text import PromptText
from sim.workload.trace import Trace, TraceRequest

Body = dict[str, Any]


def bodies_of(trace: Trace, settings: ReplaySettings) -> tuple[Body, ...]:
    """What ``replay`` sends for each request of ``trace``, which is timed and has no words of its own."""
    words = PromptText(
        trace.block_tokens, salt=settings.salt, characters_per_token=settings.characters_per_token
    )
    made = {
        id(arrival.request): request_body(
            settings, arrival.request, made_up_messages(words, arrival.request, position)
        )
        for position, arrival in enumerate(plan_arrivals(trace, seed=settings.seed))
    }
    return tuple(made[id(request)] for request in trace.requests)


def reader(trace: Trace, bodies: Sequence[Body]) -> Callable[[TraceRequest], Prompt]:
    """Reads a request of ``trace`` as a router does that gets the body at its place."""
    sent = {id(request): body for request, body in zip(trace.requests, bodies, strict=True)}
    return lambda request: text_prompt(sent[id(request)])
