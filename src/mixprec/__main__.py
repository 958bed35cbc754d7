"""`python -m mixprec`: the command line, for launchers that start modules (torchrun -m mixprec)."""

from mixprec.cli.main import program

program()
