"""Which Warmline this is."""

from importlib import metadata


def version() -> str:
    """As its package says; "unknown" where it runs without having been installed."""
    try:
        return metadata.version("warmline")
    except metadata.PackageNotFoundError:
        return "unknown"
