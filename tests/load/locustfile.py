"""Users for locust: chats, agents and RAG, each with prompts that share what real ones share.

Each reports three entries: ``answer`` (a whole stream, first byte to ``[DONE]``), ``TTFT`` and
``inter-token`` (one sample per answer: its mean time per token after the first; tokens as ``usage`` counts
them, since an event may carry several). A stream that breaks off, carries an error or ends without ``[DONE]``
is a failure of ``answer``, whatever its status was. How to read them: docs/load_testing.md.

Prompts begin with this run's id (``LOAD_RUN``), so that no run is answered from the caches of another.
"""

import os
import random
import secrets
import sys
import time
from typing import Any

from locust import User, between, constant, events, task

from sim.demo.personas import PERSONAS
from sim.results import CLUMPED_LIMIT
from tests.load import shapes
from tests.load.stream_client import Message, StreamClient, Usage

RUN = os.environ.get("LOAD_RUN") or secrets.token_hex(4)
SEED = int(os.environ.get("LOAD_SEED", "1"))
SYSTEM_CHARACTERS = int(os.environ.get("LOAD_SYSTEM_CHARACTERS", "700"))
DOCUMENT_CHARACTERS = int(os.environ.get("LOAD_DOCUMENT_CHARACTERS", "400"))
DOCUMENTS = 40
TURNS = 3
STEPS = (3, 6)
"""Tool calls of one agent task, at least and at most."""
NATIVE_TOOLS = bool(os.environ.get("LOAD_TOOLS"))
TOOL_NAMES = ("read_file", "search", "run_tests")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} in the working copy; returns what it printed",
            "parameters": {"type": "object", "properties": {"argument": {"type": "string"}}},
        },
    }
    for name in TOOL_NAMES
]
THINK = float(os.environ.get("LOAD_THINK", "1"))
"""All pauses are multiplied by it."""
CLIENT_LIMIT = float(os.environ.get("LOAD_CLIENT_LIMIT", "0.7"))
"""Share of its core above which this program may be what is measured."""

if os.environ.get("LOAD_SHAPE"):
    Shape = shapes.SHAPES[os.environ["LOAD_SHAPE"]]


def system_prompt(text: str) -> Message:
    """``text`` as this run's system prompt."""
    return {"role": "system", "content": f"[run {RUN}] {text}"[:SYSTEM_CHARACTERS]}


class StreamUser(User):
    """What all users have."""

    abstract = True
    kind = ""

    def on_start(self) -> None:
        """A connection and randomness of its own."""
        self.client = StreamClient(str(self.host), self.kind)
        self.rng = random.Random(f"{SEED} {self.kind} {secrets.token_hex(4)}")


class ChatUser(StreamUser):
    """Holds one conversation after another, each request with the whole history."""

    kind = "chat"
    weight = 3
    wait_time = between(0.2 * THINK, 1.0 * THINK)

    def on_start(self) -> None:
        """Nothing said yet."""
        super().on_start()
        self.messages: list[Message] = []

    @task
    def next_turn(self) -> None:
        """Say the next thing, read the answer; after the last turn or a failure begin anew."""
        if not self.messages or len(self.messages) > 2 * TURNS:
            self.persona = self.rng.choice(PERSONAS)
            self.messages = [system_prompt(self.persona.system)]
        says = self.rng.choice(self.persona.openings if len(self.messages) == 1 else self.persona.follow_ups)
        self.messages.append({"role": "user", "content": says[:120]})
        text = self.client.ask(self.messages)
        self.messages = [] if text is None else [*self.messages, {"role": "assistant", "content": text}]


