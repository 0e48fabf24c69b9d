"""exo: one cluster out of the machines you own."""

__version__ = "0.1.0"
