"""Version of the installed package."""

from importlib import metadata


def version() -> str:
    """Version of the package; "unknown" where it runs without having been installed."""
    try:
        return metadata.version("warmline")
    except metadata.PackageNotFoundError:
        return "unknown"
