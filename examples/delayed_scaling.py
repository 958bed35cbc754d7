"""Delayed scaling with gradient accumulation, and a checkpoint that holds its histories.

Under ``fp8_delayed`` the scale of a step comes from the maxima of earlier steps. The maxima of the
micro-batches of one step are combined, and the history moves on once for each step that the
optimizer takes: ``mixprec.attach`` sees to that. (Without it, call ``mixprec.sync_scales(model)``
after ``optimizer.step()``.)
"""

import torch

import mixprec

torch.manual_seed(0)
x = torch.randn(4, 64, 32)  # four micro-batches
target = torch.sin(x @ torch.randn(32, 8) / 6)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
mixprec.convert(model, "fp8_delayed")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
mixprec.attach(model, optimizer)

for step in range(1, 101):
    optimizer.zero_grad()
    total = 0.0
    for micro_x, micro_target in zip(x, target, strict=True):
        loss = torch.nn.functional.mse_loss(model(micro_x), micro_target) / len(x)
        loss.backward()
        total += loss.item()
    optimizer.step()
    if step % 25 == 0 or step == 1:
        print(f"step {step}: loss {total:.4f}")

# The model's own state_dict has the keys of an unconverted model, so it loads into one; the
# histories travel beside it.
checkpoint = {"model": model.state_dict(), "numerics": mixprec.state_dict(model)}
plain = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
plain.load_state_dict(checkpoint["model"])
mixprec.convert(plain, "fp8_delayed")
mixprec.load_state_dict(plain, checkpoint["numerics"])
model.eval()
plain.eval()
assert torch.equal(model(x[0]), plain(x[0]))
print(f"{len(checkpoint['numerics'])} tensors of numerics state saved and restored")
