"""Audits of warm answers against cold runs, and quarantine.  Imports pipeline and below; event loop thread."""
