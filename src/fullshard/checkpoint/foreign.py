"""The name that `formats` had in 0.1.0."""

from .formats import *  # noqa: F403
from .formats import __all__ as __all__
