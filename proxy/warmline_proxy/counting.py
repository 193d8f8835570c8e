"""How many tokens a prompt has, without an answer to it."""

from dataclasses import replace

from warmline_proxy.apis.api import Call
from warmline_proxy.apis.messages_errors import overflow
from warmline_proxy.config import Config
from warmline_proxy.errors import from_upstream
from warmline_proxy.hygiene.stabilize import stabilized
from warmline_proxy.knowledge import Knowledge
from warmline_proxy.trace import new_request_id
from warmline_proxy.turns import Turns
from warmline_proxy.upstream import Refused, Upstream
from warmline_wire.keys import TOKEN_BYTES
from warmline_wire.messages import PromptRequest


class Counter:
    """Takes no place in the queue and leaves nothing behind.  Event loop thread."""

    def __init__(self, config: Config, upstream: Upstream, knowledge: Knowledge, turns: Turns) -> None:
        self._config, self._upstream, self._knowledge, self._turns = config, upstream, knowledge, turns

    async def count(self, call: Call) -> int:
        """Of the very prompt that the same body would be answered from; one that is too long has a length, too.

        Raises UpstreamError.
        """
        if self._config.stabilize:
            call = replace(call, fields=stabilized(call.fields, self._config.stabilize_rules)[0])
        status = await self._knowledge.status()
        body = call.prompt_body(status.model)
        turns = self._turns.recall(status.fingerprint, body.get("messages"))
        asked = PromptRequest(request_id=new_request_id(), endpoint=call.api.endpoint, body=body, turns=turns)
        try:
            return len((await self._upstream.prompt(asked)).tokens) // TOKEN_BYTES
        except Refused as error:
            if numbers := overflow(from_upstream(error)):
                return numbers[0]
            raise
