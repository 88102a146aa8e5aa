"""One layer's experts alone: measured kernel times of vLLM against the roofline's."""

import csv
from dataclasses import dataclass
from importlib.resources import files

from rich import box
from rich.table import Table

from replica.contract.roofline.roofline import RooflineStepTime

MODEL, GPU = "qwen3-30b-a3b", "rtx-pro-6000"
"""What the times in ``data/expert_kernels.csv`` were measured with, in bf16."""


@dataclass(frozen=True, slots=True)
class ExpertKernel:
    """One measured call: ``tokens`` tokens, each sent to 8 of ``touched`` experts."""

    tokens: int
    touched: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative; positive when the roofline is slower than the kernel was."""
        return self.simulated_s / self.measured_s - 1.0


def expert_kernels(step_time: RooflineStepTime | None = None) -> list[ExpertKernel]:
    """All of them, by tokens and experts; priced by ``step_time``, or by the measured model and GPU's."""
    model = step_time or RooflineStepTime.of(MODEL, GPU)
    experts = model.shape.experts
    assert experts is not None
    layers = model.shape.layers - experts.dense_layers
    text = (files("sim.fidelity") / "data" / "expert_kernels.csv").read_text(encoding="utf-8")
    made = []
    for row in csv.DictReader(text.splitlines()):
        tokens, touched = int(row["tokens"]), int(row["touched_experts"])
        simulated_s = model.experts_s(tokens, touched / experts.count) / layers
        made.append(ExpertKernel(tokens, touched, float(row["time_us"]) / 1e6, simulated_s))
    return made


def mean_error(kernels: list[ExpertKernel]) -> float:
    """Of the errors' sizes."""
    return sum(abs(kernel.error) for kernel in kernels) / len(kernels)


def expert_kernels_table(kernels: list[ExpertKernel]) -> Table:
    """Errors by tokens (rows) and touched experts (columns)."""
    touched = sorted({kernel.touched for kernel in kernels})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("tokens", justify="right")
    for count in touched:
        table.add_column(f"{count} experts", justify="right")
    cells = {(kernel.tokens, kernel.touched): f"{kernel.error:+.0%}" for kernel in kernels}
    for tokens in sorted({kernel.tokens for kernel in kernels}):
        table.add_row(f"{tokens:,}", *(cells.get((tokens, count), "") for count in touched))
    return table
