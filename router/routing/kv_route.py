"""How a request's KV comes to the replica that answers: computed there, pulled, or prefilled for it.

Replicas have roles: ``prefill`` ones compute prompts for others, ``decode`` ones answer and should compute
little, ``both`` do all. What can be pulled, and how, is the operator's word.
"""

from enum import StrEnum
from typing import Final, NamedTuple


class Role(StrEnum):
    """What a replica is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class KvPull(StrEnum):
    """How a replica gets KV that another computed."""

    NONE = "none"
    WARMROUTE = "warmroute"
    """The header ``x-warmroute-kv-source`` names a replica's peer port; any prefix, at any time."""
    VLLM = "vllm"
    """``kv_transfer_params``: what a prefill with ``do_remote_decode`` answers goes into the next request."""
    LLMD = "llm-d"
    """The header ``x-prefiller-host-port``: the sidecar of who answers has the prompt computed there."""


class Step(StrEnum):
    """What a decision begins."""

    DIRECT = "direct"
    """The chosen replica computes what it lacks."""
    PULL = "pull"
    """It pulls what it lacks from ``KvRoute.other``, as far as that has it."""
    PREFILL = "prefill"
    """It computes the prompt only; then ``KvRoute.other``, or who is better by then, pulls and answers."""


TRANSFER_FIXED_S: Final = 0.026
TRANSFER_TOKEN_S: Final = 4.3e-6
"""Pulling KV from a peer: 26 ms and 4.3 µs a token, which is llm-d's measurement (gpt-oss-120b on H200, 2026:
2,048 tokens 35 ms, 8,192 57, 16,384 86, 32,768 165)."""
TRANSFER_REFERENCE_TOKENS: Final = 8_192.0


class KvRoute(NamedTuple):
    """One decision's way for KV, and the prices that chose it. Times are seconds and are predictions."""

    step: Step
    other: int | None = None
    """The index of the replica at the other end."""
    tokens: int = 0
    """Of the prompt that the source holds, or will."""
    moved_tokens: int = 0
    """Of them, those the destination lacks."""
    transfer_s: float = 0.0
    decode_wait_s: float = 0.0
    """PREFILL: backlog on the replica that is expected to answer."""
    one_step_s: float | None = None
    """What one replica doing all would cost in total; ``None``: there is none."""
    two_steps_s: float | None = None
    """What prefill, transfer and decoding apart cost in total; ``None``: not possible."""
