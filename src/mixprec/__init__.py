"""mixprec: mixed-precision training for PyTorch, native where the hardware has it, emulated elsewhere."""
