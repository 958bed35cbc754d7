"""What accelerators can do: peak rates, memory, and the formats their matrix units multiply.

One sourced table, standard library only. Rates are dense (structured sparsity, which doubles the
figure that data sheets print first, is never counted), in 10^12 operations a second with a
multiply-add as two, for one GPU at its full power limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mixprec.formats import FORMATS, FloatFormat

GB = 10**9
TERA = 1e12
RATE_TYPES = (
    "fp64",
    "fp64_tensor",
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "fp6",
    "fp4",
    "int8",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """GPUs that share a programming model.

    Attributes:
        vendor: "nvidia" or "amd".
        name: The vendor's name of it.
        capability: The first compute capability of it, as ``torch.cuda.get_device_capability``
            gives it (on AMD: of the gfx number).
        formats: Names in ``FORMATS`` that the matrix units multiply; fp32 and fp64 run on every GPU
            and are always among them.
        fp8_sums: How the FP8 units add, where it is in fewer bits than FP32, and the bound on the
            error; a model after published measurements. Empty where they add in FP32.
    """

    vendor: str
    name: str
    capability: tuple[int, int]
    formats: frozenset[str]
    fp8_sums: str = ""

    def multiplies(self, fmt: FloatFormat) -> bool:
        """Whether the matrix units take a format, whatever it is called."""
        return any(fmt == FORMATS[name] for name in self.formats)


_PLAIN = frozenset({"fp32", "fp64"})
_HALF = _PLAIN | {"fp16"}
_AMPERE = _HALF | {"bf16", "tf32"}
_FP8 = _AMPERE | {"e4m3", "e5m2"}
_FP4 = _FP8 | {"e3m2", "e2m3", "e2m1"}

# An instruction adds 32 products and the sum so far, each cut to a multiple of 2^(e - 13), e the
# exponent of the largest: below 33 * 2^-13 of it. Four of them fill the 128 products between two
# additions to the FP32 sum, and no term exceeds sum |a||b|.
_HOPPER_SUMS = (
    "FP8 sums in about 13 fraction bits, collected in FP32 every 128 products: error up to "
    "132 * 2^-13 * scale * sum|a||b| (a model after measurements)"
)
_ADA_SUMS = "FP8 sums in about 13 fraction bits (measured; no bound is known)"

# Sources: CUDA C++ Programming Guide (features by compute capability), PTX ISA (mma, wgmma and
# tcgen05.mma operand types), AMD CDNA 3 instruction set (fp8 there is the fnuz kind). Sums of FP8
# products: DeepSeek-V3 report (arXiv 2412.19437, section 3.3.2); Khattak and Mikaitis, Accurate
# Models of NVIDIA Tensor Cores (arXiv 2512.07004); SageAttention2 (arXiv 2411.10958) for Ada.
GENERATIONS = (
    Generation(vendor="nvidia", name="Pascal or older", capability=(0, 0), formats=_PLAIN),
    Generation(vendor="nvidia", name="Volta", capability=(7, 0), formats=_HALF),
    Generation(vendor="nvidia", name="Turing", capability=(7, 5), formats=_HALF),
    Generation(vendor="nvidia", name="Ampere", capability=(8, 0), formats=_AMPERE),
    Generation(vendor="nvidia", name="Ada", capability=(8, 9), formats=_FP8, fp8_sums=_ADA_SUMS),
    Generation(
        vendor="nvidia", name="Hopper", capability=(9, 0), formats=_FP8, fp8_sums=_HOPPER_SUMS
    ),
    Generation(vendor="nvidia", name="Blackwell", capability=(10, 0), formats=_FP4),
    Generation(vendor="nvidia", name="Blackwell (RTX)", capability=(12, 0), formats=_FP4),
    Generation(vendor="amd", name="older than CDNA 3", capability=(0, 0), formats=_HALF | {"bf16"}),
    Generation(
        vendor="amd",
        name="CDNA 3",
        capability=(9, 4),
        formats=_AMPERE | {"e4m3fnuz", "e5m2fnuz"},
    ),
)


def generation(capability: tuple[int, int], vendor: str = "nvidia") -> Generation:
    """The newest generation whose first capability is not above the given one.

    Args:
        capability: Major and minor compute capability.
        vendor: "nvidia" or "amd".

    Raises:
        ValueError: An unknown vendor.
    """
    rows = [row for row in GENERATIONS if row.vendor == vendor and row.capability <= capability]
    if not rows:
        raise ValueError(f"vendor: got {vendor!r}; the table has nvidia and amd; pass one of them")
    return max(rows, key=lambda row: row.capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU of the table.

    Attributes:
        name: As it appears in the device's name.
        vendor: "nvidia" or "amd".
        capability: Compute capability.
        memory_bytes: Memory, in bytes.
        bandwidth: Peak memory bandwidth, bytes a second.
        rates: Peak dense rate by type (``RATE_TYPES``), in 10^12 operations a second; a type
            without units of its own is absent. "fp64_tensor" is the matrix units' rate, "fp64" and
            "fp32" the vector units'.
        source: The document the figures are from, and what was derived.
    """

    name: str
    vendor: str = "nvidia"
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth: float
    rates: Mapping[str, float]
    source: str

    @property
    def formats(self) -> frozenset[str]:
        """Formats that run natively."""
        return generation(self.capability, self.vendor).formats

    def rate(self, fmt: FloatFormat) -> float | None:
        """Operations a second at which products of a format run; None where no unit takes it.

        Of fp64 the matrix units' rate where there are such, of fp32 the vector units'.
        """
        if not generation(self.capability, self.vendor).multiplies(fmt):
            return None
        kind = fmt.name if fmt.name in RATE_TYPES else f"fp{fmt.bits}"
        rate = self.rates.get(f"{kind}_tensor", self.rates.get(kind))
        return None if rate is None else rate * TERA


