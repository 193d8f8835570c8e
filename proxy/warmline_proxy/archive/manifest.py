"""Manifest of an archive, its first member: model, tokens, and the files that follow, in order.

It has nothing of the tenant: its files are in the namespace of no tenant.  JSON with a checksum; bytes are base64.
"""

import math
from typing import Annotated

import msgspec
import xxhash

from warmline_common.protocol.messages import decode, encode
from warmline_common.protocol.tokens import SEGMENT_TOKENS_MAX, TOKEN_BYTES
from warmline_proxy.archive.tar import ArchiveError
from warmline_proxy.store.rows import CallId, Position

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 64 << 20
TURN_TOKEN_BYTES_MAX = 1 << 20  # as for stored turns
PREFILL_S_PER_TOKEN_MAX = 10.0

Name = Annotated[str, msgspec.Meta(max_length=4096)]
Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 50)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class SegmentEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Rows from the end of the segment before to `end`."""

    end: Position
    bytes_count: Size  # of the file
    prefill_s: Seconds  # time to prefill these rows


class CheckpointEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """State after `position` tokens."""

    position: Position
    bytes_count: Size


class SessionEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Session, as rows.SessionRow."""

    id: Name
    client: Name
    title: Name = ""
    turn_end: Position
    created: Seconds  # Unix
    last_used: Seconds
    requests: Position
    hits: Position


class TurnEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampled turn, as rows.TurnRow."""

    calls: Annotated[list[CallId], msgspec.Meta(min_length=1, max_length=4096)]
    tokens: bytes
    at: Seconds


class LayoutEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Size of the model's KV cache and number of a segment's tensors; informative."""

    row_bytes: Size
    state_bytes: Position  # 0 without checkpoints
    tensors: int


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Content of manifest.json."""

    format: int = FORMAT
    made: Seconds  # Unix
    model: Name
    fingerprint: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    layout: LayoutEntry
    tokens: bytes  # u32le, of the whole conversation
    segments: Annotated[list[SegmentEntry], msgspec.Meta(min_length=1)]
    checkpoints: list[CheckpointEntry]
    session: SessionEntry
    turns: list[TurnEntry]

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def segment_ends(self) -> list[int]:
        return [entry.end for entry in self.segments]

    @property
    def segment_starts(self) -> list[int]:
        return [0, *self.segment_ends[:-1]]

    @property
    def members(self) -> list[tuple[str, int]]:
        """(name, bytes) of the files that follow, in order."""
        segments = [(f"segments/{n:05}.safetensors", entry.bytes_count) for n, entry in enumerate(self.segments)]
        states = [(f"checkpoints/{n:05}.safetensors", entry.bytes_count) for n, entry in enumerate(self.checkpoints)]
        return segments + states


class _ChecksummedManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    xxh3_128: str  # in hex, of the manifest's bytes
    manifest: msgspec.Raw


class _Format(msgspec.Struct):
    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    raw = encode(manifest)
    return encode(_ChecksummedManifest(xxh3_128=xxhash.xxh3_128_hexdigest(raw), manifest=msgspec.Raw(raw)))


def decode_manifest(raw: bytes) -> Manifest:
    """Decode and check a manifest.  Raises ArchiveError."""
    try:
        checksummed = decode(raw, _ChecksummedManifest)
        if xxhash.xxh3_128_hexdigest(checksummed.manifest) != checksummed.xxh3_128:
            raise ArchiveError("its manifest is damaged: checksums differ")
        if (found := decode(checksummed.manifest, _Format).format) != FORMAT:
            raise ArchiveError(f"it has format {found}, this version reads {FORMAT}")
        manifest = decode(checksummed.manifest, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArchiveError(f"its manifest can't be read: {error}") from error
    if why := _find_manifest_error(manifest):
        raise ArchiveError(f"its manifest makes no sense: {why}")
    return manifest


def _find_manifest_error(manifest: Manifest) -> str:
    """Describe the first inconsistency; "" where there is none."""
    lengths = [end - start for start, end in zip(manifest.segment_starts, manifest.segment_ends, strict=True)]
    positions = [entry.position for entry in manifest.checkpoints]
    if len(manifest.tokens) % TOKEN_BYTES or manifest.segment_ends[-1] != manifest.token_count:
        return f"segments up to {manifest.segment_ends[-1]} for {len(manifest.tokens)} bytes of tokens"
    if not all(0 < length <= SEGMENT_TOKENS_MAX for length in lengths):
        return f"a segment of {min(lengths)} or {max(lengths)} tokens"
    if positions != sorted(set(positions)) or not all(0 < position <= manifest.token_count for position in positions):
        return "checkpoints out of order or place"
    if manifest.session.turn_end > manifest.token_count:
        return f"a turn that ends at {manifest.session.turn_end} of {manifest.token_count} tokens"
    if any(len(turn.tokens) % TOKEN_BYTES or len(turn.tokens) > TURN_TOKEN_BYTES_MAX for turn in manifest.turns):
        return "a sampled turn of no whole tokens, or of too many"
    if not math.isfinite(manifest.made):
        return "a time that is none"
    return ""
