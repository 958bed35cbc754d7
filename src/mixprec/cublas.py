"""cuBLAS from outside: which version torch loads, its settings of emulation, and its log.

The settings are environment variables of the table in ``variables``, which says what each accepts;
cuBLAS reads them when a handle is created and ignores a wrong value, here it is an error.

The log, as ``CUBLAS_LOGINFO_DBG=1`` writes it. NVIDIA documents the two variables, the routines,
their arguments, the math modes and the compute types, but not the layout of the lines; that is as
logs of versions 10.2 to 13.4 show it, one record a call::

    I! cuBLAS (v13.4.1) function cublasStatus_t cublasDgemm_v2(cublasHandle_t, ...) called:
    i!  m: type=int; val=2
    i!Process=14102; Thread=...; GPU=0; ...; MathMode=CUBLAS_DEFAULT_MATH

None of those logs has a field that says whether a call was emulated: cuBLAS tells that only through
cublasSetFixedPointEmulationMantissaBitCountPointer, and none seen was of an emulated product.
What a record settles:

- documented: emulation is of FP64 and FP32 alone, so that a call of other types was not emulated,
  nor one of a pedantic compute type or math mode ("standardized arithmetic for all phases");
- documented: a compute type or math mode with EMULATED in its name allows emulation, no more;
- assumed: a field whose name has "emulated" or "emulation" and whose value is 0 or 1, true or
  false, yes or no would say whether the call was emulated.

All other calls are "not said".
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mixprec.variables import check_value

DOUBLE = "CUBLAS_EMULATE_DOUBLE_PRECISION"
SINGLE = "CUBLAS_EMULATE_SINGLE_PRECISION"
STRATEGY = "CUBLAS_EMULATION_STRATEGY"
SPECIAL_VALUES = "CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK"
BITS = "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT"
LOG_ON = "CUBLAS_LOGINFO_DBG"
LOG_TO = "CUBLAS_LOGDEST_DBG"
SPECIALS = ("inf", "nan")  # bit 0 and bit 1 of the mask
SLICE_BITS = 8

_LIBRARY = re.compile(r"libcublas\.so\.(\d+(?:\.\d+)+)")
_HEADER = re.compile(r"I!\s*cuBLAS \(v([\d.]+)\) function .*?\b(cublas\w+)\(")
_FIELD = re.compile(r"i!\s*(\w+): type=[^;]*; val=(.*)")
_PLACE = re.compile(r"i!\s*Process=(\d+);(?:.*\bMathMode=(.*))?")
_OTHER_RECORD = re.compile(r"[A-Z]!")
_SUFFIXES = re.compile(r"(_v2)?(_64)?$")
_NO_ARITHMETIC = re.compile(r"cublas(Create|Destroy|Set|Get|Logger|Xerbla)")
_LETTER = re.compile(r"cublas(?:I([sdcz])|([SDCZH]))[a-z]\w*(?<!Ex)$")  # not cublasDotEx
_LETTERS = {"S": "FP32", "D": "FP64", "C": "FP32 complex", "Z": "FP64 complex", "H": "FP16"}
_OPERAND_TYPES = ("Atype", "xType")
_DATA_TYPE = re.compile(r"CUDA_([RC])_(\w+)")
_SIZES = {"64F": "FP64", "32F": "FP32", "16F": "FP16", "16BF": "BF16"}
_EMULATED_TYPES = frozenset({"FP32", "FP64", "FP32 complex", "FP64 complex"})
_VERDICTS = {True: "emulated", False: "native", None: "not_said"}
_COUNTS = ("calls", "emulated", "native", "not_said", "allowed")
_SAID = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What a program's cuBLAS shall emulate; None leaves a variable as it is.

    Attributes:
        fp64: Mantissa bits of emulated FP64 from 1 on, "auto" for as many as the operands need,
            "off" to forbid it.
        fp32: Whether FP32 may be made from BF16.
        strategy: "performant" emulates where that is faster, "eager" wherever it is possible.
        special_values: Which of "inf" and "nan" emulated products have to keep; () is neither.

    Raises:
        ValueError: cuBLAS would ignore one of them.
    """

    fp64: int | Literal["auto", "off"] | None = None
    fp32: bool | None = None
    strategy: str | None = None
    special_values: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.fp64 is not None and self.fp64 not in ("auto", "off"):
            if isinstance(self.fp64, bool) or not isinstance(self.fp64, int) or self.fp64 < 1:
                raise ValueError(
                    f"fp64: got {self.fp64!r}; must be a whole number of bits from 1 on, 'auto' or "
                    "'off'; pass 55 or 79"
                )
        if self.strategy is not None:
            check_value(STRATEGY, self.strategy, argument="strategy")
        wrong = sorted(set(self.special_values or ()) - set(SPECIALS))
        if wrong:
            raise ValueError(
                f"special_values: got {wrong[0]!r}; must be of 'inf' and 'nan'; () keeps neither"
            )

    def environment(self) -> dict[str, str | None]:
        """The variables that these settings change; None for one that must not be set.

        Edge cases: ``fp64="auto"`` takes a fixed number of bits out of the environment, which
        cuBLAS would follow.
        """
        changes: dict[str, str | None] = {}
        if self.fp64 is not None:
            changes[DOUBLE] = "0" if self.fp64 == "off" else "1"
        if self.fp64 == "auto":
            changes[BITS] = None
        elif self.fp64 not in (None, "off"):
            changes[BITS] = check_value(BITS, str(self.fp64))
        if self.fp32 is not None:
            changes[SINGLE] = str(int(self.fp32))
        if self.strategy is not None:
            changes[STRATEGY] = self.strategy
        if self.special_values is not None:
            mask = sum(1 << i for i, name in enumerate(SPECIALS) if name in self.special_values)
            changes[SPECIAL_VALUES] = str(mask)
        return changes


