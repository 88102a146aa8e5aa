"""GPUs: peak math per precision, memory bandwidth and size, links; each figure as its maker publishes it.

Peak math is *dense* (half of what data sheets print "with sparsity") with 32-bit accumulation. Memory size is
what the driver reports (``nvidia-smi``, ``rocm-smi``), in MiB: data sheets round it, and print GiB as GB.
Bandwidths are decimal; those of links are one way. Measured beside them: what large matrix products and large
reads reach. ``read_gb_per_s`` is the output layer's bytes over its time for a few tokens in LLMServingSim's
profiles of vLLM's kernels (github.com/casys-kaist/LLMServingSim, MIT): 1,050.7 MB of Llama 3.1 8B in 1,096.9
µs on an RTX 4090 and 688 µs on an RTX PRO 6000; 2,101.3 MB of 70B in 716.4 µs on an H100.
"""

from collections.abc import Mapping
from dataclasses import dataclass

USUAL_MATMUL_SHARE = 0.75
USUAL_READ_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    """What one GPU can do at best. Real kernels reach a share of it."""

    name: str
    math_per_s: Mapping[str, float]
    """Operations per second by the type of the operands: ``bf16``, and where there is hardware for it ``fp8``
    and ``int8``. A multiply and an add are two."""
    memory_bytes_per_s: float
    """As the data sheet has it."""
    memory_bytes: float
    pcie_bytes_per_s: float
    """To host memory, one way, as the bus is rated."""
    source: str
    nvlink_bytes_per_s: float | None = None
    """To its neighbours, one way, all links together; ``None`` where GPUs talk over PCIe."""
    matmul_share: float = USUAL_MATMUL_SHARE
    """Of peak bf16 math that large matrix products reach, as people measured with torch (clocks fall under
    load, and some GPUs are fed too slowly for their peak). ``USUAL_MATMUL_SHARE`` where nobody did."""
    read_share: float = USUAL_READ_SHARE
    """Of memory bandwidth that one large read reaches, as people measured it. ``USUAL_READ_SHARE`` where
    nobody did."""

    @property
    def read_bytes_per_s(self) -> float:
        """What one large read reaches.

        >>> round(GPUS["rtx-4090"].read_bytes_per_s / 1e9), round(GPUS["rtx-pro-6000"].read_bytes_per_s / 1e9)
        (958, 1527)
        """
        return self.memory_bytes_per_s * self.read_share


def _gpu(
    name: str,
    *,
    tflops: Mapping[str, float],
    gb_per_s: float,
    mib: int,
    pcie_gb_per_s: float,
    source: str,
    nvlink_gb_per_s: float | None = None,
    matmul_tflops: float | None = None,
    read_gb_per_s: float | None = None,
) -> Gpu:
    return Gpu(
        name=name,
        math_per_s={kind: value * 1e12 for kind, value in tflops.items()},
        memory_bytes_per_s=gb_per_s * 1e9,
        memory_bytes=mib * 2.0**20,
        pcie_bytes_per_s=pcie_gb_per_s * 1e9,
        source=source,
        nvlink_bytes_per_s=None if nvlink_gb_per_s is None else nvlink_gb_per_s * 1e9,
        matmul_share=USUAL_MATMUL_SHARE if matmul_tflops is None else matmul_tflops / tflops["bf16"],
        read_share=USUAL_READ_SHARE if read_gb_per_s is None else read_gb_per_s / gb_per_s,
    )


