"""The client's response: relay, progress, choices.  May import api, auth, http, upstream.  Event loop thread."""
