"""Dispatch of sampled tokens: events to the listener, and the choice of a sequence's end.  Engine thread.

Tokens of an answer with a check are held until the check has passed them.  Where it fails, the sequence goes back to an
earlier token; the scheduler does that after the step.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import mlx.core as mx

from warmline_backend.generation.answer import AnswerToken
from warmline_backend.generation.events import HeldEvent, SampledLogprobs, TokenEvent
from warmline_backend.generation.sampling import pick_logprobs
from warmline_backend.generation.sequence import Sequence
from warmline_backend.scheduler.decoding.decode_group import SampledToken
from warmline_backend.scheduler.finish import Ending
from warmline_backend.structured_output.matcher import Rejection
from warmline_common.logging import describe_error, request_context

log = logging.getLogger(__name__)


def dispatch_tokens(sampled: Iterable[SampledToken]) -> tuple[Counter[Sequence], list[tuple[Sequence, Ending]]]:
    """Dispatch the tokens of one step; returns how many of each sequence, and the sequences that end.

    Tokens of a sequence that come after its end, or after one from which it has to go back, are left out.
    """
    counts, left = Counter[Sequence](), set[Sequence]()
    endings: list[tuple[Sequence, Ending]] = []
    for sequence, token, logprobs in sampled:
        if sequence in left:
            continue
        counts[sequence] += 1
        ending = dispatch_token(sequence, token, logprobs)
        if ending is not None:
            endings.append((sequence, ending))
        if ending is not None or sequence.redraw_position is not None:
            left.add(sequence)
    return counts, endings


def dispatch_token(sequence: Sequence, token: int, logprobs: mx.array) -> Ending | None:
    """Check and parse a token and notify the listener; the sequence's end on a stop, a limit or an error, else None.

    `logprobs` is the token's row [vocabulary].  An exception ends this sequence alone.  Sets the sequence's
    `redraw_position` where it has to go back.
    """
    try:
        return _process_token(sequence, token, logprobs)
    except Exception as error:  # the text or its log-probabilities: the fault of this sequence
        with request_context(sequence.request.id):
            log.error("request %s failed", sequence.request.id, exc_info=error)
        return Ending("error", error=f"the answer could not be encoded: {describe_error(error)}")


def _process_token(sequence: Sequence, token: int, logprobs: mx.array) -> Ending | None:
    if (fault := sequence.sampler_fault.error) is not None:
        return Ending("error", error=f"sampling failed: {describe_error(fault)}")
    answer, parser, matcher = sequence.answer, sequence.output_parser, sequence.request.matcher
    if matcher is not None and matcher.is_drawn_freely(answer.token_count):
        return _cut_answer(sequence, matcher.dead_end)
    is_end = sequence.is_end(token)
    answer.add(AnswerToken(token, None if is_end else _make_sampled_logprobs(sequence, token, logprobs), is_end))
    has_ended = is_end and not (matcher is not None and matcher.dead_end)
    is_last = has_ended or answer.token_count >= sequence.answer_tokens_max
    rejection = _reject_token(sequence, token, has_ended, is_last)
    _send_tokens(sequence, rejection, is_last=is_last and rejection is None, has_ended=has_ended)
    if sequence.first_logits is None:  # after the event: no client waits for these
        sequence.record_first_logits(logprobs)
    if parser.is_stopped or (is_last and rejection is None):
        return Ending("stop" if has_ended or parser.is_stopped else "length")
    if rejection is not None and rejection.position is None:
        return _cut_answer(sequence, rejection.reason)
    if rejection is not None:
        sequence.redraw_position = rejection.position
    return None


def _reject_token(sequence: Sequence, token: int, has_ended: bool, is_last: bool) -> Rejection | None:
    """Check a token, unless it is a stop token of the client's, which cuts any answer."""
    matcher, is_eos = sequence.request.matcher, token in sequence.served.tokenizer.eos_token_ids
    if matcher is None or (has_ended and not is_eos):
        return None
    answer = sequence.answer
    rejection = matcher.reject_token(token, answer.token_count, answer.sent_count, ends=has_ended, is_last=is_last)
    return rejection if rejection is None or sequence.can_redraw else replace(rejection, position=None)


def _send_tokens(sequence: Sequence, rejection: Rejection | None, *, is_last: bool, has_ended: bool) -> None:
    """Send the tokens that will stay; all of them after the `is_last` one."""
    answer, parser = sequence.answer, sequence.output_parser
    count, before = answer.token_count if is_last else sequence.count_sound_tokens(), answer.sent_count
    if rejection is not None:
        count = rejection.sound_count
    for token in answer.take(count):
        parts = () if token.is_end else parser.add(token.id)
        if is_last and answer.sent_count == count:
            parts = (*parts, *parser.finish(natural=has_ended))
        sequence.timings.decoded += 1
        event = TokenEvent(parts, token.id, token.logprobs, parser.is_reasoning, parser.stop_word)
        sequence.request.listener(event)
        if parser.is_stopped:
            return
    if answer.sent_count == before:
        sequence.request.listener(HeldEvent())


def _cut_answer(sequence: Sequence, reason: str) -> Ending:
    """End an answer that can't go on in its form."""
    return Ending("length", parts=sequence.output_parser.finish(natural=False), stop_reason=reason)


def _make_sampled_logprobs(sequence: Sequence, token: int, logprobs: mx.array) -> SampledLogprobs | None:
    params = sequence.request.params
    return SampledLogprobs(token, *pick_logprobs(logprobs, token, params.top_logprobs)) if params.logprobs else None
