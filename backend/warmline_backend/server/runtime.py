"""The runtime: all objects that exist once the model is loaded, and prompts made with them."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmline_backend.config import BackendConfig
from warmline_backend.engine.kv_transfer import KvTransfer
from warmline_backend.model.fingerprint import compute_fingerprint
from warmline_backend.model.model import ServedModel
from warmline_backend.output.detokenizer import decode_tokens, render_echo
from warmline_backend.output.expected import make_expected_output
from warmline_backend.prompt.render_limits import PromptTooLongError, RenderCancellation, RenderLimits
from warmline_backend.prompt.renderer import RenderedPrompt, TemplateRenderer
from warmline_backend.request.params import BadRequestError, make_context_error, parse_params
from warmline_backend.request.prediction import PREDICTION_CHARS_PER_TOKEN, parse_prediction
from warmline_backend.scheduler.capacity import check_capacity, sequence_tokens_max
from warmline_backend.server.chunk_encoder import TokenDecoder
from warmline_backend.server.prompt_store import StoredPrompt
from warmline_backend.structured_output.compiler import GrammarCompiler
from warmline_common.protocol.messages import SampledTurn
from warmline_common.protocol.tokens import TOKEN_BYTES, unpack_tokens
from warmline_common.storage.home import Home

TEXTS_TOKENS_MAX = 65_536  # per request


@dataclass(frozen=True)
class Runtime:
    """All objects that need the model.  Any thread, but for `kv_transfer`: event loop thread."""

    served: ServedModel
    fingerprint: str
    renderer: TemplateRenderer
    grammar_compiler: GrammarCompiler
    token_decoder: TokenDecoder
    kv_transfer: KvTransfer
    config: BackendConfig
    model_created: int  # modification time of the model's config, in Unix seconds
    device: str  # name of the computing device, for people

    def decode_texts(self, sequences: Sequence[bytes]) -> list[str]:
        """Texts of packed token sequences.  Raises BadRequestError."""
        if sum(map(len, sequences)) > TEXTS_TOKENS_MAX * TOKEN_BYTES:
            raise BadRequestError(
                f"the sequences have more than {TEXTS_TOKENS_MAX} tokens in all; send fewer", "sequences"
            )
        return [decode_tokens(self.served.tokenizer, self._unpack_ids(sequence)) for sequence in sequences]

    def _unpack_ids(self, sequence: bytes) -> list[int]:
        if len(sequence) % TOKEN_BYTES:
            raise BadRequestError(f"a sequence has {len(sequence)} bytes; a token has {TOKEN_BYTES}", "sequences")
        ids = unpack_tokens(sequence)
        if ids and max(ids) >= self.served.vocabulary_size:
            last = self.served.vocabulary_size - 1
            raise BadRequestError(f"token {max(ids)} is none of this model's, which end at {last}", "sequences")
        return ids

    def make_prompt(
        self,
        endpoint: str,
        body: dict[str, Any],
        turns: Sequence[SampledTurn],
        root: bytes,
        budget_bytes: int,
        cancellation: RenderCancellation,
    ) -> StoredPrompt:
        """Check, render and tokenize a body, and prepare its answer.

        Raises BadRequestError, KvTooLargeError; RenderCancelledError.
        """
        served, config = self.served, self.config
        rendered = self._render(endpoint, body, turns, root, budget_bytes, cancellation)
        expected = make_expected_output(endpoint, body, rendered, served.tokenizer)
        params = parse_params(
            endpoint,
            body,
            context_tokens_max=served.context_tokens_max,
            prompt_tokens=len(rendered.tokens),
            vocabulary_size=served.vocabulary_size,
            default_max_tokens=config.max_tokens,
            default_temperature=config.temperature,
            default_top_p=config.top_p,
        )
        prediction = parse_prediction(body)[: params.max_tokens * PREDICTION_CHARS_PER_TOKEN]
        check_capacity(served, len(rendered.tokens), params.max_tokens, budget_bytes)
        return StoredPrompt(
            id=secrets.token_hex(8),
            endpoint=endpoint,
            tokens=rendered.tokens,
            params=params,
            boundaries=rendered.boundaries,
            turn_end=rendered.turn_end,
            messages=rendered.messages,
            echo=render_echo(body, rendered.tokens, served.tokenizer) if params.echo else "",
            constraint=self.grammar_compiler.build_constraint(
                endpoint, body, rendered.tools, expected.tail, cancellation.check
            ),
            expected_output=expected,
            prediction=self.renderer.tokenize_prediction(prediction, cancellation.check),
        )

    def _render(
        self,
        endpoint: str,
        body: dict[str, Any],
        turns: Sequence[SampledTurn],
        root: bytes,
        budget_bytes: int,
        cancellation: RenderCancellation,
    ) -> RenderedPrompt:
        served = self.served
        context, room = served.context_tokens_max, sequence_tokens_max(served, budget_bytes)
        limits = RenderLimits(max(1, min(context or room, room)), cancellation)
        try:
            return self.renderer.render(endpoint, body, turns, limits, root)
        except PromptTooLongError as error:
            if not context or error.tokens < context:
                check_capacity(served, error.tokens, 0, budget_bytes, is_exact=error.is_exact)
            field = "messages" if endpoint == "chat" else "prompt"
            raise make_context_error(context, error.tokens, field, is_exact=error.is_exact) from error


def fingerprint_served_model(served: ServedModel, config: BackendConfig, home: Home, grid: int = 0) -> str:
    """Fingerprint of the served model.  Raises OSError, ValueError; may read all weights."""
    adapter_path = Path(config.adapter_path) if config.adapter_path else None
    draft_path = served.draft.path if served.draft is not None else None
    return compute_fingerprint(
        served.path,
        adapter_path,
        config.kv_quantization,
        served.dtype,
        home.models,
        grid=grid,
        draft_path=draft_path,
    )
