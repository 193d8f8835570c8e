"""Translation of the backend's failures into errors for clients.  Pure."""

from warmline_proxy.errors import (
    RETRY_AFTER_S,
    UNAUTHORIZED,
    ClientError,
    bad_gateway,
    encode_error_body,
    service_unavailable,
)
from warmline_proxy.upstream.client import UpstreamError, UpstreamStatusError, UpstreamUnreachableError


def translate_upstream_error(error: ClientError | UpstreamError) -> ClientError:
    """Error for the client from a failure of the backend; the backend's own refusal of a request is passed on."""
    if isinstance(error, ClientError):
        return error
    if isinstance(error, UpstreamStatusError):
        return _translate_refusal(error)
    if isinstance(error, UpstreamUnreachableError):
        return service_unavailable(f"The backend can't serve now: {error}.  Try again soon.")
    return bad_gateway(f"Computing the answer failed: {error}.")


def _translate_refusal(error: UpstreamStatusError) -> ClientError:
    retry_after_s = int(error.retry_after) if error.retry_after.isdigit() else None
    if error.status == UNAUTHORIZED:  # proxy and backend disagree about their secret; that is not the client's key
        return bad_gateway("The backend refused the proxy: do both use one home?")
    if error.status in (429, 503) and retry_after_s is None:
        retry_after_s = RETRY_AFTER_S
    body = error.body if error.body.lstrip().startswith(b"{") else encode_error_body(str(error), "server_error")
    return ClientError(error.status, body, retry_after_s)
