"""The version of the package, for metadata and commands."""

__version__ = "0.1.0"
