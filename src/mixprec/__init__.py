"""mixprec: mixed-precision training for PyTorch, native where possible, emulated elsewhere."""

from mixprec.autograd import linear
from mixprec.codes import decode, encode
from mixprec.contraction import einsum
from mixprec.explanation import explain
from mixprec.formats import FORMATS, FloatFormat, finfo
from mixprec.gemm import GemmSpec, quantized_matmul
from mixprec.inspection.watch import watch
from mixprec.layer_errors import RecipeError, recipe_errors
from mixprec.nn import (
    Report,
    attach,
    convert,
    distribute,
    gather_codes,
    load_state_dict,
    revert,
    state_dict,
    sync_scales,
)
from mixprec.noise import Noise
from mixprec.planning import plan
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.quantization_error import ErrorFigures, quantize_error
from mixprec.recipes import RECIPES, Recipe
from mixprec.recipes import get_recipe as resolve
from mixprec.rounding import round_to_format
from mixprec.survey import doctor
from mixprec.train.compare import run as compare

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "RECIPES",
    "ErrorFigures",
    "FloatFormat",
    "GemmSpec",
    "Noise",
    "QuantSpec",
    "QuantizedTensor",
    "Recipe",
    "RecipeError",
    "Report",
    "attach",
    "compare",
    "convert",
    "decode",
    "distribute",
    "doctor",
    "einsum",
    "encode",
    "explain",
    "finfo",
    "gather_codes",
    "linear",
    "load_state_dict",
    "plan",
    "quantize",
    "quantize_error",
    "quantized_matmul",
    "recipe_errors",
    "resolve",
    "revert",
    "round_to_format",
    "state_dict",
    "sync_scales",
    "watch",
]
