"""A format and a recipe of one's own: both are values, so nothing is registered anywhere."""

import dataclasses

import torch

import mixprec

# Four bits: sign, two exponent bits, one mantissa bit, and every code a number (6 is the largest).
e2m1 = mixprec.FloatFormat(exponent=2, mantissa=1, name="my_e2m1")

# One scale for 1 x 32 values along the axis that the product sums over.
weight = mixprec.QuantSpec(format=e2m1, block=(1, 32), scale_rule="real")
base = mixprec.RECIPES["fp8_rowwise"]
recipe = dataclasses.replace(
    base, name="fp4_forward", output=dataclasses.replace(base.output, b=weight)
)
for role in ("output", "grad_input", "grad_weight"):
    product = getattr(recipe, role)
    print(f"{role}: {product.a.format} times {product.b.format}")

# The same recipe as plain data, as a TOML file would hold it.
assert mixprec.Recipe.from_dict(recipe.to_dict()) == recipe

torch.manual_seed(0)
x = torch.randn(256, 64)
target = torch.sin(x @ torch.randn(64, 8) / 8)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))

# The first pattern that matches a module's name decides.
print(mixprec.convert(model, {"2": "fp8_tensorwise", "*": recipe}))

optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, 101):
    loss = torch.nn.functional.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0 or step == 1:
        print(f"step {step}: loss {loss.item():.4f}")
