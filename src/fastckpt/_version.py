"""The version, in the package itself so that a vendored copy knows its own."""

__version__ = "0.1.0"
