"""All gates in their order, and running them: one after another, each with its outcome."""

import time
from collections.abc import AsyncIterator, Sequence

from warmline_run.smoke.check import FAILED, NOT_RUN, PASSED, Check, CheckFailedError, CheckNotRunError, Outcome, Target
from warmline_run.smoke.checks.basic import (
    check_any_name,
    check_completion,
    check_exact_answer,
    check_load,
    check_no_markup,
    check_streaming,
)
from warmline_run.smoke.checks.concurrent import check_cancel, check_three_at_once
from warmline_run.smoke.checks.long_transcript import check_long_transcript
from warmline_run.smoke.checks.restart import check_restart
from warmline_run.smoke.checks.tools import check_tool_call, check_tool_result
from warmline_run.smoke.client import NoAnswerError
from warmline_run.smoke.responses import MalformedAnswerError

CHECKS = (
    Check("load", "the model is loaded, listed, and computes a token", check_load),
    Check("completion", "a question has an answer, a finish and a usage", check_completion),
    Check("exact-answer", "the same question has the same answer; a forced value comes exactly", check_exact_answer),
    Check("streaming", "a stream says what one piece says, and ends properly", check_streaming),
    Check("tool-call", "a call that is required comes, and follows its schema", check_tool_call),
    Check("tool-result", "a tool's result is read, and the call's prompt is not computed again", check_tool_result),
    Check("three-at-once", "three clients at once each get their own answer", check_three_at_once),
    Check("any-name", "any model name is served, and comes back", check_any_name),
    Check("no-markup", "no marker of template, thoughts or tools is in what is said", check_no_markup),
    Check("long-transcript", "turn after turn, warm answers are the cold ones", check_long_transcript),
    Check("cancel", "a client that leaves frees the server, and its work is kept", check_cancel),
    Check("restart", "a conversation goes on after the backend's end", check_restart),
)
REFUSAL_ADVICE = "what the server's log says of it is worth reading"


def find_checks(names: Sequence[str]) -> Sequence[Check]:
    """Those of these names, in their order; all where there are none.  Raises KeyError with one that is unknown."""
    known = {gate.name for gate in CHECKS}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [gate for gate in CHECKS if not names or gate.name in names]


async def run_checks(target: Target, checks: Sequence[Check]) -> AsyncIterator[Outcome]:
    """Each outcome as it comes.  A gate's failure does not keep the others from being tried."""
    for gate in checks:
        began_s = time.monotonic()
        result, detail, advice = await _run_check(target, gate)
        yield Outcome(gate, result, time.monotonic() - began_s, detail, advice)


async def _run_check(target: Target, check: Check) -> tuple[str, str, str]:
    try:
        return PASSED, await check.run(target), ""
    except CheckFailedError as failure:
        return FAILED, failure.seen, failure.advice
    except CheckNotRunError as reason:
        return NOT_RUN, str(reason), ""
    except NoAnswerError as error:
        return FAILED, str(error), REFUSAL_ADVICE
    except MalformedAnswerError as error:
        return FAILED, f"the answer is not OpenAI's: {error}", ""
    except TimeoutError:
        return FAILED, f"not done within {target.client.timeout_s:g} s", "see --timeout-s"
