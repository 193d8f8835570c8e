"""Caching reverse proxy in front of the backend; imports warmline_common; `app` wires its packages."""

import sys

# httpx imports its own command line where it can, with rich and pygments: a fifth of the time of a proxy's start.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # `None` is Python's mark of a module that is not there
