"""A Prometheus text page, as far as engines' load is read from it."""

import re
from collections.abc import Iterator

LARGEST = 1 << 50
"""No count of requests or tokens is above it; whatever says so is broken."""

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class MetricsPage:
    """The samples of one page, by metric name. What is no sample, or no count or share (below zero, above
    ``LARGEST``), is left out.

    Engines with data parallelism show one sample per rank: counts add up, shares are averaged.

    >>> page = 'x:busy{rank="0"} 3.0\\nx:busy{rank="1"} 1.0\\nx:hits_total 7\\nx:bad NaN\\nx:full 0.5\\n'
    >>> page = MetricsPage(page)
    >>> page.sum("x:busy"), page.share("x:full"), page.sum("x:hits"), page.sum("x:bad")
    (4.0, 0.5, 7.0, None)
    """

    def __init__(self, text: str = "") -> None:
        self._samples: dict[str, list[tuple[str, float]]] = {}
        for name, labels, value in _SAMPLE.findall(text):
            try:
                number = float(value)
            except ValueError:
                continue
            if 0.0 <= number <= LARGEST:
                self._samples.setdefault(name.removesuffix("_total"), []).append((labels, number))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def speaks(self, prefix: str) -> bool:
        """Some metric's name begins with ``prefix``."""
        return any(name.startswith(prefix) for name in self._samples)

    def sum(self, name: str) -> float | None:
        """Of all samples; counters without their ``_total``. ``None``: there is none."""
        found = self._samples.get(name)
        total = None if found is None else sum((value for _, value in found), 0.0)
        return None if total is None or total > LARGEST else total

    def share(self, name: str) -> float | None:
        """The mean of all samples, 0 to 1; ``None``: there is none, or none that is a share."""
        shares = [value for _, value in self._samples.get(name, ()) if value <= 1.0]
        return sum(shares, 0.0) / len(shares) if shares else None

    def whole(self, name: str) -> int | None:
        """The sum of a gauge that counts."""
        found = self.sum(name)
        return None if found is None else int(found)

    def largest(self, name: str) -> int | None:
        """Of all samples, where each says the same."""
        found = self._samples.get(name)
        return None if found is None else int(max(value for _, value in found))

    def labels(self, name: str) -> Iterator[dict[str, str]]:
        """The labels of each sample."""
        for labels, _ in self._samples.get(name, ()):
            yield dict(_LABEL.findall(labels))
