"""`warmline gates`: checks of a running server, from shallow to deep, over HTTP; only `restart` reads its home."""
