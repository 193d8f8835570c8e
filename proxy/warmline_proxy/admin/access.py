"""Who may administer a home (pure)."""

from aiohttp import web

from warmline_proxy.admission import bearer, same_secret
from warmline_proxy.errors import bad_request


def check_owner(request: web.Request, secret: str) -> None:
    """Raises ClientError 401 unless the request shows the home's secret."""
    if not same_secret(bearer(request.headers), secret):
        raise bad_request("This path is for the owner of the home directory.", status=401, code="invalid_api_key")
