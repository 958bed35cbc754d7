"""cuBLAS from outside: settings, the version of the library, and the log."""

from __future__ import annotations

import importlib.metadata
from fractions import Fraction
from math import ceil
from pathlib import Path

import pytest

from mixprec import cublas
from mixprec.cublas import Calls, Emulation, library_version, parse_log, slices, special_values


def record(
    routine: str,
    *fields: str,
    mode: str = "CUBLAS_DEFAULT_MATH",
    process: int = 11,
    version: str = "13.4.1",
) -> str:
    """A call as cuBLAS logs it."""
    lines = [
        f"I! cuBLAS (v{version}) function cublasStatus_t {routine}(cublasHandle_t, int) called:",
        "i!  handle: type=cublasHandle_t; val=POINTER (IN HEX:0x0x5c81d0)",
        *(f"i!  {name}: type=T; val={value}" for name, value in (f.split("=") for f in fields)),
        "i! Time: 2026-11-05T10:00:00 elapsed from start 0.016667 minutes or 1.000000 seconds",
        f"i!Process={process}; Thread=77; GPU=0; Handle=POINTER (IN HEX:0x0x5c81d0); StreamId="
        f"POINTER (IN HEX:0x(nil)) (defaultStream); MathMode={mode}",
        "i! COMPILED WITH: GNU GCC/G++ / 8.5.0 20210514 (Red Hat 8.5.0-26)",
    ]
    return "\n".join(lines) + "\n"


def rows(*records: str) -> tuple[Calls, ...]:
    return parse_log("".join(records).splitlines(keepends=True)).calls


def row(routine: str, type_: str, **counts: int) -> Calls:
    zero = dict.fromkeys(("calls", "emulated", "native", "not_said", "allowed"), 0)
    return Calls(routine=routine, type=type_, **zero | counts)


def test_call_that_does_not_say_it_is_not_guessed() -> None:
    assert rows(record("cublasDgemm_v2", "m=2048")) == (
        row("cublasDgemm", "FP64", calls=1, not_said=1),
    )


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ((), "CUBLAS_FP64_EMULATED_FIXEDPOINT_MATH"),
        (("computeType=CUBLAS_COMPUTE_64F_EMULATED_FIXEDPOINT(79)",), "CUBLAS_DEFAULT_MATH"),
    ],
)
def test_permission_to_emulate_is_not_emulation(fields: tuple[str, ...], mode: str) -> None:
    found = rows(record("cublasGemmEx", "Atype=CUDA_R_64F(1)", *fields, mode=mode))
    assert found == (row("cublasGemmEx", "FP64", calls=1, not_said=1, allowed=1),)


@pytest.mark.parametrize(
    ("routine", "fields", "mode"),
    [
        ("cublasHgemm", (), "CUBLAS_DEFAULT_MATH"),
        ("cublasGemmEx", ("Atype=CUDA_R_16BF(14)",), "CUBLAS_FP32_EMULATED_BF16X9_MATH"),
        ("cublasGemmEx", ("Atype=CUDA_R_8I(3)",), "CUBLAS_DEFAULT_MATH"),
        (
            "cublasGemmEx",
            ("Atype=CUDA_R_64F(1)", "computeType=CUBLAS_COMPUTE_64F_PEDANTIC(71)"),
            "CUBLAS_DEFAULT_MATH",
        ),
        ("cublasDgemm_v2", (), "CUBLAS_PEDANTIC_MATH"),
    ],
)
def test_other_types_and_pedantic_calls_are_native(
    routine: str, fields: tuple[str, ...], mode: str
) -> None:
    (found,) = rows(record(routine, *fields, mode=mode))
    assert (found.calls, found.native, found.not_said) == (1, 1, 0)


