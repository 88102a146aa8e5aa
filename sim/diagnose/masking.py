"""Snippets of prompts for a report: short, on one line, with what may be secret or personal masked."""

import re

_SECRETS = re.compile(
    r"""
    (?P<bearer>(?i:bearer|basic)\s+)[\w.~+/=-]{8,}
    | (?P<named>(?i:pass(?:word|wd)?|secret|token|api[_-]?key|authorization)["']?\s*[:=]\s*["']?)
      [^\s"',;]{3,}
    | (?P<mail>[\w.+-]+@[\w-]+\.[\w.-]+)
    | (?P<prefix>\b(?:sk|pk|rk|ghp|gho|ghs|glpat|xox[abprs]|hf|AKIA|AIza|eyJ)[-\w]*?)[-\w.]{12,}
    | (?P<digits>(?<![\w.:-])\+?\d(?:[ -]?\d){8,}(?![\w:-]))
    | (?P<long>\b(?=[\w+/-]*\d)(?=[\w+/-]*[A-Za-z])[A-Za-z0-9+/_]{20,}={0,2})
    """,
    re.VERBOSE,
)
HIDDEN = "***"
SNIPPET_CHARACTERS = 72
LOOK_BACK_BYTES = 400


def masked(text: str) -> str:
    """``text`` with keys, passwords, mail addresses, long numbers and long random strings hidden.

    >>> masked("On 2026-11-29 api_key: sk-abc123def456ghi789 of jo@example.org, card 4111 1111 1111 1111")
    'On 2026-11-29 api_key: *** of ***, card ***'
    """

    def hide(match: re.Match[str]) -> str:
        return (match["bearer"] or match["named"] or (match["prefix"] or "")[:2]) + HIDDEN

    return _SECRETS.sub(hide, text)


def snippet(text: bytes, at: int, *, before: int = 24, most: int = SNIPPET_CHARACTERS) -> str:
    """The text around byte ``at``, from the same line where it can be, masked and shortened.

    >>> snippet(b"You are an agent.\\nNow: 2026-11-29 12:00\\nBe kind.", 23)
    'Now: 2026-11-29 12:00⏎Be kind.'
    """
    line_start = max(text.rfind(b"\n", 0, at) + 1, at - LOOK_BACK_BYTES)
    ahead = text[at : at + 4 * most].decode("utf-8", "replace")
    line = text[line_start:at].decode("utf-8", "replace")
    start = max(0, len(line) - before)
    line += ahead
    for secret in _SECRETS.finditer(line):
        if secret.start() < start < secret.end():  # half a secret would not be known for one
            start = secret.start()
    shown = re.sub(r"[\x00-\x09\x0b-\x1f]+", " ", masked(line[start:])).replace("\n", "⏎").strip()
    mark = "…" if start else ""
    return mark + (shown if len(shown) <= most else shown[: most - 1] + "…")
