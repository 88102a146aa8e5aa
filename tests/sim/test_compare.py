"""Comparisons: intervals, pairing, pictures; and the decisions in which two policies part."""

import importlib.util
import io
import json
import random
from pathlib import Path

import pytest
from rich.console import Console

import warmroute
from sim.compare import MEASURES, compare
from sim.compare_picture import NoMatplotlib, require_matplotlib, write_picture
from sim.compare_view import print_comparison
from sim.estimates import estimate, paired_difference, paired_ratio
from sim.explain import explain_differences, lines
from sim.simulate import SimulationSettings, simulate
from sim.workload.sources import open_trace
from sim.workload.trace import Trace

FEW = SimulationSettings(warmup_share=0.0)
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def small(seed: int) -> Trace:
    return open_trace("mooncake", requests=80)


def test_the_interval_covers_the_mean_95_times_in_100() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(2_000):
        made = estimate([rng.gauss(3.0, 2.0) for _ in range(5)])
        assert made.half_width is not None
        covered += abs(made.mean - 3.0) <= made.half_width
    assert covered / 2_000 == pytest.approx(0.95, abs=0.015)


def test_pairing_removes_what_both_share() -> None:
    rng = random.Random(2)
    seeds = [rng.uniform(1.0, 10.0) for _ in range(6)]
    ratio = paired_ratio([1.1 * value for value in seeds], seeds)
    assert ratio is not None and ratio.mean == pytest.approx(0.1)
    assert ratio.half_width is not None and ratio.half_width < 1e-9
    difference = paired_difference([value + 0.5 for value in seeds], seeds)
    assert difference.mean == pytest.approx(0.5)
    assert paired_ratio([1.0, 0.0], [1.0, 1.0]) is None


def test_every_cell_is_the_simulation_of_its_seed() -> None:
    made = compare(
        small,
        ["round_robin", "predicted_finish"],
        seeds=2,
        rates=(0.5, 1.0),
        first_seed=4,
        replicas=3,
        settings=FEW,
    )
    assert [(cell.policy, cell.rate) for cell in made.cells] == [
        ("round_robin", 0.5),
        ("predicted_finish", 0.5),
        ("round_robin", 1.0),
        ("predicted_finish", 1.0),
    ]
    (alone,) = simulate(small(5), ["predicted_finish"], replicas=3, rate=1.0, seed=5, settings=FEW)
    assert made.cells[3].results[1] == alone
    assert made.reference(made.cells[3]) is made.cells[2]
    ttft = MEASURES[0]
    assert made.against_reference(made.cells[2], ttft) == estimate([0.0, 0.0])
    better = made.against_reference(made.cells[3], ttft)
    assert better is not None and better.mean < 0.0
    assert made.cells[2].load == pytest.approx(2 * made.cells[0].load)


