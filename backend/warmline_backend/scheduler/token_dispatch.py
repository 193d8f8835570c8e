"""Dispatch of sampled tokens: events to the listener, and the end of a sequence at its last token.  Engine thread."""

import logging

import mlx.core as mx

from warmline_backend.generation.events import SampledLogprobs, TokenEvent
from warmline_backend.generation.sampling import pick_logprobs
from warmline_backend.generation.sequence import Sequence
from warmline_backend.scheduler.finish import Finisher
from warmline_common.logging import describe_error, request_context

log = logging.getLogger(__name__)


def dispatch_token(finisher: Finisher, sequence: Sequence, token: int, logprobs: mx.array) -> None:
    """Parse a token, notify the listener, and finish the sequence on a stop, a limit or an error.

    `logprobs` is the token's row [vocabulary].  An exception ends this sequence alone.
    """
    try:
        _process_token(finisher, sequence, token, logprobs)
    except Exception as error:  # the text or its log-probabilities: the fault of this sequence
        with request_context(sequence.request.id):
            log.error("request %s failed", sequence.request.id, exc_info=error)
        finisher.finish_sequence(sequence, "error", error=f"the answer could not be encoded: {describe_error(error)}")


def _process_token(finisher: Finisher, sequence: Sequence, token: int, logprobs: mx.array) -> None:
    sequence.generated_count += 1
    sequence.timings.decoded += 1
    if (fault := sequence.sampler_fault.error) is not None:
        finisher.finish_sequence(sequence, "error", error=f"sampling failed: {describe_error(fault)}")
        return
    parser, ends = sequence.output_parser, sequence.is_end(token)
    parts = () if ends else parser.add(token)
    full = sequence.generated_count >= sequence.answer_tokens_max
    if ends or full:
        parts = (*parts, *parser.finish(natural=ends))
    detail = None if ends else _make_sampled_logprobs(sequence, token, logprobs)
    sequence.request.listener(TokenEvent(parts, token, detail, parser.is_reasoning, parser.stop_word))
    if sequence.first_logits is None:  # after the event: no client waits for these
        sequence.record_first_logits(logprobs)
    if ends or parser.is_stopped or full:
        finisher.finish_sequence(sequence, "stop" if ends or parser.is_stopped else "length")


def _make_sampled_logprobs(sequence: Sequence, token: int, logprobs: mx.array) -> SampledLogprobs | None:
    params = sequence.request.params
    return SampledLogprobs(token, *pick_logprobs(logprobs, token, params.top_logprobs)) if params.logprobs else None
