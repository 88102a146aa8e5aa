"""Drawing tokens: distributions, filters, penalties, log-probabilities, reproducibility."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from replica.model.sampler import Draws, draw_token
from replica.model.sampling import Sampling

LOGITS = torch.log(torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]))


def _draw_many(sampling: Sampling, count: int = 4000) -> Counter[int]:
    draws = Draws(sampling, 1, frozenset(), 0)
    return Counter(draws.draw(LOGITS, [0], 1).token for _ in range(count))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), (0.5, 0.2, 0.15, 0.1, 0.05)),
        (
            Sampling(temperature=0.5),
            (0.25 / 0.325, 0.04 / 0.325, 0.0225 / 0.325, 0.01 / 0.325, 0.0025 / 0.325),
        ),
        (Sampling(top_k=2), (5 / 7, 2 / 7, 0, 0, 0)),
        (Sampling(top_p=0.6), (5 / 7, 2 / 7, 0, 0, 0)),
        (Sampling(top_p=0.5), (1, 0, 0, 0, 0)),
        (Sampling(top_p=0.0), (1, 0, 0, 0, 0)),
        (Sampling(min_p=0.25), (0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0)),
        (Sampling(top_k=3, top_p=0.8), (5 / 7, 2 / 7, 0, 0, 0)),  # 0.5 / 0.85 + 0.2 / 0.85 > 0.8
        (Sampling(temperature=0.0, top_p=0.1), (1, 0, 0, 0, 0)),
        (Sampling(logit_bias=((0, -100.0), (4, 100.0))), (0, 0, 0, 0, 1)),
    ],
)
def test_tokens_come_with_the_probabilities_that_the_settings_say(
    sampling: Sampling, expected: tuple[float, ...]
) -> None:
    seen = _draw_many(sampling)
    for token, share in enumerate(expected):
        assert seen[token] / 4000 == pytest.approx(share, abs=0.03)
        if share == 0:
            assert seen[token] == 0


def test_a_large_vocabulary_is_cut_at_the_same_place_with_and_without_a_full_sort() -> None:
    flat = torch.zeros(5000)  # needs far more than FIRST_CANDIDATES for top_p
    peaked = torch.arange(5000, dtype=torch.float32) / 100
    for logits in (flat, peaked):
        for top_p in (0.3, 0.9):
            order = logits.double().softmax(-1).sort(descending=True)
            kept = int((order.values.cumsum(-1) - order.values < top_p).sum())
            allowed = set(order.indices[:kept].tolist())
            drawn = {draw_token(logits, Sampling(top_p=top_p), chance / 50) for chance in range(50)}
            if logits is peaked:
                assert drawn <= allowed
            assert len(allowed) > 1 and len(drawn) > 1


def test_no_chance_is_outside() -> None:
    for chance in (0.0, 1e-12, 0.5, 1.0 - 1e-16, 0.9999999999):
        assert 0 <= draw_token(LOGITS, Sampling(), chance) <= 4
        assert draw_token(torch.tensor([0.0, float("-inf"), 0.0]), Sampling(), chance) in (0, 2)
        assert draw_token(torch.tensor([0.0, float("-inf")]), Sampling(), chance) == 0


def test_the_same_seed_draws_the_same_tokens() -> None:
    def draw(seed: int | None, engine_seed: int) -> list[int]:
        draws = Draws(Sampling(seed=seed), engine_seed, frozenset(), 0)
        return [draws.draw(LOGITS, [0], 1).token for _ in range(50)]

    assert draw(7, 1) == draw(7, 2)
    assert draw(7, 1) != draw(8, 1)
    assert draw(None, 1) == draw(None, 1) != draw(None, 2)


def test_penalties() -> None:
    greedy = Sampling(temperature=0.0)
    prompt, output = [0, 3], [1, 1, 1]

    def choose(sampling: Sampling, logits: list[float]) -> int:
        draws = Draws(sampling, 0, frozenset(), 0)
        return draws.draw(torch.tensor(logits), prompt + output, len(prompt)).token

    assert choose(greedy, [1.0, 2.0, 0.0]) == 1
    # Presence counts output once (2 - 1.5 < 1), frequency each time (2 - 3 * 0.4 < 1); the prompt is free.
    assert choose(replace(greedy, presence_penalty=1.5), [1.0, 2.0, 0.0]) == 0
    assert choose(replace(greedy, frequency_penalty=0.4), [1.0, 2.0, 0.0]) == 0
    assert choose(replace(greedy, frequency_penalty=0.2), [1.0, 2.0, 0.0]) == 1
    # Repetition divides positive and multiplies negative logits of prompt and output tokens.
    assert choose(replace(greedy, repetition_penalty=3.0), [1.0, 2.0, 0.8, 0.0]) == 2
    assert choose(replace(greedy, repetition_penalty=3.0), [-1.0, -2.0, -2.5, -9.0]) == 2


def test_end_tokens_wait_for_min_tokens() -> None:
    draws = Draws(Sampling(temperature=0.0), 0, frozenset({0}), 2)
    logits = torch.tensor([5.0, 1.0, 0.0])
    assert draws.draw(logits, [9], 1).token == 1
    assert draws.draw(logits, [9, 1], 1).token == 1
    assert draws.draw(logits, [9, 1, 1], 1).token == 0
    assert logits.tolist() == [5.0, 1.0, 0.0]


def test_log_probabilities_are_the_models_own() -> None:
    sampling = Sampling(temperature=0.0, logprobs=2, logit_bias=((4, 100.0),))
    drawn = Draws(sampling, 0, frozenset(), 0).draw(LOGITS, [0], 1)
    assert drawn.token == 4
    assert drawn.logprob == pytest.approx(-2.995732, abs=1e-5)  # ln 0.05
    assert [one.token for one in drawn.top] == [0, 1]
    assert [one.logprob for one in drawn.top] == pytest.approx([-0.693147, -1.609438], abs=1e-5)
    none = Draws(Sampling(temperature=0.0), 0, frozenset(), 0).draw(LOGITS, [0], 1)
    assert none.logprob is None and none.top == ()
    only = Draws(Sampling(temperature=0.0, logprobs=0), 0, frozenset(), 0).draw(LOGITS, [0], 1)
    assert only.logprob == pytest.approx(-0.693147, abs=1e-5) and only.top == ()
