"""Recurrent states: slots, exact checkpoints, eviction; and a machine whose memory really holds them."""

import doctest

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.kv_cache import restart_boundaries as boundaries_module
from replica.kv_cache import state_checkpoints as module
from replica.kv_cache.restart_boundaries import chunk_stop, restart_boundaries
from replica.kv_cache.state_checkpoints import CopyState, StateCheckpoints, StateInventory, ZeroState


@pytest.mark.parametrize("documented", [module, boundaries_module])
def test_doctests(documented):
    assert doctest.testmod(documented).failed == 0


def test_inventory_counts_every_slot_once():
    states = StateCheckpoints(4)
    assert states.inventory() == StateInventory(0, 0, 4)
    states.begin("a", None)
    states.begin("b", None)
    states.ran("a", 0, 16)
    assert states.publish("a", 16, "p16")
    assert states.inventory() == StateInventory(2, 1, 1)
    states.end("a")
    states.end("a")
    assert states.inventory() == StateInventory(1, 1, 2)
    states.check_invariants()


def test_published_only_at_the_exact_position():
    states = StateCheckpoints(4)
    states.begin("a", None)
    states.ran("a", 0, 364)
    assert not states.publish("a", 352, "p352") and not states.publish("a", 368, "p368")
    assert states.checkpoint_position("p352") is None and states.counters.not_exact == 2
    assert states.publish("a", 364, "p364") and states.checkpoint_position("p364") == 364


def test_a_gap_or_a_repetition_makes_the_state_unknown():
    for start, stop in ((4, 12), (16, 20), (0, 8)):
        states = StateCheckpoints(2)
        states.begin("a", None)
        states.ran("a", 0, 8)
        states.ran("a", start, stop)
        assert states.position("a") is None and not states.publish("a", stop, "p")
        states.ran("a", stop, stop + 4)
        assert states.position("a") is None  # and stays so


def test_a_failed_step_makes_the_state_unknown():
    states = StateCheckpoints(2)
    states.begin("a", None)
    states.ran("a", 0, 8)
    states.lost("a")
    assert not states.publish("a", 8, "p8")
    states.lost("nobody")
    states.ran("nobody", 0, 8)


def test_a_restart_copies_and_leaves_the_checkpoint():
    states = StateCheckpoints(3)
    states.begin("a", None)
    states.ran("a", 0, 8)
    states.publish("a", 8, "p8")
    states.begin("b", "p8")
    assert states.position("b") == 8
    assert states.take_orders() == [ZeroState(0), CopyState(0, 1), CopyState(1, 2)]
    states.ran("b", 8, 12)
    assert states.checkpoint_position("p8") == 8
    assert states.take_orders() == []


def test_the_last_checkpoint_gives_its_own_slot():
    states = StateCheckpoints(1)
    states.begin("a", None)
    states.ran("a", 0, 8)
    assert not states.publish("a", 8, "p8") and states.counters.no_slot == 1  # every slot is live
    states.end("a")
    states = StateCheckpoints(2)
    states.begin("a", None)
    states.ran("a", 0, 8)
    states.publish("a", 8, "p8")
    states.take_orders()
    assert states.begin("b", "p8") == 1 and states.take_orders() == []  # moved, not copied
    assert states.inventory() == StateInventory(2, 0, 0) and states.position("b") == 8
    assert not states.can_begin()
    with pytest.raises(IndexError, match="all 2 state slots are live"):
        states.begin("c", None)


def test_the_checkpoint_not_restored_for_longest_goes_and_ancestors_stay_old():
    states = StateCheckpoints(4)
    states.begin("a", None)
    for position in (8, 16, 24):
        states.ran("a", position - 8, position)
        states.publish("a", position, f"p{position}")
    states.end("a")
    states.begin("b", "p16")  # 8 is no younger for it
    states.begin("c", None)  # takes the slot of p8
    assert [states.checkpoint_position(f"p{p}") for p in (8, 16, 24)] == [None, 16, 24]
    states.begin("d", None)
    assert [states.checkpoint_position(f"p{p}") for p in (8, 16, 24)] == [None, 16, None]
    assert states.counters.evicted == 2


def test_a_newer_checkpoint_replaces_one_nobody_used():
    states = StateCheckpoints(4)
    states.begin("a", None)
    states.ran("a", 0, 8)
    states.publish("a", 8, "p8")
    states.ran("a", 8, 16)
    states.publish("a", 16, "p16", replaces="p8")
    assert states.checkpoint_position("p8") is None
    states.begin("b", "p16")
    states.ran("a", 16, 24)
    states.publish("a", 24, "p24", replaces="p16")
    assert states.checkpoint_position("p16") == 16  # somebody restarted there: it is worth keeping


def test_a_name_is_kept_once():
    states = StateCheckpoints(4)
    for holder in "ab":
        states.begin(holder, None)
        states.ran(holder, 0, 8)
        assert states.publish(holder, 8, "p8")
    assert states.inventory().checkpoints == 1 and states.counters.published == 1


def test_wrong_uses_are_refused():
    states = StateCheckpoints(2)
    states.begin("a", None)
    with pytest.raises(ValueError, match="end it first"):
        states.begin("a", None)
    with pytest.raises(KeyError):
        states.begin("b", "unknown")
    with pytest.raises(ValueError, match="at least 1"):
        StateCheckpoints(0)


