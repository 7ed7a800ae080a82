"""The version of the package, in this one place: the build and `fullshard.__version__` both read it."""

__version__ = "0.2.0"