_ALL = (
    _gpu(
        "a100-80g",
        tflops={"bf16": 312, "int8": 624},
        matmul_tflops=265,
        gb_per_s=2_039,
        mib=81_920,
        pcie_gb_per_s=32,
        nvlink_gb_per_s=300,
        source=(
            "NVIDIA A100 data sheet, A100 80GB SXM: "
            "312 TFLOPS BF16, 624 TOPS INT8, 2,039 GB/s, NVLink 600 GB/s both ways"
        ),
    ),
    _gpu(
        "h100",
        tflops={"bf16": 989.4, "fp8": 1_978.9, "int8": 1_978.9},
        matmul_tflops=786,
        gb_per_s=3_350,
        read_gb_per_s=2_933,
        mib=81_559,
        pcie_gb_per_s=64,
        nvlink_gb_per_s=450,
        source=(
            "NVIDIA H100 data sheet, H100 SXM: "
            "1,979 TFLOPS BF16 and 3,958 FP8 with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways"
        ),
    ),
    _gpu(
        "h100-pcie",
        tflops={"bf16": 756, "fp8": 1_513, "int8": 1_513},
        matmul_tflops=499.5,
        gb_per_s=2_000,
        mib=81_559,
        pcie_gb_per_s=64,
        source=(
            "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 PCIe: "
            "756 TFLOPS BF16, 1,513 FP8 dense, 2 TB/s"
        ),
    ),
    _gpu(
        "h200",
        tflops={"bf16": 989.4, "fp8": 1_978.9, "int8": 1_978.9},
        matmul_tflops=790,
        gb_per_s=4_800,
        mib=143_771,
        pcie_gb_per_s=64,
        nvlink_gb_per_s=450,
        source="NVIDIA H200 data sheet, H200 SXM: math of H100 SXM, 141 GB, 4.8 TB/s",
    ),
    _gpu(
        "h20",
        tflops={"bf16": 148, "fp8": 296, "int8": 296},
        matmul_tflops=142,
        gb_per_s=4_000,
        mib=97_871,
        pcie_gb_per_s=64,
        nvlink_gb_per_s=450,
        source="NVIDIA HGX H20 product brief: 148 TFLOPS BF16, 296 FP8, 96 GB, 4.0 TB/s",
    ),
    _gpu(
        "b200",
        tflops={"bf16": 2_250, "fp8": 4_500, "int8": 4_500},
        matmul_tflops=1_696,
        gb_per_s=8_000,
        mib=183_359,
        pcie_gb_per_s=64,
        nvlink_gb_per_s=900,
        source=(
            "NVIDIA DGX B200 data sheet over 8: "
            "36 PFLOPS FP8 dense, 1,440 GB, 64 TB/s, NVLink 1.8 TB/s both ways"
        ),
    ),
    _gpu(
        "l40s",
        tflops={"bf16": 362, "fp8": 733, "int8": 733},
        matmul_tflops=269,
        gb_per_s=864,
        mib=46_068,
        pcie_gb_per_s=32,
        source="NVIDIA L40S data sheet: 362.05 TFLOPS BF16, 733 FP8 dense, 864 GB/s",
    ),
    _gpu(
        "l4",
        tflops={"bf16": 121, "fp8": 242.5, "int8": 242.5},
        matmul_tflops=91.4,
        gb_per_s=300,
        mib=23_034,
        pcie_gb_per_s=32,
        source="NVIDIA L4 data sheet: 242 TFLOPS BF16 and 485 FP8 with sparsity, 300 GB/s",
    ),
    _gpu(
        "a10g",
        tflops={"bf16": 70, "int8": 140},
        gb_per_s=600,
        mib=23_028,
        pcie_gb_per_s=32,
        source="NVIDIA A10G as in AWS g5: 70 TFLOPS BF16, 140 TOPS INT8, 600 GB/s",
    ),
    _gpu(
        "rtx-4090",
        tflops={"bf16": 165.2, "fp8": 330.3, "int8": 660.6},
        matmul_tflops=165,
        gb_per_s=1_008,
        read_gb_per_s=958,
        mib=24_564,
        pcie_gb_per_s=32,
        source=(
            "NVIDIA Ada GPU Architecture white paper, RTX 4090: BF16 and FP8 with FP32 accumulate, dense"
        ),
    ),
    _gpu(
        "rtx-pro-6000",
        tflops={"bf16": 503.8, "fp8": 1_007.6, "int8": 1_007.6},
        matmul_tflops=393,
        gb_per_s=1_792,
        read_gb_per_s=1_527,
        mib=97_887,
        pcie_gb_per_s=64,
        source="NVIDIA RTX Blackwell PRO GPU Architecture white paper, RTX PRO 6000 Workstation, dense",
    ),
    _gpu(
        "mi300x",
        tflops={"bf16": 1_307.4, "fp8": 2_614.9, "int8": 2_614.9},
        matmul_tflops=758,
        gb_per_s=5_300,
        mib=196_592,
        pcie_gb_per_s=64,
        nvlink_gb_per_s=448,
        source=(
            "AMD Instinct MI300X data sheet: "
            "1,307.4 TFLOPS BF16, 2,614.9 FP8 dense, 5.3 TB/s, 896 GB/s Infinity Fabric both ways"
        ),
    ),
)

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _ALL}
