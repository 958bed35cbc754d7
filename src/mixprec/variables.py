"""Environment variables that people set for precision: what they do, and whether they do it here.

Nothing is read at import. Sources: cuBLAS 13.0 documentation (floating-point emulation, results
reproducibility, logger), PyTorch's list of CUDA environment variables, oneDNN's developer guide
(floating-point math mode, CPU dispatcher). Emulation of FP64 came with CUDA 13.0 update 2, which is
cuBLAS 13.1.0: the package cuda-toolkit 13.0.2 asks for nvidia-cublas 13.1.0.3, update 1 for
13.0.2.14. Measured with torch 2.13 on a CPU with AMX: the results follow
``ATEN_CPU_CAPABILITY``, ``MKL_CBWR`` and ``ONEDNN_DEFAULT_FPMATH_MODE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_BF16_UNITS = frozenset({"AMX BF16", "AVX-512 BF16"})
_EMULATED_DOUBLES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (12, 1))
_EMULATED_SINGLES = ((10, 0), (10, 3))
_TF32_UNITS = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    """The first release of cuBLAS that can do something, and where CUDA has it."""

    cublas: tuple[int, ...]
    cuda: tuple[int, int]
    update: int = 0

    def __str__(self) -> str:
        update = f" update {self.update}" if self.update else ""
        return f"cuBLAS {dotted(self.cublas)} (CUDA {dotted(self.cuda)}{update})"


_SINGLES_FROM = _Release(cublas=(12, 9), cuda=(12, 9))
_DOUBLES_FROM = _Release(cublas=(13, 1), cuda=(13, 0), update=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides whether a variable is read.

    Attributes:
        cuda: Version of CUDA that torch was built with; None without.
        cublas: Version of the cuBLAS that torch loads; None without, or where it was not found.
        is_rocm: Whether torch was built for AMD's GPUs.
        capability: Compute capability of the first NVIDIA GPU; None where none is seen.
        has_nccl: Whether torch has NCCL, or RCCL in its place.
        has_onednn: Whether torch has oneDNN.
        has_mkl: Whether torch has MKL.
        cpu_features: Names of the processor's features, as the survey has them.
    """

    cuda: tuple[int, int] | None = None
    cublas: tuple[int, ...] | None = None
    is_rocm: bool = False
    capability: tuple[int, int] | None = None
    has_nccl: bool = False
    has_onednn: bool = False
    has_mkl: bool = False
    cpu_features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """An environment variable as it stands.

    Attributes:
        name: In the environment.
        value: Now; None where it is not set.
        purpose: What it does where it is read.
        has_effect: Whether it is set, to something that acts, and read here.
        reason: Why it has an effect or none, in a line.
        warning: What its effect spoils, if it does; else "".
    """

    name: str
    value: str | None
    purpose: str
    has_effect: bool
    reason: str
    warning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What is known of a variable: who reads it where, and which values act."""

    name: str
    purpose: str
    why_not: Callable[[Machine], str | None]
    acts: str = ".*"
    values: str = ""
    warning: str = ""


def read_variables(environment: Mapping[str, str], machine: Machine) -> tuple[Variable, ...]:
    """The variables of the table with their values in an environment.

    Args:
        environment: Usually ``os.environ``, read when this is called.
        machine: Where they would act.

    Edge cases: an empty value counts as set. Libraries may ignore what looks valid, for example
    cuBLAS emulation in a release that has none for a shape; this says who reads a variable.
    """
    return tuple(_read(row, environment.get(row.name), machine) for row in _ROWS)


def check_value(name: str, value: str, *, argument: str | None = None) -> str:
    """The value, where it is one on which the variable acts.

    Args:
        name: A variable of the table.
        value: As it stands, or would stand, in the environment.
        argument: What the error calls it; the variable's name by default.

    Raises:
        ValueError: The library that reads the variable would ignore the value.
        KeyError: The variable is not in the table.
    """
    row = {row.name: row for row in _ROWS}[name]
    if re.fullmatch(row.acts, value):
        return value
    fix = "unset it, or set one of these" if argument is None else "pass one of these"
    raise ValueError(f"{argument or name}: got {value!r}; must be {row.values}; {fix}")


def _read(row: _Row, value: str | None, machine: Machine) -> Variable:
    reason = row.why_not(machine)
    has_effect = False
    if reason is None and value is None:
        reason = "not set"
    elif reason is None and not re.fullmatch(row.acts, value or ""):
        reason = f"got {value!r}; only {row.values} acts"
    elif reason is None:
        reason, has_effect = "set, and read here", True
    assert reason is not None
    return Variable(
        name=row.name,
        value=value,
        purpose=row.purpose,
        has_effect=has_effect,
        reason=reason,
        warning=row.warning if has_effect else "",
    )


def _anywhere(machine: Machine) -> str | None:
    return None


def _gpu_build(machine: Machine) -> str | None:
    is_gpu_build = machine.cuda is not None or machine.is_rocm
    return None if is_gpu_build else "this torch is built without GPUs"


def _nvidia(machine: Machine) -> str | None:
    return "no NVIDIA GPU" if machine.capability is None else None


def _tf32(machine: Machine) -> str | None:
    if machine.capability is not None and machine.capability < _TF32_UNITS:
        return f"no TF32 units in compute capability {dotted(machine.capability)}"
    return _nvidia(machine)


def _emulates(
    capabilities: tuple[tuple[int, int], ...], first: _Release
) -> Callable[[Machine], str | None]:
    """Whether cuBLAS can emulate on these compute capabilities, from a release on."""

    def why_not(machine: Machine) -> str | None:
        if machine.cuda is None:
            return "this torch is built without CUDA"
        if machine.capability is None:
            return "no NVIDIA GPU"
        if machine.capability not in capabilities:
            return f"cuBLAS emulates nothing on compute capability {dotted(machine.capability)}"
        return _too_old(machine.cuda, machine.cublas, first)

    return why_not


def _too_old(cuda: tuple[int, int], cublas: tuple[int, ...] | None, first: _Release) -> str | None:
    """Why a cuBLAS is not known to be of a release or later; None where it is."""
    if cublas is not None:
        has = f"cuBLAS {dotted(cublas)}"
        return None if cublas >= first.cublas else f"needs {first}, this torch has {has}"
    if cuda < first.cuda:
        return f"needs {first}, this torch has CUDA {dotted(cuda)}"
    if cuda == first.cuda and first.update:
        return f"needs {first}, and the cuBLAS of this torch was not found"
    return None


def _nccl(machine: Machine) -> str | None:
    return None if machine.has_nccl else "this torch has no NCCL"


def _onednn(machine: Machine) -> str | None:
    return None if machine.has_onednn else "this torch has no oneDNN"


def _fast_bf16(machine: Machine) -> str | None:
    if machine.has_onednn and not machine.cpu_features & _BF16_UNITS:
        return "no BF16 units in this CPU"
    return _onednn(machine)


def _mkl(machine: Machine) -> str | None:
    return None if machine.has_mkl else "this torch has no MKL"


def dotted(version: tuple[int, ...]) -> str:
    """(13, 0) as 13.0."""
    return ".".join(map(str, version))


_SINGLES = _emulates(_EMULATED_SINGLES, _SINGLES_FROM)
_DOUBLES = _emulates(_EMULATED_DOUBLES, _DOUBLES_FROM)


def _either(machine: Machine) -> str | None:
    return _DOUBLES(machine) and _SINGLES(machine)


_FLAG = {"acts": "[01]", "values": "0 or 1"}
_MATH_MODES = {
    "acts": "(?i)bf16|any",
    "values": "bf16 or any",
    "warning": "oneDNN rounds the operands of FP32 convolutions to BF16, also of those that stand "
    "in for convolutions of 16 bits; unset it",
}

_ROWS = (
    _Row(
        name="AMPLITE_LEVEL",
        purpose="optimisation level of train and compare where their configuration names neither "
        "a recipe nor a level; they refuse other values than O0 to O3",
        why_not=_anywhere,
        acts="O[0-3]",
        values="O0, O1, O2 or O3",
    ),
    _Row(
        name="CUDA_VISIBLE_DEVICES",
        purpose="the GPUs that a program sees, by number or name; empty hides all",
        why_not=_gpu_build,
    ),
    _Row(
        name="NVIDIA_TF32_OVERRIDE",
        purpose="0 keeps NVIDIA's libraries from TF32 whatever a program allows; other values are "
        "reserved",
        why_not=_tf32,
        acts="0",
        values="0",
    ),
    _Row(
        name="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        purpose="1 lets FP32 products run in TF32 from the start, as "
        'torch.set_float32_matmul_precision("high") does: fp32 is not fp32 then',
        why_not=_tf32,
        acts="1",
        values="1",
    ),
    _Row(
        name="CUBLAS_WORKSPACE_CONFIG",
        purpose=":4096:8 or :16:8 make products on several streams repeat bit for bit; torch asks "
        "for it where deterministic algorithms are demanded",
        why_not=_nvidia,
    ),
    _Row(
        name="CUBLASLT_WORKSPACE_SIZE",
        purpose="KiB that torch lends to cuBLASLt, whose choice of kernels depends on it",
        why_not=_nvidia,
        acts=r"\d+",
        values="a whole number",
    ),
    _Row(
        name="CUBLAS_EMULATE_SINGLE_PRECISION",
        purpose="1 lets cuBLAS make FP32 products from nine BF16 ones, 0 forbids it",
        why_not=_SINGLES,
        **_FLAG,
    ),
    _Row(
        name="CUBLAS_EMULATE_DOUBLE_PRECISION",
        purpose="1 lets cuBLAS make FP64 products from 8-bit integer ones, 0 forbids it",
        why_not=_DOUBLES,
        **_FLAG,
    ),
    _Row(
        name="CUBLAS_EMULATION_STRATEGY",
        purpose="performant emulates where that is faster, eager wherever it is possible",
        why_not=_either,
        acts="performant|eager",
        values="performant or eager",
    ),
    _Row(
        name="CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK",
        purpose="what emulated products do with special values: bit 0 keeps infinities, bit 1 NaN",
        why_not=_either,
        acts="(0x)?[0-3]",
        values="0 to 3",
    ),
    _Row(
        name="CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
        purpose="a fixed number of mantissa bits for emulated FP64, in place of as many as the "
        "operands need",
        why_not=_DOUBLES,
        acts=r"[1-9]\d*",
        values="a whole number from 1 on",
    ),
    _Row(
        name="CUBLAS_LOGINFO_DBG",
        purpose="1 makes cuBLAS log every call with its arguments",
        why_not=_nvidia,
        **_FLAG,
    ),
    _Row(
        name="CUBLAS_LOGDEST_DBG",
        purpose="where the log of cuBLAS goes: stdout, stderr or a file",
        why_not=_nvidia,
        acts=".+",
        values="stdout, stderr or a file",
    ),
    _Row(
        name="NCCL_DEBUG",
        purpose="what NCCL logs (VERSION, WARN, INFO, TRACE); changes no number",
        why_not=_nccl,
    ),
    _Row(
        name="ONEDNN_DEFAULT_FPMATH_MODE",
        purpose="bf16 or any lets oneDNN round the operands of FP32 convolutions to BF16: fp32 is "
        "not fp32 then",
        why_not=_fast_bf16,
        **_MATH_MODES,
    ),
    _Row(
        name="DNNL_DEFAULT_FPMATH_MODE",
        purpose="the older name of ONEDNN_DEFAULT_FPMATH_MODE",
        why_not=_fast_bf16,
        **_MATH_MODES,
    ),
    _Row(
        name="ONEDNN_MAX_CPU_ISA",
        purpose="the newest instructions that oneDNN uses, and so the order of its sums",
        why_not=_onednn,
    ),
    _Row(
        name="ATEN_CPU_CAPABILITY",
        purpose="the instructions that torch's own CPU kernels use, and so the order of their sums",
        why_not=_anywhere,
        acts=r"default|avx2|avx512|vsx|zvector|sve\d*",
        values="a lower-case name such as default, avx2 or avx512",
    ),
    _Row(
        name="MKL_CBWR",
        purpose="makes MKL's products the same on every processor, by older instructions",
        why_not=_mkl,
    ),
)
