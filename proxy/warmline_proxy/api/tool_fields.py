"""Names of a client's tools in the backend's refusals.  Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from warmline_common.protocol.messages import ErrorBody, ErrorReply, decode, encode

# A tool of chat's, or a part of it: the client's APIs have no `function` around name, description and schema.
_FIELD = re.compile(r"tools\[(\d{1,9})\](\.function)?(\.parameters)?(?![^.'])")


@dataclass(frozen=True)
class ToolFields:
    """Fields of the client's body in which the tools of an internal body came."""

    places: tuple[str, ...]  # of each tool of the internal form, such as "tools[2]"
    schema_name: str = "parameters"  # the client's name of chat's `function.parameters`

    def reorder(self, before: Sequence[Any], after: Sequence[Any]) -> "ToolFields":
        """The same for a list of tools in another order."""
        places = dict(zip(map(msgspec.json.encode, before), self.places, strict=True))
        return replace(self, places=tuple(places[msgspec.json.encode(tool)] for tool in after))

    def replace_names(self, body: bytes) -> bytes:
        """Rename the tool that an error object names, in `param` and at the message's beginning."""
        try:
            error = decode(body, ErrorReply).error
        except msgspec.DecodeError:
            return body
        if not (error.param or "").startswith("tools["):
            return body
        return encode(ErrorReply(error=self._rename_error(error)))

    def _rename_error(self, error: ErrorBody) -> ErrorBody:
        message = self._rename_at(error.message, 1) if error.message.startswith("'") else error.message
        return msgspec.structs.replace(error, message=message, param=self._rename_at(error.param or "", 0))

    def _rename_at(self, text: str, start: int) -> str:
        """Rename a field whose name begins at `start`."""
        if not (found := _FIELD.match(text, start)) or int(found[1]) >= len(self.places):
            return text
        schema = f".{self.schema_name}" if found[3] else ""
        return f"{text[:start]}{self.places[int(found[1])]}{schema}{text[found.end() :]}"