@pytest.mark.parametrize("width", [70, 80, 140])
def test_no_figure_is_cut_off_where_the_console_is_narrow(width: int) -> None:
    made = compare(small, ["round_robin", "predicted_finish"], seeds=3, replicas=3, settings=FEW)
    out = io.StringIO()
    print_comparison(made, Console(file=out, width=width), "requests a second")
    told = out.getvalue()
    assert "…" not in told and max(map(len, told.splitlines()[1:])) <= width
    assert told.count("errors") == told.count(" policy ") and (told.count("errors") == 1) == (width == 140)
    for measure in MEASURES:
        assert measure.label in told
    for cell in made.cells:
        assert f"{cell.estimate(MEASURES[0]).mean:.2f} ±" in told  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("policies", "seeds", "rates", "message"),
    [
        (["random"], 0, (1.0,), "seeds is 0"),
        (["random"], 2, (), "rates are"),
        (["random"], 2, (1.0, 1.0), "expected one or more, each once"),
        (["random", "random"], 2, (1.0,), "policies are random, random; expected each once"),
        (["best"], 2, (1.0,), "policy 'best' is unknown"),
    ],
)
def test_comparisons_that_make_no_sense(
    policies: list[str], seeds: int, rates: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(small, policies, seeds=seeds, rates=rates)


COMMAND = ["simulate", "--requests", "80", "--replicas", "3", "--policy", "predicted_finish,round_robin"]


def test_the_command_compares(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main([*COMMAND, "--compare", "2", "--rates", "0.5,1"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "rate 0.5:",
        "rate 1:",
        "requests a second, 2 seeds",
        "±",
        "against predicted_finish",
        "seeds 1 to 2",
    ):
        assert text in shown
    assert warmroute.main([*COMMAND, "--compare", "2", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["reference"] == "predicted_finish" and made["seeds"] == [1, 2]
    assert made["cells"][1]["measures"]["ttft_s"]["against_reference"]["value"] > 0.0
    assert len(made["cells"][0]["results"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "1,2"], "--rates goes with --compare SEEDS"),
        (["--plot", "x"], "--plot goes with --compare SEEDS"),
        (["--compare", "2", "--explain", "3"], "--compare and --explain are different things to do"),
        (["--explain", "3", "--policy", "random"], "--explain compares two policies, --policy has 1"),
        (["--explain", "3", "--policy", "random,pooled_cache"], "pooled_cache has a cache of its own kind"),
    ],
)
def test_modes_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert warmroute.main([*COMMAND, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_could_not_be_written_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.simulate_command.compare", None)
    (tmp_path / "folder.svg").mkdir()
    for place, message in (("no/x", "does not exist; make it first"), ("folder.png", "is a folder")):
        path = str(tmp_path / place)
        assert warmroute.main([*COMMAND, "--compare", "2", "--plot", path]) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"warmroute simulate: --plot {path}: ") and message in err
        assert out == "" and err.count("\n") == 1


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_without_matplotlib_it_says_what_to_install_before_it_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NoMatplotlib):
        require_matplotlib()
    assert warmroute.main([*COMMAND, "--compare", "2", "--plot", "x.png"]) == 1
    out, err = capsys.readouterr()
    assert 'pip install "warmroute[plot]"' in err and not out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra plot")
def test_the_picture_is_written_twice_and_the_same_every_time(tmp_path: Path) -> None:
    made = compare(small, ["random", "round_robin"], seeds=2, rates=(0.5, 1.0), replicas=3, settings=FEW)
    first = write_picture(made, tmp_path / "one.png", "requests a second", "a title")
    second = write_picture(made, tmp_path / "two", "requests a second", "a title")
    assert [path.name for path in first] == ["one.png", "one.svg"]
    assert first[0].read_bytes()[:4] == b"\x89PNG" and b"<svg" in first[1].read_bytes()[:600]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_a_policy_beside_itself_never_differs() -> None:
    shadow = explain_differences(
        open_trace("chats", requests=60), "sglang_cache_aware", "sglang_cache_aware", most=5, replicas=3
    )
    assert shadow.decisions == 60 and shadow.different == 0
    assert list(lines(shadow, "a", "b")) == ["0 of 60 decisions (0.0%) would have been others under b."]


def test_the_shadow_never_has_its_way() -> None:
    trace = open_trace("mooncake", requests=200)
    (alone,) = simulate(trace, ["predicted_finish"], replicas=4, rate=1.0)
    seen = explain_differences(trace, "predicted_finish", "sglang_cache_aware", most=4, replicas=4)
    assert seen.different > 20
    (again,) = simulate(trace, ["predicted_finish"], replicas=4, rate=1.0)
    assert alone == again


def test_differences_are_told_with_their_numbers() -> None:
    trace = open_trace("mooncake", requests=200)
    shadow = explain_differences(trace, "predicted_finish", "lmetric", most=3, replicas=4)
    kept = shadow.differences
    assert len(kept) == 3 and [one.number for one in kept] == sorted(one.number for one in kept)
    for one in kept:
        assert one.chosen.replica != one.other.replica and one.given_up > 0.0
        assert one.row(one.chosen.replica).total_s == min(row.total_s for row in one.rows)
        # the other prefers its own choice by its own score
        assert one.other_scores[one.other.replica] == min(one.other_scores.values())
    text = "\n".join(lines(shadow, "predicted_finish", "lmetric"))
    assert text.count("prompt tokens") == 3 and "lmetric's score" in text and "first token after" in text


def test_the_command_explains(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*COMMAND[:-1], "predicted_finish,llmd_sticky", "--explain", "2", "--rate", "1.5"]
    assert warmroute.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "decisions (" in shown and "would have been others under llmd_sticky" in shown
    assert "total ms" in shown and "llmd_sticky's score" not in shown  # it sorts candidates out, and has none
