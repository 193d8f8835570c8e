"""`warmline models`: the models of a running proxy, listed, loaded, unloaded and pinned over its HTTP routes."""