class AgentUser(StreamUser):
    """Works on one task after another: each step calls a tool and goes on at once with all before it.

    Tools are told in the system prompt, and what they print comes back as a user's message, unless
    ``LOAD_TOOLS`` is set: then both have OpenAI's form, which the engine's chat template has to know.
    """

    kind = "agent"
    wait_time = constant(0.5 * THINK)

    @task
    def work(self) -> None:
        """One task, step by step; a failure ends it."""
        persona = self.rng.choice(PERSONAS)
        told = "" if NATIVE_TOOLS else f"You may call {', '.join(TOOL_NAMES)}. "
        messages = [system_prompt(f"You are an agent. {told}{persona.system}")]
        messages.append({"role": "user", "content": self.rng.choice(persona.openings)[:200]})
        for step in range(self.rng.randint(*STEPS)):
            text = self.client.ask(messages, **({"tools": TOOLS} if NATIVE_TOOLS else {}))
            if text is None:
                return
            messages += self._called(step, text)

    def _called(self, step: int, text: str) -> list[Message]:
        """What the model said, and what the tool printed."""
        name = self.rng.choice(TOOL_NAMES)
        printed = f"{name} {step}: {self.rng.random()} " * 4
        if not NATIVE_TOOLS:
            return [{"role": "assistant", "content": text}, {"role": "user", "content": printed}]
        call = {
            "id": f"call_{step}",
            "type": "function",
            "function": {"name": name, "arguments": f'{{"argument": "{step}"}}'},
        }
        return [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": printed},
        ]


class RagUser(StreamUser):
    """Asks about documents, some of which everybody asks about; no question has a history."""

    kind = "rag"
    wait_time = between(0.5 * THINK, 2.0 * THINK)

    @task
    def ask(self) -> None:
        """One question with two documents before it; the first is popular by Zipf's law."""
        ranks = self.rng.choices(range(DOCUMENTS), [1 / (rank + 1) for rank in range(DOCUMENTS)], k=2)
        documents = "\n\n".join(document(rank) for rank in ranks)
        question = self.rng.choice(PERSONAS[0].openings)[:120]
        said = {"role": "user", "content": f"{documents}\n\n{question} {self.rng.random()}"}
        self.client.ask([system_prompt("Answer from the documents."), said])


def document(rank: int) -> str:
    """The document of this rank, always the same."""
    words = random.Random(rank).choices(PERSONAS[rank % len(PERSONAS)].system.split(), k=DOCUMENT_CHARACTERS)
    return f"Document {rank}. {' '.join(words)}"[:DOCUMENT_CHARACTERS]


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def remember_start(environment: Any, **_: Any) -> None:
    """Processor time counts from here on."""
    environment.load_began = (time.process_time(), time.perf_counter())


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def tell_the_run(environment: Any, **_: Any) -> None:
    """What every report must have beside its times: the run, its hit share, how busy the client was.

    A run in which nothing was answered is a failed run.
    """
    if not any(
        entry.num_requests > entry.num_failures
        for (name, _), entry in environment.stats.entries.items()
        if name == "answer"
    ):
        print("load: no answer was counted; is the server reachable?", file=sys.stderr)
        environment.process_exit_code = 1
    began = getattr(environment, "load_began", None)
    if began is None:
        return
    cpu_s, wall_s = time.process_time() - began[0], time.perf_counter() - began[1]
    share = Usage.cached / Usage.prompt if Usage.prompt else 0.0
    print(
        f"load: run {RUN}, seed {SEED}: {Usage.cached:,} of {Usage.prompt:,} prompt tokens were cached "
        f"({share:.1%}); the client used {cpu_s / wall_s:.0%} of its core",
        file=sys.stderr,
    )
    if Usage.clumped > CLUMPED_LIMIT * Usage.events:
        print(
            f"load: CLUMPED: {Usage.clumped / Usage.events:.0%} of events came at once with the one before: "
            "something on the way collects them, or the replica sends them so. inter-token is the buffer's",
            file=sys.stderr,
        )
    if cpu_s > CLIENT_LIMIT * wall_s:
        print(
            f"load: MARKED: over {CLIENT_LIMIT:.0%}: these times may be the client's own. Fewer users, or "
            "several clients (locust --processes)",
            file=sys.stderr,
        )
