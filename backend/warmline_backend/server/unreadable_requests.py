"""Log of requests that are no HTTP: one line each, without a traceback and without their bytes."""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from warmline_common.process.redaction import shorten_parser_message


class UnreadableRequestFilter(logging.Filter):
    """Filter that rewrites aiohttp's record of a request that its parser refused; others pass unchanged."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "refused an unreadable request: %s", (shorten_parser_message(error.message),)
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.exc_info = record.exc_text = None
        return True


def log_unreadable_requests_briefly() -> None:
    """Install the filter, for the process."""
    server_logger.addFilter(UnreadableRequestFilter())
