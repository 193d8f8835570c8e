"""Checks of what decides drafts: the draft model, and the measured costs of passes.  Main thread."""
