"""The backend process: serves one model over loopback HTTP to the proxy.  Layers: see import-linter in pyproject.toml."""
