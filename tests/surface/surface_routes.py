"""Routes: which paths are served, and how each method and each way of asking is answered."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surface_servers import Answer, ask

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
GENERATING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
AS_ADMIN = {"X-Warmline-Admin": "1"}

PROXY_PATHS = (
    *("/", "/?query=1", "//", "/nosuch", "/v1", "/v1/", "/v2/models", "/chat/completions"),
    *("/health", "/health/", "/health?query=1", "/ready", "/ready/", "/metrics", "/metrics/"),
    *("/admin", "/admin/", "/admin/nosuch", "/admin/dashboard.html", "/admin/dashboard.css", "/admin/icon.svg"),
    *(f"/admin/{name}.js" for name in ("api", "chart", "dialog", "dom", "explain", "format", "main")),
    *(f"/admin/{name}.js" for name in ("models", "overview", "requests", "sessions", "tree")),
    *("/admin/chat.css", *(f"/admin/{name}.js" for name in ("branches", "chat", "completion", "turn", "views"))),
    *("/warmline", "/warmline/", "/warmline/nosuch", "/warmline/status", "/warmline/status/", "/warmline/status?a=1"),
    *(
        f"/warmline/{name}"
        for name in ("requests", "activity", "sessions", "tree", "path", "explain", "whose", "models")
    ),
    "/warmline/requests/none",
    *(f"/warmline/models/any/{name}" for name in ("load", "unload", "pin")),
    *(
        f"/warmline/{name}"
        for name in ("texts", "purge", "pin", "gc", "repair", "replay", "import", "models", "prewarm")
    ),
    *(CHAT, f"{CHAT}/", f"{CHAT}?query=1", f"{CHAT}/more", COMPLETIONS, f"{COMPLETIONS}/"),
    *(MESSAGES, f"{MESSAGES}/", f"{MESSAGES}?beta=true", f"{MESSAGES}/count_tokens", f"{MESSAGES}/count_tokens/"),
    *(f"{MESSAGES}/batches", RESPONSES, f"{RESPONSES}/", f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"),
    *(f"{RESPONSES}/resp_none", f"{RESPONSES}/resp_none/cancel", f"{RESPONSES}/resp_none/input_items"),
    *("/v1/models", "/v1/models/", "/v1/models/any/name", "/v1/requests", "/v1/requests/", "/v1/requests/none"),
    *("/v1/embeddings", "/v1/audio/speech", "/kv/status"),
)
BACKEND_PATHS = (
    *("/", "/nosuch", "/health", "/health/", "/health?query=1", "/ready", "/metrics", "/v1/models", "/v1/models/"),
    *("/v1/models/any/name", CHAT, f"{CHAT}/", COMPLETIONS, MESSAGES, RESPONSES),
    *("/kv", "/kv/prompts", "/kv/texts", "/kv/restore", "/kv/save", "/kv/status", "/kv/status/", "/kv/residents"),
    *("/kv/memory", "/kv/memory/"),
    *("/kv/residents?ids=1", "/kv/residents/order", "/kv/residents/none", "/kv/forget"),
    *("/requests", "/requests/none", "/requests/none?finish=prefill", "/requests/none?finish=nosuch"),
)
PROXY_HEADERS = frozenset(
    {"Content-Length", "Content-Type", "Date", "Server", "Request-Id", "X-Request-Id", "X-Warmline-Request"}
)
BACKEND_HEADERS = frozenset({"Content-Length", "Content-Type", "Date", "Server"})
# Whose values are promised; of others the name counts.
PINNED = frozenset(
    {"allow", "www-authenticate", "location", "cache-control", "vary", "content-security-policy", "referrer-policy"}
    | {"x-content-type-options", "x-frame-options"}
)
PINNED_PREFIXES = ("access-control-", "cross-origin-")

LOAD_HEADERS = {"Connection"}  # load decides whether a connection stays open
Case = tuple[str, str, object, Mapping[str, str]]  # method, path, body, headers
MESSAGE = {"role": "user", "content": "hi"}


def of_answer(answer: Answer, usual: frozenset[str]) -> dict[str, Any]:
    """Status, type and error, and the headers beyond the usual ones."""
    names = {name for name, _ in answer.headers}
    fields: dict[str, Any] = {"status": answer.status}
    if kind := answer.header("Content-Type"):
        fields["type"] = kind
    if error := _error(answer.json):
        fields["error"] = error
    if more := {name: _shown(name, value) for name, value in answer.headers if name not in usual | LOAD_HEADERS}:
        fields["headers"] = dict(sorted(more.items()))
    if missing := usual - names:
        fields["without"] = sorted(missing)
    return fields


def _error(body: Any) -> str:
    """Describe type, code and param of an error, and the envelope's keys."""
    if not isinstance(body, dict) or not isinstance(error := body.get("error"), dict):
        return ""
    parts = [f"{name}={error[name]}" for name in ("type", "code", "param") if error.get(name) is not None]
    return " ".join([*parts, f"in {','.join(body)}"])


