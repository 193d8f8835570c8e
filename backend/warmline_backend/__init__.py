"""The backend process: serves one model over loopback HTTP to the proxy.  Layers: see pyproject.toml."""

from warmline_backend import import_structure

import_structure.install()
