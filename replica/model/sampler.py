"""Draws the next token of each row from its logits."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import torch

from replica.model.sampling import Drawn, Sampling, TokenLogprob

FIRST_CANDIDATES = 1024
"""For top_p, look at this many likeliest tokens before sorting the whole vocabulary."""


class Draws:
    """One request's drawing of tokens: its settings and its own stream of random numbers.

    Exactly one random number is used per token, so a reply depends on the seed and the logits, and not on
    batching, preemption or the cache.
    """

    def __init__(self, sampling: Sampling, seed: int, blocked: frozenset[int], min_tokens: int) -> None:
        """``seed``: used when the request names none. ``blocked`` tokens are not drawn before
        ``min_tokens`` tokens."""
        self.sampling = sampling
        self._random = random.Random(seed if sampling.seed is None else sampling.seed)
        self._blocked = sorted(blocked)
        self._min_tokens = min_tokens

    def draw(self, logits: torch.Tensor, token_ids: Sequence[int], prompt_tokens: int) -> Drawn:
        """The next token after ``token_ids`` from finite ``logits`` [vocab] (not changed)."""
        sampling = self.sampling
        shaped = self._shape(logits, token_ids, prompt_tokens)
        if sampling.greedy:
            # numpy's takes 8 µs for 49,152 numbers, torch's 105.
            token = int(shaped.numpy().argmax())
        else:
            token = draw_token(shaped, sampling, self._random.random())
        if sampling.logprobs is None:
            return Drawn(token)
        logprobs = torch.log_softmax(logits, -1)
        top: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs:
            values, ids = logprobs.topk(min(sampling.logprobs, logits.shape[-1]))
            top = tuple(
                TokenLogprob(token=number, logprob=value)
                for number, value in zip(ids.tolist(), values.tolist(), strict=True)
            )
        return Drawn(token, float(logprobs[token].item()), top)

    def _shape(self, logits: torch.Tensor, token_ids: Sequence[int], prompt_tokens: int) -> torch.Tensor:
        block = bool(self._blocked) and len(token_ids) - prompt_tokens < self._min_tokens
        if self.sampling.plain and not block:
            return logits
        shaped = logits.clone()
        sampling = self.sampling
        for token, bias in sampling.logit_bias:
            shaped[token] += bias
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(token_ids)))
            values = shaped[seen]
            penalty = sampling.repetition_penalty
            shaped[seen] = torch.where(values > 0, values / penalty, values * penalty)
        output = token_ids[prompt_tokens:]
        if output and (sampling.presence_penalty or sampling.frequency_penalty):
            for token, count in Counter(output).items():
                shaped[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
        if block:
            shaped[self._blocked] = float("-inf")
        return shaped


def draw_token(logits: torch.Tensor, sampling: Sampling, chance: float) -> int:
    """The token at which the cumulated probability passes ``chance`` (0 to 1), after all filters.

    >>> logits = torch.log(torch.tensor([0.1, 0.6, 0.3]))
    >>> [draw_token(logits, Sampling(), chance) for chance in (0.05, 0.5, 0.95)]      # in vocabulary order
    [0, 1, 2]
    >>> [draw_token(logits, Sampling(top_p=0.8), chance) for chance in (0.05, 0.95)]   # 1, then 2: 0.6 + 0.3
    [1, 2]
    >>> draw_token(logits, Sampling(min_p=0.4), 0.95), draw_token(logits, Sampling(top_k=1), 0.95)
    (2, 1)
    """
    scaled = logits.double() / max(sampling.temperature, 1e-5)
    if sampling.min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.max() + math.log(sampling.min_p), float("-inf"))
    if sampling.top_k is None and sampling.top_p >= 1:
        return _pick(scaled.softmax(-1), chance)
    if sampling.top_k is not None:
        values, ids = scaled.topk(min(sampling.top_k, scaled.shape[-1]))
        likely = values.softmax(-1)
    else:
        likely, ids = _nucleus_candidates(scaled.softmax(-1), sampling.top_p)
    if sampling.top_p < 1:
        kept = likely.cumsum(-1) - likely < sampling.top_p
        kept[0] = True
        likely, ids = likely[kept], ids[kept]
    return int(ids[_pick(likely, chance)].item())


def _nucleus_candidates(likely: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, sorted, at least as many as make up ``top_p``."""
    count = min(FIRST_CANDIDATES, likely.shape[-1])
    values, ids = likely.topk(count)
    if count < likely.shape[-1] and values.sum().item() < top_p:
        values, ids = likely.sort(descending=True)
    return values, ids


def _pick(likely: torch.Tensor, chance: float) -> int:
    """The place where the cumulated share passes ``chance``; never one of probability zero."""
    total = likely.cumsum(-1)
    place = int(torch.searchsorted(total, total[-1] * chance, right=True).item())
    # Rounding may leave the last places unreachable or point past the end.
    place = min(place, likely.shape[-1] - 1)
    while place > 0 and likely[place].item() == 0:
        place -= 1
    return place
