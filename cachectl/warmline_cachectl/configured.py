"""Settings of a home as cachectl reads them: variables and `warmline.toml`; a running proxy's own status goes first."""

from warmline_common.process.arguments import GB
from warmline_common.settings.resolve import read_setting
from warmline_common.storage.home import Home
from warmline_proxy.auth.owners import KeyTenants, load_key_tenants


def read_disk_budget_bytes(home: Home) -> int:
    return int(read_setting(home.root, "disk_budget_gb") * GB)


def read_key_tenants(home: Home) -> KeyTenants:
    """The client keys in the home, and the one that the settings name.  Raises UnreadableKeysError."""
    return load_key_tenants(
        home, client_key=read_setting(home.root, "client_key"), share_cache=read_setting(home.root, "share_cache")
    )