@pytest.mark.parametrize(
    ("tokens", "units", "expected"),
    [(1, (16,), []), (16, (16,), [16]), (17, (16,), [16]), (32, (16,), [16, 32]), (33, (16,), [32])],
)
def test_boundaries_serve_the_same_prompt_again_and_a_longer_one(tokens, units, expected):
    assert restart_boundaries(tokens, units) == expected


def test_boundaries_leave_out_what_is_outside():
    assert restart_boundaries(20, (16,), junctions=(0, 16, 32)) == [16]
    assert chunk_stop(16, 20, [16, 20, 24]) == 20 and chunk_stop(0, 20, []) == 20


class StateLife(RuleBasedStateMachine):
    """Holders read a text; the memory of a slot is the text its state has seen, or rubbish."""

    @initialize(slots=st.integers(1, 5))
    def start(self, slots):
        self.states = StateCheckpoints(slots)
        self.memory: dict[int, str | None] = {}
        self.texts: dict[int, str] = {}
        self.kept: set[str] = set()
        self.count = 0

    def obey(self):
        """Orders are carried out before anything runs."""
        for order in self.states.take_orders():
            match order:
                case ZeroState():
                    self.memory[order.slot] = ""
                case CopyState():
                    self.memory[order.target] = self.memory[order.source]

    @rule(text=st.text("ab", min_size=1, max_size=8), deepest=st.booleans(), early=st.booleans())
    def begin(self, text, deepest, early):
        names = [text[:n] for n in range(1, len(text)) if self.states.checkpoint_position(text[:n])]
        name = names[-1 if deepest else 0] if names else None
        self.count += 1
        if not self.states.can_begin():
            with pytest.raises(IndexError):
                self.states.begin(self.count, name)
            return
        self.states.begin(self.count, name)
        self.texts[self.count] = text
        assert self.states.position(self.count) == len(name or "")
        if early:
            self.obey()

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 4), reports=st.sampled_from([True, True, True, False]))
    def step(self, data, count, reports):
        self.run(data.draw(st.sampled_from(sorted(self.texts))), count, reports)

    def run(self, holder, count, reports):
        self.obey()
        at = self.states.position(holder)
        if at is None:
            return  # the engine would preempt it
        text = self.texts[holder]
        stop = min(at + count, len(text))
        slot = self.states.slot(holder)
        assert self.memory[slot] == text[:at]
        self.memory[slot] = text[:stop]
        if reports:
            self.states.ran(holder, at, stop)
        else:  # it failed half-way
            self.memory[slot] = None
            self.states.lost(holder)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), off=st.sampled_from([0, 0, 0, -1, 1]), rolling=st.booleans())
    def publish(self, data, off, rolling):
        self.publish_for(data.draw(st.sampled_from(sorted(self.texts))), off, rolling)

    def publish_for(self, holder, off, rolling):
        text = self.texts[holder]
        position = max(1, (self.states.position(holder) or 3) + off)
        name = text[:position]
        truth = self.states.position(holder)
        known = self.states.checkpoint_position(name) is not None
        kept = self.states.publish(holder, position, name, text[: position - 1] if rolling else None)
        assert not kept or truth == position == len(name)
        assert kept or truth != position or not self.states.can_begin()
        if kept and not known:
            self.kept.add(name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data):
        holder = data.draw(st.sampled_from(sorted(self.texts)))
        del self.texts[holder]
        self.states.end(holder)

    @rule(texts=st.lists(st.text("ab", min_size=3, max_size=8), min_size=1, max_size=6))
    def readers(self, texts):
        """Each reads its text to the end, keeps its state on the way, and leaves."""
        for text in texts:
            if self.states.can_begin():
                self.begin(text, True, False)
                holder = self.count
                for turn in range(3):
                    self.run(holder, 2, True)
                    self.publish_for(holder, 0, turn == 1)
                    self.sound()
                del self.texts[holder]
                self.states.end(holder)

    @rule(text=st.text("ab", max_size=4))
    def forget(self, text):
        self.states.forget([text])
        assert self.states.checkpoint_position(text) is None

    @rule()
    def forget_all(self):
        self.states.forget_all()
        assert self.states.inventory().checkpoints == 0

    @invariant()
    def sound(self):
        self.states.check_invariants()
        inventory = self.states.inventory()
        assert inventory.live == len(self.texts)
        assert inventory.live + inventory.checkpoints + inventory.free == self.states.slots
        # What the memory will hold when the orders are carried out.
        memory = dict(self.memory)
        for order in self.states._orders:
            memory[order.slot if isinstance(order, ZeroState) else order.target] = (
                "" if isinstance(order, ZeroState) else memory[order.source]
            )
        for name, checkpoint in self.states._checkpoints.items():
            assert checkpoint.position == len(name)
            assert memory[checkpoint.slot] == name, "a checkpoint holds another state than its name says"
        for holder, text in self.texts.items():
            position = self.states.position(holder)
            if position is not None:
                assert memory[self.states.slot(holder)] == text[:position]


TestStateLife = StateLife.TestCase
TestStateLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
