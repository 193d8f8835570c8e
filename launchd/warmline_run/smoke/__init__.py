"""`warmline gates`: checks of a running server, from shallow to deep, for somebody who has just set it up.

Speaks HTTP to it as any client does, and knows of it what its answers say.  Only `restart` looks at its home.
"""
