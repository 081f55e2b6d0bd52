"""The version of ampmem."""

__version__ = "0.1.0"
