"""The demo's script: real conversations, several system prompts, one suddenly popular."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sim.demo.conversation_script import BURST_WITHIN, make_script, system_prompts_used
from sim.demo.personas import PERSONAS, POPULAR


def test_the_default_size_is_what_the_demo_promises() -> None:
    script = make_script(conversations=18, turns=4, seed=1)
    assert len(script) == 18
    assert all(len(conversation.turns) == 4 for conversation in script)
    assert system_prompts_used(script) == len(PERSONAS) == 5
    burst = [conversation for conversation in script if conversation.in_burst]
    assert len(burst) == 6
    assert {conversation.persona for conversation in burst} == {POPULAR.name}
    starts = [conversation.starts_at for conversation in burst]
    assert max(starts) - min(starts) <= BURST_WITHIN
    steady = [conversation.starts_at for conversation in script if not conversation.in_burst]
    assert steady[0] < min(starts) < max(starts) < steady[-1]  # it comes in the middle


def test_system_prompts_are_long_and_differ_from_the_start() -> None:
    for persona in PERSONAS:
        assert len(persona.system) > 2_500, persona.name
    assert len({persona.system[:20] for persona in PERSONAS}) == len(PERSONAS)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10_000))
def test_every_script_is_whole_and_repeatable(conversations: int, turns: int, seed: int) -> None:
    script = make_script(conversations, turns, seed)
    assert script == make_script(conversations, turns, seed)
    assert len({conversation.name for conversation in script}) == conversations
    assert all(a.starts_at <= b.starts_at for a, b in pairwise(script))
    for conversation in script:
        assert len(conversation.turns) == len(conversation.think) == turns
        assert conversation.think[0] == 0.0
        assert not any("{" in text or "}" in text for text in conversation.turns)
        assert all(a != b for a, b in pairwise(conversation.turns))
    assert Counter(conversation.in_burst for conversation in script)[True] == conversations // 3
