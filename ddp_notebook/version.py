"""Version of this package, which must be equal in the notebook and on all hosts."""

__version__ = "0.1.0"
