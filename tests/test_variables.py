"""Environment variables: who reads which, where, and which values act."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from mixprec import survey
from mixprec.variables import Machine, Variable, check_value, read_variables

CPU = Machine(has_onednn=True, has_mkl=True)
HOPPER = Machine(
    cuda=(13, 0), cublas=(13, 1, 0, 3), capability=(9, 0), has_nccl=True, has_onednn=True
)
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0))
MACHINES = {"cpu": CPU, "hopper": HOPPER, "blackwell": BLACKWELL, "rocm": Machine(is_rocm=True)}


def read(name: str, value: str | None, machine: Machine) -> Variable:
    environment = {"PATH": "/bin"} if value is None else {"PATH": "/bin", name: value}
    found = {variable.name: variable for variable in read_variables(environment, machine)}
    return found[name]


def test_every_variable_is_listed_once_with_a_purpose_and_a_reason() -> None:
    found = read_variables({}, CPU)
    names = [variable.name for variable in found]
    assert len(set(names)) == len(names)
    assert {"AMPLITE_LEVEL", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "NVIDIA_TF32_OVERRIDE"} <= set(
        names
    )
    assert all(variable.purpose and variable.reason for variable in found)
    assert not any(variable.has_effect for variable in found)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_what_is_not_set_has_no_effect(machine: Machine) -> None:
    for variable in read_variables({}, machine):
        assert (variable.value, variable.has_effect) == (None, False)


@pytest.mark.parametrize(
    ("name", "value", "machine", "reason"),
    [
        ("CUDA_VISIBLE_DEVICES", "0", CPU, "this torch is built without GPUs"),
        ("NVIDIA_TF32_OVERRIDE", "0", CPU, "no NVIDIA GPU"),
        ("NVIDIA_TF32_OVERRIDE", "1", HOPPER, "got '1'; only 0 acts"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0", HOPPER, "got '0'; only 1 acts"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", CPU, "no NVIDIA GPU"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", Machine(is_rocm=True), "no NVIDIA GPU"),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "yes", HOPPER, "got 'yes'; only 0 or 1 acts"),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "1", CPU, "this torch is built without CUDA"),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "1", Machine(cuda=(13, 0)), "no NVIDIA GPU"),
        (
            "CUBLAS_EMULATE_DOUBLE_PRECISION",
            "1",
            dataclasses.replace(BLACKWELL, capability=(10, 3)),
            "cuBLAS emulates nothing on compute capability 10.3",
        ),
        ("CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT", "0", HOPPER, "a whole number from 1 on"),
        ("CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK", "4", HOPPER, "got '4'; only 0 to 3 acts"),
        ("CUBLAS_LOGINFO_DBG", "1", CPU, "no NVIDIA GPU"),
        ("CUBLAS_LOGINFO_DBG", "on", HOPPER, "got 'on'; only 0 or 1 acts"),
        ("CUBLAS_LOGDEST_DBG", "", HOPPER, "got ''; only stdout, stderr or a file acts"),
        (
            "CUBLAS_EMULATE_SINGLE_PRECISION",
            "1",
            HOPPER,
            "cuBLAS emulates nothing on compute capability 9.0",
        ),
        ("CUBLAS_EMULATION_STRATEGY", "fast", HOPPER, "only performant or eager acts"),
        ("NCCL_DEBUG", "INFO", CPU, "this torch has no NCCL"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "bf16", CPU, "no BF16 units in this CPU"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", Machine(), "this torch has no oneDNN"),
        ("ATEN_CPU_CAPABILITY", "AVX2", CPU, "got 'AVX2'; only a lower-case name"),
        ("MKL_CBWR", "AVX2", HOPPER, "this torch has no MKL"),
        ("AMPLITE_LEVEL", "2", CPU, "got '2'; only O0, O1, O2 or O3 acts"),
        ("AMPLITE_LEVEL", "", CPU, "got ''; only O0"),
    ],
)
def test_set_without_effect_says_why(name: str, value: str, machine: Machine, reason: str) -> None:
    found = read(name, value, machine)
    assert (found.value, found.has_effect) == (value, False)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("name", "value", "machine"),
    [
        ("AMPLITE_LEVEL", "O1", CPU),
        ("CUDA_VISIBLE_DEVICES", "", Machine(cuda=(12, 6))),
        ("CUDA_VISIBLE_DEVICES", "1", Machine(is_rocm=True)),
        ("NVIDIA_TF32_OVERRIDE", "0", HOPPER),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", HOPPER),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", HOPPER),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION", "1", HOPPER),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "0", BLACKWELL),
        ("CUBLAS_EMULATION_STRATEGY", "eager", HOPPER),
        ("CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT", "55", BLACKWELL),
        ("CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK", "0x3", HOPPER),
        ("CUBLAS_LOGINFO_DBG", "1", HOPPER),
        ("CUBLAS_LOGDEST_DBG", "calls.log", HOPPER),
        ("NCCL_DEBUG", "WARN", HOPPER),
        (
            "DNNL_DEFAULT_FPMATH_MODE",
            "BF16",
            dataclasses.replace(CPU, cpu_features=frozenset({"AMX BF16"})),
        ),
        ("ATEN_CPU_CAPABILITY", "default", CPU),
        ("MKL_CBWR", "COMPATIBLE", CPU),
    ],
)
def test_set_where_it_is_read_has_an_effect(name: str, value: str, machine: Machine) -> None:
    found = read(name, value, machine)
    assert (found.has_effect, found.reason) == (True, "set, and read here")


DOUBLES = "needs cuBLAS 13.1 (CUDA 13.0 update 2)"
SINGLES = "needs cuBLAS 12.9 (CUDA 12.9)"


@pytest.mark.parametrize(
    ("name", "cuda", "cublas", "needs"),
    [
        ("SINGLE", (12, 8), (12, 8, 4, 1), f"{SINGLES}, this torch has cuBLAS 12.8.4.1"),
        ("SINGLE", (12, 8), None, f"{SINGLES}, this torch has CUDA 12.8"),
        ("SINGLE", (12, 9), (12, 9, 0, 13), None),
        ("SINGLE", (12, 9), None, None),
        ("DOUBLE", (12, 9), (12, 9, 1, 4), f"{DOUBLES}, this torch has cuBLAS 12.9.1.4"),
        ("DOUBLE", (12, 9), None, f"{DOUBLES}, this torch has CUDA 12.9"),
        # Update 1 of CUDA 13.0 has a cuBLAS 13.0.2, which is not update 2.
        ("DOUBLE", (13, 0), (13, 0, 2, 14), f"{DOUBLES}, this torch has cuBLAS 13.0.2.14"),
        ("DOUBLE", (13, 0), None, f"{DOUBLES}, and the cuBLAS of this torch was not found"),
        ("DOUBLE", (13, 0), (13, 1, 0, 3), None),
        ("DOUBLE", (13, 1), None, None),
    ],
)
def test_emulation_of_cublas_needs_a_release(
    name: str, cuda: tuple[int, int], cublas: tuple[int, ...] | None, needs: str | None
) -> None:
    machine = dataclasses.replace(BLACKWELL, cuda=cuda, cublas=cublas)
    found = read(f"CUBLAS_EMULATE_{name}_PRECISION", "1", machine)
    assert (found.has_effect, found.reason) == (needs is None, needs or "set, and read here")


def test_check_value_knows_what_the_table_knows() -> None:
    name = "CUBLAS_EMULATION_STRATEGY"
    assert check_value(name, "eager") == "eager"
    with pytest.raises(ValueError, match=f"{name}: got 'Eager'; must be performant or eager; uns"):
        check_value(name, "Eager")
    with pytest.raises(ValueError, match="strategy: got ''; must be performant or eager; pass one"):
        check_value(name, "", argument="strategy")
    with pytest.raises(KeyError):
        check_value("NOT_A_VARIABLE", "1")


def test_tf32_needs_its_units() -> None:
    volta = Machine(cuda=(12, 6), capability=(7, 0))
    found = read("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", volta)
    assert found.reason == "no TF32 units in compute capability 7.0"


def test_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O3")
    found = {variable.name: variable for variable in survey.doctor().variables}
    assert (found["AMPLITE_LEVEL"].value, found["AMPLITE_LEVEL"].has_effect) == ("O3", True)
    monkeypatch.delenv("AMPLITE_LEVEL")
    again = {variable.name: variable for variable in survey.doctor().variables}
    assert again["AMPLITE_LEVEL"].value is None


def test_machine_is_this_one() -> None:
    machine = survey._machine((), {"AVX2": True, "AMX BF16": False})
    assert (machine.cublas is None) or (machine.cuda is not None)
    assert survey.machine().cpu_features == {
        name for name, present in survey.doctor().cpu_features.items() if present
    }
    assert machine.has_mkl == torch.backends.mkl.is_available()
    assert machine.capability is None
    assert machine.cpu_features == {"AVX2"}
    gpus = [
        survey.Device(name="x", vendor=vendor, capability=(9, 4), memory_bytes=1, accelerator=None)
        for vendor in ("amd", "nvidia")
    ]
    assert survey._machine((gpus[0],), {}).capability is None
    assert survey._machine((gpus[1],), {}).capability == (9, 4)


PROBE = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"


@pytest.mark.parametrize(("value", "allowed"), [("1", "True"), ("0", "False"), (None, "False")])
def test_torch_still_starts_in_tf32_where_the_variable_says_so(
    value: str | None, allowed: str
) -> None:
    name = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    environment = {key: text for key, text in os.environ.items() if key != name}
    if value is not None:
        environment[name] = value
    command = [sys.executable, "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == allowed
