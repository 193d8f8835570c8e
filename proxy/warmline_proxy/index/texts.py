"""Readable texts of prompts in the index, titles and texts of divergences, and their removal."""

import msgspec

from warmline_proxy.store.tables import Tables


def remove_texts(tables: Tables) -> int:
    """Remove all, and note that the index's file still has their traces; returns how many rows had some."""
    titled = [row for row in tables.sessions() if row.title]
    for row in titled:
        tables.put_session(msgspec.structs.replace(row, title=""))
    diverged = [
        (key, record, record.parting)
        for key, record in tables.requests()
        if record.parting and (record.parting.stored_text or record.parting.prompt_text)
    ]
    for key, record, divergence in diverged:
        tokens_alone = msgspec.structs.replace(divergence, stored_text="", prompt_text="")
        tables.put_request(key, msgspec.structs.replace(record, parting=tokens_alone))
    count = len(titled) + len(diverged)
    if count:
        tables.mark_erasable()
    return count
