"""gymckpt collects agentic evaluation rollouts and checkpoints them while they are in flight."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gymckpt")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
