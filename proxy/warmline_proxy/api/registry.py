"""APIs of clients, by path.

Each reads its bodies into one internal form, OpenAI's chat (or completion) body, and encodes the backend's chunks as
its own events; the rest of the proxy knows only the internal form, so all APIs share the cache.
"""

from warmline_proxy.api.anthropic.adapter import MessagesApi
from warmline_proxy.api.base import Api
from warmline_proxy.api.openai import OpenAIApi
from warmline_proxy.api.responses.adapter import ResponsesApi

CHAT = OpenAIApi("chat")
COMPLETION = OpenAIApi("completion")
MESSAGES = MessagesApi()
RESPONSES = ResponsesApi()

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
COUNT_TOKENS_PATH = f"{MESSAGES_PATH}/count_tokens"

APIS: dict[str, Api] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    MESSAGES_PATH: MESSAGES,
    RESPONSES_PATH: RESPONSES,
}


def find_api(path: str) -> Api:
    """API of a path, in whose form errors are encoded; chat for unknown paths."""
    return MESSAGES if path.startswith(f"{MESSAGES_PATH}/") else APIS.get(path, CHAT)
