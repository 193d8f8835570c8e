"""The backend process: serves one model over loopback HTTP to the proxy.  Layers: see pyproject.toml."""

from warmline_backend import import_structure
from warmline_common.process.file_limits import protect_descriptor_limit

import_structure.install()
protect_descriptor_limit()  # before any module imports mlx-lm
