"""Layers that multiply by a recipe, and the conversion of models to them and back."""

from mixprec.nn.convert import convert, revert
from mixprec.nn.distribution import distribute
from mixprec.nn.gather_traffic import Traffic, count_gathers
from mixprec.nn.gathering import GatherReport, gather_codes
from mixprec.nn.kinds import KINDS
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.linear import QuantizedLinear
from mixprec.nn.report import Report, ReportRow
from mixprec.nn.sensitive import keep_sensitive
from mixprec.nn.state import (
    attach,
    attached_models,
    forget_amaxes,
    load_state_dict,
    state_dict,
    sync_scales,
)

__all__ = [
    "KINDS",
    "GatherReport",
    "QuantizedLayer",
    "QuantizedLinear",
    "Report",
    "ReportRow",
    "Traffic",
    "attach",
    "attached_models",
    "convert",
    "count_gathers",
    "distribute",
    "forget_amaxes",
    "gather_codes",
    "keep_sensitive",
    "load_state_dict",
    "revert",
    "state_dict",
    "sync_scales",
]