def _shown(name: str, value: str) -> str:
    return value if name.lower() in PINNED or name.lower().startswith(PINNED_PREFIXES) else "any"


def matrix(port: int, paths: Sequence[str], headers: Mapping[str, str], usual: frozenset[str]) -> dict[str, Any]:
    """Collect by path how each method is answered without a body; methods that are answered alike are joined."""
    return {path: _alike(lambda method, path=path: ask(port, method, path, None, headers), usual) for path in paths}


def _alike(answered: Callable[[str], Answer], usual: frozenset[str]) -> dict[str, Any]:
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for method in METHODS:
        description = of_answer(answered(method), usual)
        for methods, same in groups:
            if same == description:
                methods.append(method)
                break
        else:
            groups.append(([method], description))
    return {" ".join(methods): description for methods, description in groups}


def collect_answers(port: int, cases: Mapping[str, Case], usual: frozenset[str]) -> dict[str, Any]:
    return {
        name: of_answer(ask(port, method, path, body, headers), usual)
        for name, (method, path, body, headers) in cases.items()
    }


def proxy_cases() -> dict[str, Case]:
    """Cases without keys: bodies, hosts and origins that are refused or accepted."""
    page = {"Origin": "https://other.example"}
    own = {"Sec-Fetch-Site": "cross-site"}
    bodies: dict[str, object] = {"none": b"", "no JSON": b"{", "a list": [], "empty": {}, "wrong types": {"model": 1}}
    return {
        **{f"{path}, body: {name}": ("POST", path, body, {}) for path in GENERATING for name, body in bodies.items()},
        **{f"{path}, field: {name}": case for path in GENERATING for name, case in _fields(path).items()},
        **{f"POST /warmline/{name}, body: empty": ("POST", f"/warmline/{name}", {}, AS_ADMIN) for name in OWNERS},
        **{f"POST /warmline/{name}, no header": ("POST", f"/warmline/{name}", {}, {}) for name in OWNERS},
        **{f"GET {path}": ("GET", path, None, {}) for path in QUERIES},
        "host of another": ("GET", "/health", None, {"Host": "other.example"}),
        "chat of another page": ("POST", CHAT, {}, page),
        "status for another page": ("GET", "/warmline/status", None, page),
        "status across sites": ("GET", "/warmline/status", None, own),
        "status passed on": ("GET", "/warmline/status", None, {"X-Forwarded-For": "192.0.2.1"}),
        "status with a wrong key": ("GET", "/warmline/status", None, {"Authorization": "Bearer wrong"}),
        "page passed on": ("GET", "/admin", None, {"X-Forwarded-For": "192.0.2.1"}),
        "visit": ("GET", "/", None, {"Accept": "text/html"}),
        "id that can't be": ("POST", CHAT, {}, {"X-Warmline-Request": "a b"}),
        "expectation": ("POST", CHAT, {}, {"Expect": "nosuch"}),
        "timeout that can't be": ("POST", CHAT, _chat(), {"X-Warmline-Total-Timeout": "word"}),
        "models for Anthropic's clients": ("GET", "/v1/models", None, {"anthropic-version": "2023-06-01"}),
        "metrics for OpenMetrics": ("GET", "/metrics", None, {"Accept": "application/openmetrics-text"}),
        "purge of another key": ("POST", "/warmline/purge", {"key": "nosuch"}, AS_ADMIN),
        "pin of another session": ("POST", "/warmline/pin", {"session": "nosuch"}, AS_ADMIN),
        "texts of another segment": ("POST", "/warmline/texts", {"segment": "nosuch", "sequences": []}, AS_ADMIN),
        "import of a relative path": ("POST", "/warmline/import", {"path": "nosuch"}, AS_ADMIN),
        "import of no file": ("POST", "/warmline/import", {"path": "/nosuch"}, AS_ADMIN),
    }


OWNERS = ("texts", "purge", "pin", "import")
QUERIES = (
    "/warmline/requests?count=word",
    "/warmline/activity?offset=-1",
    "/warmline/sessions?sort=nosuch",
    "/warmline/tree?parent=nosuch",
    "/warmline/path?session=nosuch",
    "/warmline/path?session=a&segment=b",
    "/warmline/explain?request=nosuch",
)


def _fields(path: str) -> dict[str, Case]:
    wrong: dict[str, object] = {"temperature": "hot", "top_p": 7, "logit_bias": 1, "stop_token_ids": "x", "stream": 1}
    return {name: ("POST", path, {**body_of(path), name: value}, {}) for name, value in wrong.items()}


