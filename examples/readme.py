"""The library in 15 lines: an ordinary model, converted in place and trained as before."""

import torch

import mixprec

x, target = torch.randn(64, 32), torch.randint(10, (64,))
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
print(mixprec.convert(model, "fp8_tensorwise", keep_last=1))  # module by module: what and why
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(100):
    loss = torch.nn.functional.cross_entropy(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
