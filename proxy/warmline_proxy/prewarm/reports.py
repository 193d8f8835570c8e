"""Messages of /warmline/prewarm: plain values, no I/O."""

import msgspec

WAITING, PREWARMING, STORED, FAILED = "waiting", "prewarming", "stored", "failed"


class PrewarmRequest(msgspec.Struct, kw_only=True):
    """POST /warmline/prewarm: compute the prompt of a file with a request's body, once."""

    path: str  # absolute
    api: str = ""  # as in a table [[prewarm]], like all that follow
    model: str = ""
    key: str = ""
    pin: bool = False


class PrewarmReport(msgspec.Struct, kw_only=True):
    """State of an entry.  Tokens are those of all its prompts: a client may have several heads."""

    id: str = ""  # of one that a command has sent; "" for a configured one
    name: str
    client: str = ""  # whose heads it is; "" for a file
    model: str = ""
    pin: bool = False
    state: str = WAITING  # or PREWARMING, STORED, FAILED
    detail: str = ""  # why it waits, has failed, or is stored without something that was asked for
    prompts: int = 0  # looked at
    tokens: int = 0
    computed_tokens: int = 0  # of these, in this proxy's run; the others were stored, or in memory
    seconds: float = 0.0  # that these took
    pinned: bool = False
    progress_tokens: int = 0  # of the prompt under way
    progress_total: int = 0
    at: float = 0.0  # Unix seconds of the last change; 0.0 before the first


class PrewarmReply(msgspec.Struct, kw_only=True):
    """GET /warmline/prewarm; a POST has the only entry that it has made."""

    entries: list[PrewarmReport]
