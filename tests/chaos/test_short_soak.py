"""The soak's runs with small numbers; ``make soak`` has the large ones."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rich.console import Console

from tests.load.run_soak import RUNS

SMALL = {
    "memory": {"requests": 200, "prompt_bytes": 2_000, "workers": 4},
    "streams": {"streams": 50, "hold_s": 0.5, "limit_kib": 1_000.0},
    "stalls": {"prompts": 3, "limit_ms": 1_000.0},
}


@pytest.mark.parametrize("name", list(RUNS))
def test_each_run_measures_and_passes(name: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = SMALL[name]
    said = io.StringIO()
    code = uvloop.run(RUNS[name](tmp_path, argparse.Namespace(**arguments), Console(file=said, width=200)))
    assert code == 0, said.getvalue()
