"""GET and POST /warmline/prewarm: prompts computed ahead."""

from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from warmline_common.settings.prewarm import PrewarmEntry, parse_api
from warmline_proxy.auth.key_store import KeyNotFoundError
from warmline_proxy.errors import bad_request
from warmline_proxy.http.bodies import BodyReader, json_response
from warmline_proxy.prewarm.calls import PrewarmError
from warmline_proxy.prewarm.prewarmer import Prewarmer
from warmline_proxy.prewarm.reports import PrewarmReply, PrewarmRequest
from warmline_proxy.upstream.client import UpstreamError, translate_upstream_error


@dataclass(frozen=True)
class PrewarmRoutes:
    """Handlers of the list of prompts computed ahead, and of further ones."""

    prewarmer: Prewarmer
    body_reader: BodyReader

    async def get_entries(self, _: web.Request) -> web.Response:
        return json_response(self.prewarmer.describe())

    async def add_entry(self, request: web.Request) -> web.Response:
        """Queue a file's prompt; 400 where it can't be computed."""
        given = await self.body_reader.read_message(request, PrewarmRequest, "valid prewarm request")
        if not Path(given.path).is_absolute():
            raise bad_request(f"path must be absolute, not {given.path[:200]!r}.", param="path")
        try:
            api = str(parse_api(given.api)) if given.api else ""
            entry = PrewarmEntry(file=given.path, api=api, model=given.model, key=given.key, pin=given.pin)
            return json_response(PrewarmReply(entries=[await self.prewarmer.add_command(entry)]))
        except ValueError as error:
            raise bad_request(f"api: {error}, not {given.api[:200]!r}.", param="api") from None
        except (PrewarmError, KeyNotFoundError) as error:
            raise bad_request(str(error)) from error
        except UpstreamError as error:
            raise translate_upstream_error(error) from error
