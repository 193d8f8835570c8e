"""POST /kv/texts: detokenization for people."""

from collections.abc import Callable
from pathlib import Path

from support.backend.live_backend import LiveBackend, with_backend
from support.tiny_models import EOS, VOCABULARY
from warmline_backend.server import runtime
from warmline_common.protocol.messages import DetokenizeRequest
from warmline_common.protocol.tokens import TOKEN_BYTES, pack_tokens

FolderOf = Callable[..., Path]


def test_detokenize_returns_texts(tiny_folder: FolderOf, tmp_path: Path) -> None:
    async def work(backend: LiveBackend) -> None:
        prompt = await backend.render_prompt({"messages": [{"role": "user", "content": "Grüße, 世界 "}]})
        second_half = 1 + len(b"user\nGr") + 1  # one token opens the message, then a token is a byte
        cut = prompt.tokens[second_half * TOKEN_BYTES : (second_half + 3) * TOKEN_BYTES] + pack_tokens([EOS])
        request = DetokenizeRequest(sequences=[prompt.tokens, cut, b""])
        status, reply = await backend.request_json("POST", "/kv/texts", request)
        whole, with_a_half, nothing = reply["texts"]
        assert status == 200 and whole.startswith("<|im_start|>user\nGrüße, 世界 <|im_end|>")
        assert (with_a_half, nothing) == ("\ufffdß<|im_end|>", "")

    with_backend(tiny_folder("llama"), tmp_path, work)


def test_invalid_sequences_are_refused(tiny_folder: FolderOf, tmp_path: Path) -> None:
    many = pack_tokens([1]) * (runtime.TEXTS_TOKENS_MAX + 1)

    async def work(backend: LiveBackend) -> None:
        for sequence, why in ((b"abc", "3 bytes"), (pack_tokens([VOCABULARY]), "none of this model's"), (many, "more")):
            status, reply = await backend.request_json("POST", "/kv/texts", DetokenizeRequest(sequences=[sequence]))
            assert status == 400 and why in reply["error"]["message"], reply

    with_backend(tiny_folder("llama"), tmp_path, work)
