"""The demo's script: which conversation starts when and what its user says. Same seed, same script.

Times are in units of one cold prefill of a system prompt on an idle replica, so that a script loads a slow
machine and a fast one alike.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from sim.demo.personas import PERSONAS, POPULAR, Persona

NAMES = ("Lindqvist", "Okafor", "Moreau", "Tanaka", "Novak", "Silva", "Haddad", "Brandt", "Kowalska", "Reyes")
CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
START_EVERY = 0.75
BURST_WITHIN = 0.5
THINK = (0.2, 0.8)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One user's conversation; times in units (see above)."""

    name: str
    persona: str
    system: str
    starts_at: float
    turns: tuple[str, ...]
    """What the user says, turn by turn."""
    think: tuple[float, ...]
    """Pause before each turn; 0 before the first."""
    in_burst: bool


def make_script(conversations: int, turns: int, seed: int) -> tuple[Conversation, ...]:
    """``conversations`` conversations of ``turns`` turns, in the order they start.

    Two thirds start one after another, over all system prompts in turn. In the middle of them the last
    third starts almost at once, all of it with one system prompt: it has become popular.

    >>> script = make_script(conversations=6, turns=3, seed=1)
    >>> [(c.persona, c.in_burst) for c in script]  # doctest: +NORMALIZE_WHITESPACE
    [('airline', False), ('sql', False), ('airline', True), ('airline', True), ('broadband', False),
     ('recipes', False)]
    >>> script == make_script(conversations=6, turns=3, seed=1)
    True
    """
    rng = random.Random(seed)
    burst = conversations // 3
    steady = conversations - burst
    script = []
    for number in range(steady):
        persona = PERSONAS[number % len(PERSONAS)]
        script.append(_conversation(rng, persona, number, number * START_EVERY, turns, in_burst=False))
    burst_at = (steady // 2 - 0.5) * START_EVERY
    for number in range(burst):
        starts_at = burst_at + BURST_WITHIN * number / burst
        script.append(_conversation(rng, POPULAR, steady + number, starts_at, turns, in_burst=True))
    return tuple(sorted(script, key=lambda conversation: conversation.starts_at))


def _conversation(
    rng: random.Random, persona: Persona, number: int, starts_at: float, turns: int, *, in_burst: bool
) -> Conversation:
    opening = rng.choice(persona.openings)
    follow_ups = cycle(rng.sample(persona.follow_ups, len(persona.follow_ups)))
    says = (opening, *islice(follow_ups, turns - 1))
    facts = {
        "name": rng.choice(NAMES),
        "code": "".join(rng.choices(CODE_LETTERS, k=6)),
        "number": str(rng.randint(3, 29)),
    }
    return Conversation(
        name=f"{persona.name}-{number + 1:02d}",
        persona=persona.name,
        system=persona.system,
        starts_at=starts_at,
        turns=tuple(text.format_map(facts) for text in says),
        think=(0.0, *(rng.uniform(*THINK) for _ in range(turns - 1))),
        in_burst=in_burst,
    )


def system_prompts_used(script: Sequence[Conversation]) -> int:
    """How many different system prompts ``script`` has."""
    return len({conversation.persona for conversation in script})