def _rates(**rates: float) -> Mapping[str, float]:
    assert set(rates) <= set(RATE_TYPES)
    return MappingProxyType(rates)


_HOPPER_SXM = _rates(
    fp64=33.5,
    fp64_tensor=67.0,
    fp32=67.0,
    tf32=494.7,
    bf16=989.4,
    fp16=989.4,
    fp8=1978.9,
    int8=1978.9,
)

ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        row.name: row
        for row in (
            Accelerator(
                name="L4",
                capability=(8, 9),
                memory_bytes=24 * GB,
                bandwidth=300e9,
                rates=_rates(
                    fp64=0.47, fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0, fp8=242.5, int8=242.5
                ),
                source="NVIDIA L4 data sheet, tensor rates halved to dense; fp64 is 1/64 of fp32 "
                "(Ada architecture white paper)",
            ),
            Accelerator(
                name="A100",
                capability=(8, 0),
                memory_bytes=80 * GB,
                bandwidth=2039e9,
                rates=_rates(
                    fp64=9.7,
                    fp64_tensor=19.5,
                    fp32=19.5,
                    tf32=156.0,
                    bf16=312.0,
                    fp16=312.0,
                    int8=624.0,
                ),
                source="NVIDIA A100 80GB SXM data sheet",
            ),
            Accelerator(
                name="H100",
                capability=(9, 0),
                memory_bytes=80 * GB,
                bandwidth=3350e9,
                rates=_HOPPER_SXM,
                source="NVIDIA H100 SXM data sheet and H100 architecture white paper (dense rates)",
            ),
            Accelerator(
                name="H200",
                capability=(9, 0),
                memory_bytes=141 * GB,
                bandwidth=4800e9,
                rates=_HOPPER_SXM,
                source="NVIDIA H200 SXM data sheet; the rates are those of H100 SXM",
            ),
            Accelerator(
                name="B200",
                capability=(10, 0),
                memory_bytes=192 * GB,
                bandwidth=8000e9,
                rates=_rates(
                    fp64=40.0,
                    fp64_tensor=40.0,
                    fp32=80.0,
                    tf32=1100.0,
                    bf16=2250.0,
                    fp16=2250.0,
                    fp8=4500.0,
                    fp6=4500.0,
                    fp4=9000.0,
                    int8=4500.0,
                ),
                source="NVIDIA Blackwell architecture technical brief, HGX B200, per GPU, "
                "halved to dense",
            ),
            Accelerator(
                name="GB200",
                capability=(10, 0),
                memory_bytes=192 * GB,
                bandwidth=8000e9,
                rates=_rates(
                    fp64=45.0,
                    fp64_tensor=45.0,
                    fp32=90.0,
                    tf32=1250.0,
                    bf16=2500.0,
                    fp16=2500.0,
                    fp8=5000.0,
                    fp6=5000.0,
                    fp4=10000.0,
                    int8=5000.0,
                ),
                source="NVIDIA Blackwell architecture technical brief, GB200 superchip, half of it "
                "(one of its two GPUs), halved to dense",
            ),
            Accelerator(
                name="MI300X",
                vendor="amd",
                capability=(9, 4),
                memory_bytes=192 * GB,
                bandwidth=5300e9,
                rates=_rates(
                    fp64=81.7,
                    fp64_tensor=163.4,
                    fp32=163.4,
                    tf32=653.7,
                    bf16=1307.4,
                    fp16=1307.4,
                    fp8=2614.9,
                    int8=2614.9,
                ),
                source="AMD Instinct MI300X data sheet",
            ),
        )
    }
)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The row of a device by the name its driver reports; None for hardware not in the table.

    Args:
        device_name: For example "NVIDIA H100 80GB HBM3" or "NVIDIA A100-SXM4-80GB".
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device_name.upper()))
    return next((row for name, row in ACCELERATORS.items() if name in words), None)