def body_of(path: str) -> dict[str, Any]:
    """Make the smallest body that the path answers."""
    if path == COMPLETIONS:
        return {"model": "m", "prompt": "hi", "max_tokens": 4}
    if path == RESPONSES:
        return {"model": "m", "input": "hi", "max_output_tokens": 4}
    return _chat()


def _chat() -> dict[str, Any]:
    return {"model": "m", "messages": [MESSAGE], "max_tokens": 4}


KEYED = (
    *(("GET", path) for path in ("/health", "/ready", "/metrics", "/v1/models", "/warmline/status", "/admin", "/")),
    *(("POST", path) for path in (*GENERATING, f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens")),
    *(("POST", "/warmline/gc"), ("DELETE", "/v1/requests/none"), ("GET", "/v1/nosuch"), ("OPTIONS", CHAT)),
)


def keyed_cases(keys: Mapping[str, str]) -> dict[str, Case]:
    """Access of each key, sent in each way, to a proxy whose owner needs one too."""
    shown: dict[str, Mapping[str, str]] = {"no key": {}}
    for name, key in keys.items():
        shown[f"bearer {name}"] = {"Authorization": f"Bearer {key}"}
    client = keys["client"]
    password = base64.b64encode(f"me:{keys['admin']}".encode()).decode()
    shown |= {"x-api-key client": {"x-api-key": client}, "basic admin": {"Authorization": f"Basic {password}"}}
    cases = {
        f"{method} {path}, {name}": (method, path, None, headers)
        for method, path in KEYED
        for name, headers in shown.items()
    }
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Headers": "authorization, x-nosuch"}
    as_client = {"Authorization": f"Bearer {client}"}
    return {
        **cases,
        "preflight of a named page": ("OPTIONS", CHAT, None, preflight),
        "preflight of another page": ("OPTIONS", CHAT, None, {**preflight, "Origin": "https://other.example"}),
        "models for a named page": ("GET", "/v1/models", None, {**as_client, "Origin": "https://app.example"}),
        "admin by basic, header set": (
            "POST",
            "/warmline/gc",
            {},
            {"Authorization": f"Basic {password}", **AS_ADMIN},
        ),
        **{f"POST {path}, no backend": ("POST", path, body_of(path), as_client) for path in GENERATING},
    }


def backend_cases() -> dict[str, Case]:
    bodies: dict[str, object] = {"no JSON": b"{", "a list": [], "empty": {}}
    posts = (CHAT, COMPLETIONS, "/kv/prompts", "/kv/texts", "/kv/restore", "/kv/save", "/kv/forget")
    return {
        **{f"POST {path}, body: {name}": ("POST", path, body, {}) for path in posts for name, body in bodies.items()},
        "order without names": ("PUT", "/kv/residents/order", {}, {}),
        "order": ("PUT", "/kv/residents/order", {"drop_first": []}, {}),
        "share without bytes": ("PUT", "/kv/memory", {}, {}),
        "share of fewer than no bytes": ("PUT", "/kv/memory", {"kv_bytes": -1, "usable_bytes": 0}, {}),
        "unknown prompt": ("POST", CHAT, None, {"X-Warmline-Prompt": "nosuch"}),
        "unknown resident": ("POST", CHAT, _chat(), {"X-Warmline-Resident": "nosuch", "X-Warmline-Reuse": "1"}),
        "unknown leader": ("POST", CHAT, _chat(), {"X-Warmline-Follow": "nosuch", "X-Warmline-Reuse": "1"}),
        "resident and leader": ("POST", CHAT, _chat(), {"X-Warmline-Follow": "a", "X-Warmline-Resident": "b"}),
        "reuse that is no number": ("POST", CHAT, _chat(), {"X-Warmline-Reuse": "word"}),
        "root that is none": ("POST", CHAT, _chat(), {"X-Warmline-Root": "word"}),
        "checkpoints that are none": ("POST", CHAT, _chat(), {"X-Warmline-Checkpoints": "word"}),
        "background that is long": ("POST", CHAT, _chat(), {"X-Warmline-Background": "1"}),
        "save of an unknown resident": ("POST", "/kv/save", {"request_id": "a", "resident": "nosuch"}, {}),
    }


def backend_cases_by_secret(secret: str) -> dict[str, Case]:
    shown = {
        "no secret": {},
        "wrong": {"Authorization": "Bearer wrong"},
        "right": {"Authorization": f"Bearer {secret}"},
    }
    places = (("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"), ("GET", "/kv/status"), ("POST", CHAT))
    return {
        f"{method} {path}, {name}": (method, path, None, headers)
        for method, path in places
        for name, headers in shown.items()
    }
