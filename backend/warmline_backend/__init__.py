"""The backend process: serves one model over loopback HTTP to the proxy.  Layers: see pyproject.toml."""
