"""Checks of request heads beyond the parser's, and clients' errors for heads that it could not read.

Pure, but for HeaderNotices.
"""

import logging
import re
from collections.abc import Iterable

from aiohttp import hdrs
from aiohttp.http_exceptions import BadHttpMessage, InvalidURLError, LineTooLong
from multidict import CIMultiDictProxy

from warmline_common.process.redaction import is_field_name, shorten_parser_message
from warmline_common.protocol import messages
from warmline_common.protocol.misspelling import find_similar
from warmline_proxy.errors import ClientError, bad_request

log = logging.getLogger(__name__)

HEAD_LINE_BYTES_MAX = 8190  # request line and each header
HEADERS_COUNT_MAX = 128
CLOSE = {"Connection": "close"}  # of responses where the request's end is in doubt
# Headers of one value, beside those that the parser checks.  A second one is a mistake, or meant for another server on
# the way, which reads the other.
OUR_HEADERS = (
    *("X-Warmline-Admin", messages.HEADER_REQUEST, messages.HEADER_CONNECT_TIMEOUT, messages.HEADER_QUEUE_TIMEOUT),
    *(messages.HEADER_STALL_TIMEOUT, messages.HEADER_TOTAL_TIMEOUT),
)
SINGLE_HEADERS = (hdrs.AUTHORIZATION, "X-Api-Key", hdrs.ORIGIN, hdrs.EXPECT, *OUR_HEADERS)
NOTICES_MAX = 1000  # names remembered; beyond, nothing more is logged
_DUPLICATE_PATTERN = re.compile(r"Duplicate '?([A-Za-z-]{1,40})'?")  # in the parser's messages
_MISSING_PATTERN = re.compile(r"Missing '([A-Za-z-]{1,40})'")


def check_head(method: str, version: tuple[int, int], headers: CIMultiDictProxy[str]) -> None:
    """Raises ClientError for a head that can be read and is not served."""
    if method == hdrs.METH_CONNECT:
        raise bad_request("CONNECT is not allowed here; send a GET or a POST: this is no forward proxy.", status=405)
    for name in SINGLE_HEADERS:
        if len(headers.getall(name, ())) > 1:
            raise _duplicate_header(name)
    codings = ",".join(headers.getall(hdrs.TRANSFER_ENCODING, ())).lower().strip()
    if codings and version < (1, 1):
        message = "The header Transfer-Encoding belongs to HTTP/1.1; this request is HTTP/1.0."
        raise bad_request(message, headers=CLOSE)
    if codings not in ("", "chunked"):
        message = "The header Transfer-Encoding must be chunked, alone; a compressed body has a Content-Encoding."
        raise bad_request(message, status=501, headers=CLOSE)


class HeaderNotices:
    """Log of headers that look like ours, misspelt, each once.  Event loop thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def log_typos(self, names: Iterable[str]) -> None:
        for name in names:
            if "warmline" not in name.lower() or name.title() in OUR_HEADERS or name.lower() in self._seen:
                continue
            if is_field_name(name) and len(self._seen) < NOTICES_MAX:
                self._seen.add(name.lower())
                if similar := find_similar(name, OUR_HEADERS):
                    log.warning("request header '%s' is not known and has no effect; did you mean '%s'?", name, similar)


def translate_parser_error(exc: BaseException | None, message: str, status: int) -> ClientError:
    """Error for a head or a body that the parser could not read.  Nothing of it is quoted but names of headers."""
    if isinstance(exc, LineTooLong) or (isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message):
        count_max, bytes_max = HEADERS_COUNT_MAX, HEAD_LINE_BYTES_MAX
        message = f"The request's head is too large: at most {count_max} headers, of {bytes_max} bytes."
        return bad_request(message, status=431)
    if isinstance(exc, InvalidURLError):
        return bad_request("The request's target must be a path, such as /v1/models, or a URL.")
    if found := _DUPLICATE_PATTERN.match(message):
        return _duplicate_header(found[1])
    if found := _MISSING_PATTERN.match(message):
        return bad_request(f"A request has one {found[1]} header; this one has none.")
    return bad_request(f"This is no HTTP request that can be read: {shorten_parser_message(message)}", status=status)


def _duplicate_header(name: str) -> ClientError:
    return bad_request(f"A request has one {name} header; this one has several.")
