"""Whose an imported conversation is to be."""

from warmline_proxy.keys_file import ENVIRONMENT_NAME, NoSuchKey, client_keys, tenant_of
from warmline_wire.home import Home


def tenant_for(home: Home, name: str, *, client_key: str, share_cache: bool) -> str:
    """The tenant of the key called `name`; "" names the only one, or where there is none, everybody.

    `client_key` is the settings' own.  Raises NoSuchKey, also where several could be meant; KeysUnusable.
    """
    own = {ENVIRONMENT_NAME: tenant_of(client_key)} if client_key else {}
    tenants = own | {each.name: each.tenant for each in client_keys(home)}
    names = ", ".join(tenants)
    if name and name not in tenants:
        raise NoSuchKey(f"there is no client key {name!r}; " + (f"there are {names}" if tenants else "there is none"))
    if share_cache or not tenants:
        return ""
    if not name and len(tenants) > 1:
        raise NoSuchKey(f"whose is it to be?  Each key has a cache of its own: add --key with one of {names}")
    return tenants[name] if name else next(iter(tenants.values()))
