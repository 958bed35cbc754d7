"""mixprec: mixed-precision training for PyTorch, native where possible, emulated elsewhere."""