def test_compute_type_comes_before_the_math_mode() -> None:
    fields = ("Atype=CUDA_R_64F(1)", "computeType=CUBLAS_COMPUTE_64F(70)")
    (found,) = rows(record("cublasGemmEx", *fields, mode="CUBLAS_PEDANTIC_MATH"))
    assert (found.native, found.not_said) == (0, 1)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [("1", "emulated"), ("true", "emulated"), ("0", "native"), ("No", "native"), ("7", "not_said")],
)
def test_field_that_says_it_is_believed(value: str, verdict: str) -> None:
    found = rows(record("cublasDgemm_v2", f"isEmulated={value}"))
    assert found == (row("cublasDgemm", "FP64", calls=1, **{verdict: 1}),)


@pytest.mark.parametrize(
    ("routine", "fields", "name", "type_"),
    [
        ("cublasSgemm_v2", (), "cublasSgemm", "FP32"),
        ("cublasDgemm_v2_64", (), "cublasDgemm", "FP64"),
        ("cublasDtrsm_v2", (), "cublasDtrsm", "FP64"),
        ("cublasCgemm3m", (), "cublasCgemm3m", "FP32 complex"),
        ("cublasZgemmStridedBatched", (), "cublasZgemmStridedBatched", "FP64 complex"),
        ("cublasDgetrfBatched", (), "cublasDgetrfBatched", "FP64"),
        ("cublasIdamax_v2", (), "cublasIdamax", "FP64"),
        ("cublasGemmEx", ("Atype=CUDA_C_64F(5)",), "cublasGemmEx", "FP64 complex"),
        ("cublasGemmEx", ("Atype=CUDA_R_8F_E4M3(28)",), "cublasGemmEx", "8F_E4M3"),
        ("cublasSgemmEx", ("Atype=CUDA_R_16F(2)",), "cublasSgemmEx", "FP16"),
        ("cublasDotEx", ("xType=CUDA_R_32F(0)",), "cublasDotEx", "FP32"),
        ("cublasDotEx", (), "cublasDotEx", ""),
        ("__cdecl cublasDgemm_v2", (), "cublasDgemm", "FP64"),
    ],
)
def test_routine_and_type(routine: str, fields: tuple[str, ...], name: str, type_: str) -> None:
    (found,) = rows(record(routine, *fields))
    assert (found.routine, found.type) == (name, type_)


def test_what_only_sets_or_gets_is_no_row() -> None:
    names = ("cublasCreate_v2", "cublasSetStream_v2", "cublasGetMathMode", "cublasDestroy_v2")
    found = parse_log("".join(map(record, names)).splitlines())
    assert (found.calls, found.versions) == ((), ("13.4.1",))


def test_rows_are_counted_by_routine_and_type_the_most_frequent_first() -> None:
    text = [
        record("cublasSgemm_v2", process=12),
        *[record("cublasDgemm_v2", process=11)] * 3,
        record("cublasGemmEx", "Atype=CUDA_R_16F(2)", version="13.8"),
        record("cublasGemmEx", "Atype=CUDA_R_64F(1)"),
    ]
    found = parse_log("".join(text).splitlines())
    assert [(r.routine, r.type, r.calls) for r in found.calls] == [
        ("cublasDgemm", "FP64", 3),
        ("cublasGemmEx", "FP16", 1),
        ("cublasGemmEx", "FP64", 1),
        ("cublasSgemm", "FP32", 1),
    ]
    assert all(r.emulated + r.native + r.not_said == r.calls for r in found.calls)
    assert (found.versions, found.processes) == (("13.4.1", "13.8"), 2)


def test_lines_of_other_origin_are_passed_over() -> None:
    own = "epoch 3: loss 0.5\nE! cuBLAS: something failed\ni!  isEmulated: type=bool; val=1\n"
    assert rows(own, record("cublasDgemm_v2"), own) == rows(record("cublasDgemm_v2"))


