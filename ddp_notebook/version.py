"""The version of this package, which notebook and hosts have in common."""

__version__ = "0.1.0"
