"""A particle tunnels within 2^30 steps, which FP32 and few bits lose; writes tunnelling.html."""

import math

import torch
from plotly.subplots import make_subplots

from mixprec import fp64

# H = p^2 + 150 (x^2 - 1)^2 on 48 points: two wells, whose lowest states differ by 4e-5 of 24
x = torch.linspace(-1.75, 1.75, 48, dtype=torch.float64)
offset = torch.arange(48) - torch.arange(48).unsqueeze(1)
kinetic = torch.where(offset == 0, math.pi**2 / 6, (-1.0) ** offset.abs() / offset**2)
hamiltonian = kinetic * 2 / (x[1] - x[0]) ** 2 + torch.diag(150 * (x**2 - 1) ** 2)
energies, states = torch.linalg.eigh((hamiltonian + hamiltonian.flip(0, 1)) / 2)
step = math.pi / (energies[1] - energies[0]) / 2**30  # after all of them it is in the other well
u = (states * torch.exp(-1j * energies * step)) @ states.T.cdouble()
left = (states[:, :2] * states[12, :2].sign()).sum(1).cdouble() / 2**0.5  # point 12 is left


def product(a, b):  # of pairs (high, low), to about 100 bits
    high, low = fp64.matmul(a[0], b[0], output="double_double")
    low = low + fp64.matmul(a[0], b[1]) + fp64.matmul(a[1], b[0])
    return high + low, low - ((high + low) - high)


def defect(u):  # U^H U - 1, which should be 0
    high, low = product([part.mH for part in u], u)
    return high - torch.eye(48) + low


def emulated(u, **options):
    square, report = fp64.matmul(u[0], u[0], report=True, **options)
    return (square, 0 * u[1]), float(report.error_bound.norm())


start = (u, u @ defect((u, 0 * u)) / -2)  # a step of Newton's method: unitary to 30 digits
ways = {  # U^2, and a bound on its error where there is one
    "float32": lambda u: (((u[0].cfloat() @ u[0].cfloat()).cdouble(), 0 * u[1]), math.nan),
    "float64": lambda u: ((u[0] @ u[0], 0 * u[1]), math.nan),
    "31 bits": lambda u: emulated(u, bits=31, engine="float32"),
    "39 bits": lambda u: emulated(u, bits=39, engine="float32"),
    "auto": emulated,
    "double_double": lambda u: (product(u, u), math.nan),
}
figure = make_subplots(rows=2, cols=1, subplot_titles=("tunnelled", "drift, by log2 of steps"))
for index, (name, square) in enumerate(ways.items()):
    u, shares, drifts, bound = start, [], [], float(defect((start[0], 0 * start[0])).norm())
    for _ in range(30):
        u, error = square(u)
        # |U^H U - 1| = d becomes at most d (2 + d) + e (2 + 2 d + e) for U^2 with an error of e
        bound = bound * (2 + bound) + error * (2 + 2 * bound + error)
        shares.append(float((u[0] @ left)[24:].abs().square().sum()))
        drifts.append(float(defect(u).abs().max()))
    print(f"{name}: tunnelled {shares[-1]:.9f}, drift {drifts[-1]:.1e}, at most {bound:.1e}")
    for row, values in enumerate((shares, drifts), start=1):
        style = {"line_color": f"hsl({60 * index}, 80%, 40%)", "showlegend": row == 1}
        figure.add_scatter(y=values, x0=1, name=name, legendgroup=name, row=row, col=1, **style)
figure.update_yaxes(type="log", exponentformat="power").write_html("tunnelling.html")
