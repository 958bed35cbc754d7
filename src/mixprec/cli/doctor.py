"""`mixprec doctor`: what this machine runs natively, what is emulated, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mixprec.cli.options import Json
from mixprec.cli.output import console, grouped_by_reason, print_json, print_table

if TYPE_CHECKING:
    from mixprec.survey import Device, Survey
    from mixprec.variables import Variable


def doctor(
    as_json: Json = False,
) -> None:
    """What is native here, what is emulated, and why."""
    from mixprec import survey

    found = survey.doctor()
    if as_json:
        print_json(found)
        return
    _show_machine(found)
    print_table(
        ("library", "version", "used for", "problem"),
        [(lib.name, lib.version, lib.purpose, lib.reason) for lib in found.libraries],
    )
    print_table(
        ("runs", "formats", "why"), grouped_by_reason({row.name: row for row in found.formats})
    )
    print_table(
        ("runs", "recipes", "why"), grouped_by_reason({row.name: row for row in found.recipes})
    )
    print_table(
        ("environment variable, and what it does", "effect here"),
        [_variable_cells(variable) for variable in found.variables],
    )


def _show_machine(found: Survey) -> None:
    """Versions, processor and GPUs, a line each."""
    has = [name for name, present in found.cpu_features.items() if present]
    lacks = [name for name, present in found.cpu_features.items() if not present]
    out = console()
    out.print(", ".join(f"{name} {number}" for name, number in found.versions.items()))
    out.print(f"CPU: {', '.join(has) or 'no feature known'}; torch uses {found.cpu}")
    out.print(f"     without {', '.join(lacks)}")
    out.print("\n".join(map(_device_line, found.devices)) or "GPU: none")
    kind = "native" if found.regions.native else "emulated"
    out.print(f"Products in 16-bit regions: {kind}; {found.regions.reason}")
    for variable in found.variables:
        if variable.warning:
            out.print(f"WARNING: {variable.name}={variable.value}: {variable.warning}")


def _variable_cells(variable: Variable) -> tuple[str, str]:
    """A variable with its value and purpose, and its effect."""
    # a list breaks into lines at its commas
    value = "" if variable.value is None else f" = {variable.value!r}".replace(",", ", ")
    effect = "yes" if variable.has_effect else "no"
    return f"{variable.name}{value}\n{variable.purpose}", f"{effect}: {variable.reason}"


def _device_line(device: Device) -> str:
    """A GPU in a line, with peak rates where the hardware table has it."""
    capability = ".".join(map(str, device.capability))
    line = (
        f"GPU: {device.name}, compute capability {capability}, {device.memory_bytes / 1e9:.0f} GB"
    )
    if device.accelerator is None:
        return f"{line}; not in the hardware table"
    rates = ", ".join(f"{name} {rate:g}" for name, rate in device.accelerator.rates.items())
    return f"{line}; peak 10^12 operations/s, dense: {rates} ({device.accelerator.source})"
