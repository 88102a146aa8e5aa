"""Measured vLLM runs against the simulator, and runs that cannot be read."""

from dataclasses import replace
from pathlib import Path

import pytest

import sim.fidelity
from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.roofline import Efficiency
from sim.fidelity.check import checks, read_measured_runs
from sim.fidelity.comparison import compare
from sim.fidelity.expert_kernels import expert_kernels, mean_error
from sim.fidelity.fit import EXPECTED, fit_efficiency, simulated
from sim.fidelity.measured_run import MeasuredRun, MeasuredRunError, read_measured_run

DATA = Path(sim.fidelity.__file__).parent / "data"


@pytest.fixture(scope="module")
def runs() -> list[MeasuredRun]:
    return read_measured_runs(DATA)


def test_runs_are_read_whole(runs: list[MeasuredRun]) -> None:
    assert [(run.gpu, run.max_running, run.kv_tokens) for run in runs] == [
        ("rtx-4090", 256, 41_408),
        ("rtx-pro-6000", 128, None),
    ]
    for run in runs:
        assert sum(outcome.output_tokens for outcome in run.outcomes) == 195_753
        assert all(outcome.ttft_s and 0.0 < outcome.ttft_s < outcome.e2e_s for outcome in run.outcomes)
        assert [o.sent_s for o in run.outcomes] == sorted(o.sent_s for o in run.outcomes)


def test_the_default_efficiencies_meet_the_targets_on_what_they_were_fitted_to(
    runs: list[MeasuredRun],
) -> None:
    for run in runs:
        for figure in compare(run.outcomes, simulated(run, Efficiency())):
            assert figure.within, f"{run.name}: {figure.name} is off by {figure.error:+.1%}"


def test_a_fit_to_one_gpu_meets_the_targets_on_the_other(runs: list[MeasuredRun]) -> None:
    """And comes out as docs/simulator.md has it."""
    docs = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for source, target in ((runs[0], runs[1]), (runs[1], runs[0])):
        figures = compare(target.outcomes, simulated(target, fit_efficiency([source])))
        for figure in figures:
            assert figure.within, (
                f"{source.name} -> {target.name}: {figure.name} is off by {figure.error:+.1%}"
            )
        row = " | ".join(f"{figure.error:+.1%}" for figure in figures)
        assert f"| {source.name.split('_')[0]} | {target.name.split('_')[0]} | {row} |" in docs


