"""The backend as the proxy sees it.  Imports planner, tasks; the only folder with httpx and tenacity; event loop."""
