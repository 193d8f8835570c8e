"""What a home's settings say, as far as they can be read here: `warmline.toml` and WARMLINE_* variables.

Flags that a running proxy was given are known to it alone: what it says of itself goes first.
"""

import os
import tomllib
from typing import Any

from warmline_common.process.arguments import GB
from warmline_common.storage.home import Home
from warmline_proxy.auth.owners import KeyTenants, load_key_tenants

DISK_BUDGET_GB = 50.0  # as in the table of settings


def read_setting(home: Home, name: str, default: Any) -> Any:
    """A variable goes before the file; text is read as a number or a switch where the default is one."""
    given = os.environ.get(f"WARMLINE_{name.upper()}", "") or _read_file(home).get(name, default)
    try:
        if isinstance(default, bool):
            return given if isinstance(given, bool) else str(given).lower() in ("1", "true", "yes", "on")
        return type(default)(given)
    except (TypeError, ValueError):
        return default


def read_disk_budget_bytes(home: Home) -> int:
    return int(read_setting(home, "disk_budget_gb", DISK_BUDGET_GB) * GB)


def read_key_tenants(home: Home) -> KeyTenants:
    """The client keys in the home, and the one that the settings name.  Raises KeysUnusable."""
    return load_key_tenants(
        home, client_key=read_setting(home, "client_key", ""), share_cache=read_setting(home, "share_cache", False)
    )


def _read_file(home: Home) -> dict[str, Any]:
    """Empty where it can't be read: the processes that need it say what is wrong with it."""
    try:
        return tomllib.loads((home.root / "warmline.toml").read_text())
    except (OSError, ValueError):
        return {}