def special_values(mask: str) -> tuple[str, ...]:
    """Which special values a mask keeps: "2" is ("nan",)."""
    number = int(check_value(SPECIAL_VALUES, mask), 0)
    return tuple(name for i, name in enumerate(SPECIALS) if number >> i & 1)


def slices(bits: int) -> int:
    """Slices of 8 bits that cuBLAS takes for so many mantissa bits and a sign: 55 is 7, 79 is 10.

    slices = ceil((bits + 1) / 8); bits up to 8 slices - 1 cost nothing more.
    """
    return -(-(bits + 1) // SLICE_BITS)


def library_version(
    cuda: tuple[int, int] | None, folders: Iterable[Path] = ()
) -> tuple[int, ...] | None:
    """Version of the cuBLAS that a torch built with a version of CUDA loads; nothing is loaded.

    The installed distribution of NVIDIA for that CUDA, else the name of a library file.

    Args:
        cuda: Version of CUDA; None gives None.
        folders: Where library files may lie, the likeliest first.

    Edge cases: None where neither is there. A library that LD_LIBRARY_PATH or LD_PRELOAD puts
    before it is not seen.
    """
    if cuda is None:
        return None
    for name in ("nvidia-cublas", f"nvidia-cublas-cu{cuda[0]}"):
        try:
            found = _numbers(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found[:1] == cuda[:1]:
            return found
    files = (path.resolve() for folder in folders for path in sorted(folder.glob("libcublas.so*")))
    names = (_LIBRARY.fullmatch(path.name) for path in files)
    versions = (_numbers(name[1]) for name in names if name)
    return next((version for version in versions if version[0] == cuda[0]), None)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 13.7.0.10rc1 is (13, 7, 0, 10)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one routine on one type.

    Attributes:
        routine: Its name without the suffix of a version, as cublasDgemm.
        type: Of the operands, as FP64; "" where the record does not say.
        calls: How many.
        emulated: Of these, how many by emulation.
        native: How many without.
        not_said: How many of which the log does not say it.
        allowed: How many whose compute type or math mode allowed emulation.
    """

    routine: str
    type: str
    calls: int
    emulated: int
    native: int
    not_said: int
    allowed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What a log of cuBLAS says.

    Attributes:
        versions: Of cuBLAS, as the records have them.
        processes: How many processes wrote it.
        calls: By routine and type, the most frequent first.
    """

    versions: tuple[str, ...]
    processes: int
    calls: tuple[Calls, ...]


@dataclass(slots=True)
class _Record:
    """A call as logged."""

    version: str
    routine: str
    fields: dict[str, str] = field(default_factory=dict)
    process: str = ""
    math_mode: str = ""

    def type(self) -> str:
        """Of the first operand, else from the letter in the routine's name; "" if neither says."""
        for name in _OPERAND_TYPES:
            found = _DATA_TYPE.match(self.fields.get(name, ""))
            if found:
                return _SIZES.get(found[2], found[2]) + (" complex" if found[1] == "C" else "")
        letter = _LETTER.match(self.routine)
        return _LETTERS[(letter[1] or letter[2]).upper()] if letter else ""

    def was_emulated(self) -> bool | None:
        """Whether the record says that the call was emulated; None where it does not say."""
        for name, value in self.fields.items():
            if re.search("emulated|emulation", name, re.IGNORECASE):
                said = _SAID.get(value.lower())
                if said is not None:
                    return said
        if "PEDANTIC" in self.arithmetic() or self.type() not in {"", *_EMULATED_TYPES}:
            return False
        return None

    def arithmetic(self) -> str:
        """The compute type where the routine takes one, else the math mode of the handle."""
        return self.fields.get("computeType", self.math_mode)


def parse_log(lines: Iterable[str]) -> Log:
    """Tabulates a log of cuBLAS, line by line; what is documented of it, the module says.

    Args:
        lines: Of the log; those of other origin are passed over.

    Edge cases: a call that only sets or gets something is no row. Records that several threads or
    processes wrote into each other are counted by their first lines; the fields between them
    belong to the last one.
    """
    versions: dict[str, None] = {}
    processes: set[str] = set()
    tally: dict[tuple[str, str], Counter[str]] = {}
    for record in _records(lines):
        versions[record.version] = None
        processes.add(record.process)
        if _NO_ARITHMETIC.match(record.routine):
            continue
        row = tally.setdefault((record.routine, record.type()), Counter())
        row["calls"] += 1
        row[_VERDICTS[record.was_emulated()]] += 1
        row["allowed"] += "EMULATED" in record.arithmetic() + record.math_mode
    rows = [
        Calls(routine=routine, type=type_, **{name: row[name] for name in _COUNTS})
        for (routine, type_), row in tally.items()
    ]
    return Log(
        versions=tuple(versions),
        processes=len(processes - {""} or processes),
        calls=tuple(sorted(rows, key=lambda row: (-row.calls, row.routine, row.type))),
    )


def _records(lines: Iterable[str]) -> Iterator[_Record]:
    """The calls of a log, in its order."""
    record = None
    for line in lines:
        text = line.rstrip()
        if _OTHER_RECORD.match(text):
            if record is not None:
                yield record
            header = _HEADER.match(text)
            record = _Record(header[1], _SUFFIXES.sub("", header[2])) if header else None
        elif record is not None:
            _add(record, text)
    if record is not None:
        yield record


def _add(record: _Record, text: str) -> None:
    """Puts what a line says of a call into its record."""
    found = _FIELD.match(text)
    if found:
        record.fields.setdefault(found[1], found[2].strip())
    place = _PLACE.match(text)
    if place:
        record.process = place[1]
        record.math_mode = (place[2] or "").strip()
