"""Reasons why a request waits: names of `Timings.waits`, `RestoreReply.waits` and `RequestRecord.waits`, in seconds."""

# Before the engine begins to work on a request, in the proxy ...
BODY = "body"  # of its client, to be received
BACKEND = "backend"  # to start, and to load the model
PROMPT = "prompt"  # to be rendered and tokenized
RELEASE = "release"  # of an earlier request with the same beginning
PLACE = "place"  # among the running requests
SAVE = "save"  # of another request, which gives a warmer start or frees memory
# ... and in the backend: also PLACE and SAVE.
STEP = "step"  # the engine's present one, for others
AUDIT = "audit"  # a layer of its prefill, which the engine was computing
MEMORY = "memory"  # held by other requests
LEADER = "leader"  # another request's prefill of the same beginning
# Afterwards, in its prefill.
TURNS = "turns"  # of other requests, between its own chunks
