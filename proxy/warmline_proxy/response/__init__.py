"""The client's response: relay, choices, repetition.  May import api, auth, http, upstream.  Event loop thread."""
