"""Commands that explain missing reuse: `explain` of a request, `diff` of two conversations."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer

from warmline_cachectl import client
from warmline_cachectl.completion import complete_ids
from warmline_cachectl.errors import EXIT_FOUND, EXIT_USAGE, fail
from warmline_cachectl.lookup import open_index, resolve_id
from warmline_cachectl.options import HOME, CommandApp, HomeOption, JsonOption, make_home
from warmline_cachectl.views import explain as sides
from warmline_cachectl.views.output import show
from warmline_common.protocol.messages import DetokenizeReply
from warmline_common.settings.hints import add_home
from warmline_common.storage.home import Home
from warmline_proxy.explain.diff import (
    Comparison,
    StoredConversation,
    add_texts,
    compare_conversations,
    cut_windows,
    load_conversation,
)
from warmline_proxy.explain.explain import LAST, ExplainReply, RequestNotFoundError, explain, find_record_with_since
from warmline_proxy.index.index import IndexReader
from warmline_proxy.store.rows import SegmentTextsRequest

EXPLAIN_TIMEOUT_S = 30.0

app = CommandApp("Look")


@app.add(
    "Say why a request was no warmer.",
    "cachectl explain  # the last request that was not fully warm",
    "cachectl explain --json",
    name="explain",
)
def explain_(
    request: Annotated[
        str,
        typer.Argument(
            help="A request's id (X-Warmline-Request), its beginning, or its answer's id.", show_default=False
        ),
    ] = LAST,
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Show where a prompt diverged from stored ones: token, message, and both texts side by side; the
    likeliest cause, and what to do about it.

    Without a request: the last one that was not fully warm for a reason.
    """
    try:
        reply = _explain_request(home, request)
    except RequestNotFoundError as error:
        fail(str(error), EXIT_FOUND)
    show(msgspec.to_builtins(reply), sides.render_explanation(reply), as_json)


def _explain_request(home: Path, request: str) -> ExplainReply:
    """Explanation by the proxy, which has the newest requests and texts, else from the index."""
    with suppress(client.CachectlError):
        path = f"/warmline/explain?request={quote(request, safe='')}"
        return client.request_proxy(make_home(home), path, ExplainReply, EXPLAIN_TIMEOUT_S)
    with open_index(home) as reader:
        record, since = find_record_with_since(reader.requests(), request)
        return explain(reader, record, since, client.read_owner_labels_if_readable(reader.home, reader.snapshot()))


@app.add(
    "Compare two stored conversations.",
    "cachectl diff SESSION OTHER  # where they part",
    "cachectl diff SEGMENT OTHER --json",
)
def diff(
    a: Annotated[
        str, typer.Argument(help="A session or segment, by id or its beginning.", autocompletion=complete_ids)
    ],
    b: Annotated[str, typer.Argument(help="Another one.", autocompletion=complete_ids)],
    home: HomeOption = HOME,
    as_json: JsonOption = False,
) -> None:
    """Show how many tokens two stored conversations have in common, and both texts where they diverge.

    Texts take a running pair; without one, token ids are shown.
    """
    with open_index(home) as reader:
        one, other = _find_stored(reader, a), _find_stored(reader, b)
        comparison = compare_conversations(one, other, reader.requests())
    if comparison.where is not None:
        comparison = _add_texts(make_home(home), comparison, one, other)
    show(msgspec.to_builtins(comparison), sides.render_comparison(comparison), as_json)


def _find_stored(reader: IndexReader, typed: str) -> StoredConversation:
    kind, row_id = resolve_id(reader.snapshot(), typed)
    if kind not in ("session", "segment"):
        fail(f"{typed} is a {kind}; only sessions and segments have tokens to compare", EXIT_USAGE)
    conversation = load_conversation(reader, kind, row_id)
    if conversation is None:
        fail(f"{typed} is no longer stored", EXIT_FOUND)
    return conversation


def _add_texts(home: Home, comparison: Comparison, a: StoredConversation, b: StoredConversation) -> Comparison:
    texts = []
    try:
        for each, window in zip((a, b), cut_windows(a, b, comparison.common), strict=True):
            request = SegmentTextsRequest(segment=each.leaf, sequences=[window])
            reply = client.request_proxy(home, "/warmline/texts", DetokenizeReply, EXPLAIN_TIMEOUT_S, request)
            texts += reply.texts
    except client.CachectlError as error:
        return msgspec.structs.replace(comparison, why_no_text=add_home(str(error), home.root))
    return add_texts(comparison, *texts)
