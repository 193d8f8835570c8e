"""Cache of prepared schemas, with the checks of what they leave to be checked.  Any thread.

A client sends the same schemas with each turn: they are normalized, and compiled, once.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

import xxhash

from warmline_backend.request.params import BadRequestError, FieldError
from warmline_backend.request.schemas import Schema
from warmline_backend.structured_output.checks.answer_check import ToolCheck
from warmline_backend.structured_output.checks.content_check import ContentCheck
from warmline_backend.structured_output.json_schema.prepared import GrammarTrial, PreparedSchema, Trial, prepare_schema

SCHEMA_COUNT_MAX = 512
SCHEMA_CHARS_MAX = 32 << 20  # of all schemas in the cache, as they were sent

PrepareSchema = Callable[[Schema, str, bool, bool], "CachedSchema"]  # as SchemaCache.prepare


class CachedSchema:
    """A prepared schema and its checks, which are made when they are first needed."""

    def __init__(self, prepared: PreparedSchema) -> None:
        self.forced, self._prepared = prepared.forced, prepared
        self.needs_check = bool(prepared.checks) or prepared.has_free_numbers  # its grammar does not force all of it

    @cached_property
    def content_check(self) -> ContentCheck | None:
        """Check of content under this schema; None where it needs none."""
        prepared = self._prepared
        return ContentCheck(prepared.normalized, prepared.checks) if self.needs_check else None

    @cached_property
    def tool_check(self) -> ToolCheck:
        """Check of a call's arguments."""
        return ToolCheck(self._prepared.normalized)


class SchemaCache:
    def __init__(self, find_problem: GrammarTrial) -> None:
        self._find_problem = find_problem
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, tuple[CachedSchema | FieldError, int]] = (
            OrderedDict()
        )  # with their characters
        self._chars = 0

    def prepare(
        self,
        schema: Schema,
        field: str,
        strict: bool,
        is_part: bool,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> CachedSchema:
        """Prepare a schema as `prepare_schema` does, or return it from the cache.

        Raises BadRequestError, and what `check_cancelled` raises, which is called now and then.
        """
        text = json.dumps(schema, ensure_ascii=False)
        key = xxhash.xxh3_128_digest(f"{strict} {field} {text}".encode())
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                self._entries.move_to_end(key)
        made = entry[0] if entry else self._make(schema, field, strict, is_part, check_cancelled)
        self._insert(key, made, len(text))
        if isinstance(made, FieldError):
            raise BadRequestError(made.message, made.param)
        return made

    def _make(
        self, schema: Schema, field: str, strict: bool, is_part: bool, check_cancelled: Callable[[], None]
    ) -> "CachedSchema | FieldError":
        def find_problem(forced: Schema, trial: Trial) -> str:
            check_cancelled()
            return self._find_problem(forced, trial)

        try:
            return CachedSchema(prepare_schema(schema, field, strict, find_problem, is_part))
        except FieldError as error:
            return error.with_traceback(None)

    def _insert(self, key: bytes, made: "CachedSchema | FieldError", chars: int) -> None:
        with self._lock:
            if key not in self._entries:
                self._entries[key] = made, chars
                self._chars += chars
            while len(self._entries) > SCHEMA_COUNT_MAX or self._chars > SCHEMA_CHARS_MAX:
                self._chars -= self._entries.popitem(last=False)[1][1]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._chars = 0