def test_log_of_an_old_release_has_no_fields() -> None:
    line = "I! cuBLAS (v10.2) function cublasStatus_t cublasDgemm_v2(cublasContext*, int) called\n"
    found = parse_log([line, line])
    assert found.calls == (row("cublasDgemm", "FP64", calls=2, not_said=2),)
    assert (found.versions, found.processes) == (("10.2",), 1)


def test_empty_log() -> None:
    found = parse_log(())
    assert (found.versions, found.processes, found.calls) == ((), 0, ())


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"fp64": 79}, {cublas.DOUBLE: "1", cublas.BITS: "79"}),
        ({"fp64": "auto"}, {cublas.DOUBLE: "1", cublas.BITS: None}),
        ({"fp64": "off"}, {cublas.DOUBLE: "0"}),
        ({"fp32": True}, {cublas.SINGLE: "1"}),
        ({"fp32": False}, {cublas.SINGLE: "0"}),
        ({"strategy": "eager"}, {cublas.STRATEGY: "eager"}),
        ({"special_values": ()}, {cublas.SPECIAL_VALUES: "0"}),
        ({"special_values": ("inf",)}, {cublas.SPECIAL_VALUES: "1"}),
        ({"special_values": ("nan", "inf")}, {cublas.SPECIAL_VALUES: "3"}),
    ],
)
def test_settings_are_variables(settings: dict, changes: dict) -> None:
    assert Emulation(**settings).environment() == changes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp64": 0}, "fp64: got 0; must be a whole number of bits from 1 on"),
        ({"fp64": True}, "fp64: got True; must be"),
        ({"fp64": 53.0}, r"fp64: got 53\.0; must be"),
        ({"fp64": "dynamic"}, "fp64: got 'dynamic'; must be"),
        ({"strategy": "fast"}, "strategy: got 'fast'; must be performant or eager"),
        ({"special_values": ("nans",)}, "special_values: got 'nans'; must be of 'inf' and 'nan'"),
    ],
)
def test_what_cublas_would_ignore_is_an_error(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Emulation(**settings)


@pytest.mark.parametrize(
    ("mask", "names"),
    [("0", ()), ("1", ("inf",)), ("2", ("nan",)), ("3", ("inf", "nan")), ("0x2", ("nan",))],
)
def test_special_values_of_a_mask(mask: str, names: tuple[str, ...]) -> None:
    assert special_values(mask) == names


def test_special_values_of_a_wrong_mask() -> None:
    with pytest.raises(ValueError, match=f"{cublas.SPECIAL_VALUES}: got '4'; must be 0 to 3"):
        special_values("4")


def test_slices_as_cublas_counts_them() -> None:
    documented = {39: 5, 47: 6, 55: 7, 63: 8, 71: 9, 79: 10}
    assert {bits: slices(bits) for bits in documented} == documented
    assert all(slices(bits) == ceil(Fraction(bits + 1, 8)) for bits in range(1, 200))


def distributions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Makes these the installed distributions."""

    def version(name: str) -> str:
        key = name.replace("-", "_")
        if key not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[key]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, nvidia_cublas="13.7.0.10rc1", nvidia_cublas_cu12="12.9.1.4")
    assert library_version((13, 0)) == (13, 7, 0, 10)
    assert library_version((12, 9)) == (12, 9, 1, 4)
    assert library_version((11, 8)) is None
    assert library_version(None) is None


def test_version_is_in_the_name_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distributions(monkeypatch)
    first, second = tmp_path / "torch", tmp_path / "toolkit"
    first.mkdir()
    second.mkdir()
    (first / "libcublasLt.so.13").touch()
    (second / "libcublas.so.13.1.0.3").touch()
    (second / "libcublas.so.13").symlink_to("libcublas.so.13.1.0.3")
    (second / "libcublas.so.12.9.1.4").touch()
    folders = [first, tmp_path / "missing", second]
    assert library_version((13, 0), folders) == (13, 1, 0, 3)
    assert library_version((12, 9), folders) == (12, 9, 1, 4)
    assert library_version((13, 0), [first]) is None
