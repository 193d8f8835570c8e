"""The APIs that clients speak.

Each reads its own bodies into one internal form, OpenAI's chat (or completion) body, and writes the backend's chunks as
its own events; what lies between knows of one form alone, so all share the cache.
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
    """The API that a path belongs to, so that a refusal, too, is in words that its client knows; chat where none is."""
    return MESSAGES if path.startswith(f"{MESSAGES_PATH}/") else APIS.get(path, CHAT)
