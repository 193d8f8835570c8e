"""All gates in their order, and running them: one after another, each with its outcome."""

import time
from collections.abc import AsyncIterator, Sequence

from warmline_run.smoke.check import FAILED, NOT_RUN, PASSED, Failed, Gate, NotRun, Outcome, Visit
from warmline_run.smoke.checks.basic import any_name, completion, exact_answer, load, no_markup, streaming
from warmline_run.smoke.checks.concurrent import cancel, three_at_once
from warmline_run.smoke.checks.long_transcript import long_transcript
from warmline_run.smoke.checks.restart import restart
from warmline_run.smoke.checks.tools import tool_call, tool_result
from warmline_run.smoke.client import Unanswered
from warmline_run.smoke.responses import Malformed

GATES = (
    Gate("load", "the model is loaded, listed, and computes a token", load),
    Gate("completion", "a question has an answer, a finish and a usage", completion),
    Gate("exact-answer", "the same question has the same answer; a forced value comes exactly", exact_answer),
    Gate("streaming", "a stream says what one piece says, and ends properly", streaming),
    Gate("tool-call", "a call that is required comes, and follows its schema", tool_call),
    Gate("tool-result", "a tool's result is read, and the call's prompt is not computed again", tool_result),
    Gate("three-at-once", "three clients at once each get their own answer", three_at_once),
    Gate("any-name", "any model name is served, and comes back", any_name),
    Gate("no-markup", "no marker of template, thoughts or tools is in what is said", no_markup),
    Gate("long-transcript", "turn after turn, warm answers are the cold ones", long_transcript),
    Gate("cancel", "a client that leaves frees the server, and its work is kept", cancel),
    Gate("restart", "a conversation goes on after the backend's end", restart),
)
AFTER_REFUSAL = "what the server's log says of it is worth reading"


def chosen(names: Sequence[str]) -> Sequence[Gate]:
    """Those of these names, in their order; all where there are none.  Raises KeyError with one that is unknown."""
    known = {gate.name for gate in GATES}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [gate for gate in GATES if not names or gate.name in names]


async def run(visit: Visit, gates: Sequence[Gate]) -> AsyncIterator[Outcome]:
    """Each outcome as it comes.  A gate's failure does not keep the others from being tried."""
    for gate in gates:
        began_s = time.monotonic()
        result, detail, advice = await _tried(visit, gate)
        yield Outcome(gate, result, time.monotonic() - began_s, detail, advice)


async def _tried(visit: Visit, gate: Gate) -> tuple[str, str, str]:
    try:
        return PASSED, await gate.check(visit), ""
    except Failed as failure:
        return FAILED, failure.seen, failure.advice
    except NotRun as reason:
        return NOT_RUN, str(reason), ""
    except Unanswered as error:
        return FAILED, str(error), AFTER_REFUSAL
    except Malformed as error:
        return FAILED, f"the answer is not OpenAI's: {error}", ""
    except TimeoutError:
        return FAILED, f"not done within {visit.server.timeout_s:g} s", "see --timeout-s"