def test_data_sheets_alone_do_not_carry_over(
    runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is right for one card misses on the other, if both are taken to read the same share."""
    source, target = runs
    here = simulated(source, Efficiency())
    share = Efficiency().bandwidth * GPUS[source.gpu].read_share / GPUS[target.gpu].read_share
    kv_share = Efficiency().kv_bandwidth * GPUS[source.gpu].read_share / GPUS[target.gpu].read_share
    equal = {name: replace(gpu, read_share=GPUS[target.gpu].read_share) for name, gpu in GPUS.items()}
    monkeypatch.setattr("replica.contract.roofline.roofline.GPUS", equal)
    efficiency = replace(Efficiency(), bandwidth=share, kv_bandwidth=kv_share)
    assert [o.e2e_s for o in simulated(source, efficiency)] == pytest.approx([o.e2e_s for o in here])
    assert not all(figure.within for figure in compare(target.outcomes, simulated(target, efficiency)))


def test_expert_kernels_are_met() -> None:
    kernels = expert_kernels()
    assert len(kernels) == 50
    assert mean_error(kernels) < 0.12
    experts = MODEL_SHAPES["qwen3-30b-a3b"].experts
    assert experts is not None
    for kernel in kernels:
        if experts.touched_share(kernel.tokens) > 0.95 and kernel.touched == experts.count:  # even routing
            assert abs(kernel.error) < 0.11, kernel
    docs = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    worst = max(abs(kernel.error) for kernel in kernels if kernel.touched == experts.count)
    assert f"{mean_error(kernels):.0%} in the mean, {worst:.0%} where all experts are asked for" in docs
    fastest = min(kernels, key=lambda kernel: kernel.error)
    assert f"too fast by up to {-fastest.error:.0%} for few experts" in docs
    assert fastest.touched < experts.count / 4


def test_other_efficiencies_do_not(runs: list[MeasuredRun]) -> None:
    slow = replace(Efficiency(), bandwidth=0.7)
    assert not all(figure.within for figure in compare(runs[0].outcomes, simulated(runs[0], slow)))


def test_a_fit_comes_nearer_than_it_started(runs: list[MeasuredRun]) -> None:
    run = replace(runs[1], outcomes=runs[1].outcomes[:60])
    start = Efficiency(**{name: expected for name, expected, _ in EXPECTED})
    fitted = fit_efficiency([run], evaluations=25)

    def off(efficiency: Efficiency) -> float:
        return sum(abs(figure.error) for figure in compare(run.outcomes, simulated(run, efficiency)))

    assert off(fitted) < off(start)
    assert fitted == fit_efficiency([run], evaluations=25)  # the same, every time


def test_every_kind_of_check_is_made(runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.fidelity.check.fit_efficiency", lambda runs, first_share=1.0: Efficiency())
    few = [replace(run, outcomes=run.outcomes[:20]) for run in runs]
    made = [(check.fitted_on, check.checked_on) for check in checks(few)]
    one, other = runs[0].name, runs[1].name
    assert (one, other) in made and (other, one) in made
    assert (f"first half of {one}", f"second half of {one}") in made


def write(folder: Path, meta: str, requests: str) -> Path:
    folder.mkdir()
    (folder / "meta.json").write_text(meta)
    (folder / "requests.jsonl").write_text(requests)
    return folder


META = '{"engine_kwargs": {"model": "x/Llama-3.1-8B", "max_num_seqs": 8, "max_num_batched_tokens": 64}}'


@pytest.mark.parametrize(
    ("name", "meta", "requests", "message"),
    [
        ("H100_a", "{", "", "meta.json: not JSON"),
        ("H100_a", "{}", "", "expected engine_kwargs with model"),
        ("H100_a", META.replace("Llama-3.1-8B", "Llama-9"), "", "model 'llama-9' on GPU 'H100'"),
        ("TPU_a", META, "", "on GPU 'TPU'"),
        ("H100_a", META, "\n", "requests.jsonl: empty"),
        ("H100_a", META, '{"input_toks": 5}', "line 1: output_toks is None, not a number"),
        ("H100_a", META, "[]", "line 1: a JSON list; expected an object"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, name: str, meta: str, requests: str, message: str
) -> None:
    folder = write(tmp_path / name, meta, requests)
    with pytest.raises(MeasuredRunError, match=message):
        read_measured_run(folder)


def test_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(MeasuredRunError, match="no measured run; expected folders"):
        read_measured_runs(tmp_path)


def test_the_table_in_the_docs_is_what_comes_out(runs: list[MeasuredRun]) -> None:
    """Its first two rows; the fits take their time (``warmroute simulate --fidelity``)."""
    docs = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    for run in runs:
        figures = compare(run.outcomes, simulated(run, Efficiency()))
        row = " | ".join(f"{figure.error:+.1%}" for figure in figures)
        assert f"| both (the defaults) | {run.name.split('_')[0]} | {row} |" in docs


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0, "math=0.954,bandwidth=0.9696,kv_bandwidth=0.9535,step_s=0.001896,sequence_s=2.784e-05"),
        (1, "math=0.9027,bandwidth=0.9587,kv_bandwidth=0.9793,step_s=0.00203,sequence_s=2.658e-05"),
    ],
)
def test_the_fits_to_a_first_half_are_as_in_the_docs(
    runs: list[MeasuredRun], number: int, printed: str
) -> None:
    """``printed``: what ``warmroute simulate --fidelity`` found; finding it takes seconds."""
    run = runs[number]
    half = len(run.outcomes) // 2
    figures = compare(run.outcomes[half:], simulated(run, Efficiency.parse(printed))[half:])
    row = " | ".join(f"{figure.error:+.1%}" for figure in figures)
    docs = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    assert f"| first half of {run.name.split('_')[0]} | its second half | {row} |" in docs
