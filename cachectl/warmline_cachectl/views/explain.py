"""Explanations and comparisons for people: two texts side by side, what differs in them marked."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from warmline_cachectl.views.columns import printable
from warmline_cachectl.views.tables import format_age, format_count, make_console
from warmline_common.protocol.waits import LONG_WAIT_S_MIN
from warmline_proxy.explain.causes import NEW_TEXT
from warmline_proxy.explain.diff import Comparison
from warmline_proxy.explain.explain import WARM_CAUSES, DiffSide, DivergencePoint, ExplainReply
from warmline_proxy.store.rows import DIVERGENCE_TOKENS_AFTER, RequestRecord

BLANK_LINES_MAX = 2  # that are shown as they are
COLUMNS_WIDTH_MIN = 100  # narrower terminals get one text below the other
# Around what differs, where there is no colour to say so.
MARK_OPEN = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"
MARK_CLOSE = "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}"
MARK_STYLE = "bold black on yellow"
BLANK_LINES = re.compile(rf"\n(?:[^\S\n]*\n){{{BLANK_LINES_MAX + 1},}}")
TOKENS_SHOWN_MAX = 24  # of a side without a text

Renderables = Iterable[Table | Text | str]


def render_explanation(reply: ExplainReply) -> Renderables:
    record, verdict = reply.request, reply.verdict
    model = printable(record.client_model) or "no model named"
    if since := reply.since:
        were = "were, the last of them" if since.warm > 1 else "was,"
        warm = f"{format_count(since.warm, 'request')} since then {were} {since.last} ({format_age(since.at)})"
        yield f"The last one that was not warm; {warm}.\n"
    yield f"request {record.id} ({record.endpoint}, {model}, {format_age(record.at)}, {record.outcome})"
    is_new_text = verdict.cause == NEW_TEXT  # then the record's reason says how far the prompt was known
    known = f"; {printable(record.why_not_warmer)}" if is_new_text else ""
    yield f"reused {record.cached_tokens:,} of {record.prompt_tokens:,} prompt tokens ({record.source}{known})"
    for wait in reply.waits:
        yield f"waited {wait.seconds:.2f} s for {wait.means}"
    if record.ttft_s and record.expected_ttft_s:
        yield _format_ttft(record)
    if record.decode_passes:
        yield _format_decoding(record)
    yield f"\n{verdict.cause}: {verdict.means}"
    if verdict.detail:
        yield f"  here: {printable(verdict.detail)}"
    if verdict.advice:
        yield f"  what to do: {verdict.advice}"
    for each in reply.besides:
        yield f"also {each.cause}: {each.means}"
    is_repeated = record.why_not_warmer in ("", verdict.means, verdict.detail)
    if verdict.cause not in WARM_CAUSES and not is_repeated:
        yield f"why no more was reused: {printable(record.why_not_warmer)}"
    if reply.where and reply.known and reply.prompt:
        yield f"\nIt diverges from the known prompt {_format_place(reply.where)}:"
        yield from _render_sides(("known", reply.known), ("this prompt", reply.prompt), reply.where)
    yield f"\n{_format_stored_now(reply)}"


def render_comparison(result: Comparison) -> Renderables:
    yield f"a  {result.a}  {result.tokens_a:,} tokens"
    yield f"b  {result.b}  {result.tokens_b:,} tokens"
    if not result.same_root:
        yield "They belong to different models or keys: neither is ever reused for the other."
    yield f"Both begin with the same {result.common:,} tokens."
    if result.where and result.side_a and result.side_b:
        yield f"They part {_format_place(result.where)}:"
        yield from _render_sides(("a", result.side_a), ("b", result.side_b), result.where)
    elif result.tokens_a != result.tokens_b:
        shorter, longer = ("a", "b") if result.tokens_a < result.tokens_b else ("b", "a")
        yield f"{shorter} ends there; {longer} continues."
    else:
        yield "They are the same."
    if result.why_no_text:
        yield f"No texts: {printable(result.why_no_text)}"


def _format_ttft(record: RequestRecord) -> str:
    """The time to the first token beside the expected one, with the parts that matter in either."""
    text = f"first token after {record.ttft_s:.2f} s, expected after {record.expected_ttft_s:.2f} s"
    pairs = zip(record.ttft_parts.list_named(), record.expected_parts.list_named(), strict=True)
    long = [
        f"{part.replace('_', ' ')} {seconds:.2f} s, expected {expected_s:.2f} s"
        for (part, seconds), (_, expected_s) in pairs
        if max(seconds, expected_s) >= LONG_WAIT_S_MIN
    ]
    return "; ".join([text, *long]) if record.ttft_parts.total_s else text


def _format_decoding(record: RequestRecord) -> str:
    text = f"decoded {format_count(record.generated_tokens, 'token')} in {format_count(record.decode_passes, 'step')}"
    if record.drafted_tokens:
        drafted = format_count(record.drafted_tokens, "draft token")
        sources = ", ".join(f"{count:,} by {printable(source)}" for source, count in record.accepted_by_source.items())
        return f"{text}; {record.accepted_tokens:,} of {drafted} were right{f' ({sources})' if sources else ''}"
    return f"{text}; no drafts: {printable(record.no_drafts)}" if record.no_drafts else text


def _format_place(where: DivergencePoint) -> str:
    place = f"at token {where.token:,}"
    if where.role == "tools":
        return f"{place}, in the tools"
    if not where.message:
        return place
    if where.message < where.message_last:
        return f"{place}, in messages {where.message} to {where.message_last}"
    return f"{place}, in message {where.message} ({printable(where.role)})"


def _format_stored_now(reply: ExplainReply) -> str:
    now = reply.now
    text = f"Stored now: {now.tokens:,} of its {reply.request.prompt_tokens:,} prompt tokens"
    name = f"session {now.session}" + (f" ({printable(now.title)})" if now.title else "")
    text += f", in {name}." if now.session else "; its conversation is not stored, or no longer."
    if reply.where is None:
        return text
    return f"{text}  What it parted from is {'still' if now.branch else 'not (or no longer)'} on disk."


def _render_sides(old: tuple[str, DiffSide], new: tuple[str, DiffSide], where: DivergencePoint) -> Renderables:
    out = make_console()
    texts = [(name, _render_side(side, out, where)) for name, side in (old, new)]
    if out.width >= COLUMNS_WIDTH_MIN:
        table = Table(expand=False, show_lines=False)
        for name, _ in texts:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*(text for _, text in texts))
        yield table
        return
    for name, text in texts:
        yield Text(f"--- {name}", style="bold")
        yield text


def _render_side(side: DiffSide, out: Console, where: DivergencePoint) -> Text:
    if not side.text:
        return _render_token_ids(side, where)
    coloured = out.is_terminal and not out.no_color and out.color_system is not None
    text, at = Text("… " if where.begins else ""), 0
    for start, end in side.differs:
        text.append(_format_text(side.text[at:start]))
        marked = _format_text(side.text[start:end])
        text.append(marked, MARK_STYLE) if coloured else text.append(f"{MARK_OPEN}{marked}{MARK_CLOSE}")
        at = end
    goes_on = len(side.tokens) >= where.token - where.begins + DIVERGENCE_TOKENS_AFTER
    return text.append(_format_text(side.text[at:]) + (" …" if goes_on else ""))


def _format_text(text: str) -> str:
    """Printable text, in which a line counts the blank lines of a longer run."""
    return printable(BLANK_LINES.sub(lambda run: f"\n({run[0].count(chr(10)) - 1} blank lines)\n", text))


def _render_token_ids(side: DiffSide, where: DivergencePoint) -> Text:
    """Token ids from the divergence on."""
    ids = side.tokens[where.token - where.begins :]
    more = " …" if len(ids) > TOKENS_SHOWN_MAX else ""
    return Text(f"tokens {' '.join(map(str, ids[:TOKENS_SHOWN_MAX]))}{more}")
