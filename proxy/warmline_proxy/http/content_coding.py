"""Content codings of request bodies: gzip and deflate, undone in small pieces.  Sans I/O.

A few KB may stand for many MB, so that a piece's decoding never produces much at once: its reader counts each part and
lets others go on between two.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from warmline_proxy.errors import ClientError, bad_request

OUTPUT_BYTES_MAX = 64 * 1024  # of one part
INPUT_BYTES_MAX = 16 * 1024  # given to zlib at once: it copies what it does not use
MEMBERS_MAX = 1024  # concatenated in one body
ACCEPTED_CODINGS = "gzip, deflate, identity"

_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_ALIASES = {"x-gzip": "gzip"}  # RFC 9110, 8.4.1.3


class ContentDecoder(Protocol):
    """Decoder of one body."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decoded parts of the next bytes, each at most OUTPUT_BYTES_MAX.  Raises ClientError 400."""

    def finish(self) -> None:
        """Check that the body was complete.  Raises ClientError 400."""


def create_decoder(values: Sequence[str]) -> ContentDecoder:
    """Decoder for the values of Content-Encoding headers.  Raises ClientError 415."""
    named = (name.strip().lower() for value in values for name in value.split(","))
    codings = [_ALIASES.get(name, name) for name in named if name not in ("", "identity")]
    if not codings:
        return IdentityDecoder()
    if len(codings) > 1 or codings[0] not in ("gzip", "deflate"):
        message = "The body is compressed in a way that can't be undone here; send it with gzip or deflate, or plain."
        raise bad_request(message, status=415, headers={"Accept-Encoding": ACCEPTED_CODINGS})
    return ZlibDecoder(codings[0])


class IdentityDecoder:
    def decode(self, data: bytes) -> Iterator[bytes]:
        if len(data) <= OUTPUT_BYTES_MAX:
            yield data
            return
        for start in range(0, len(data), OUTPUT_BYTES_MAX):
            yield data[start : start + OUTPUT_BYTES_MAX]

    def finish(self) -> None:
        pass


class ZlibDecoder:
    """Decoder of gzip, also of several members, and of deflate, with zlib's header or (as some send it) without."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._bits = _GZIP_BITS if coding == "gzip" else 0  # 0: not known before the first byte
        self._decompressor: zlib._Decompress | None = None
        self._members = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), INPUT_BYTES_MAX):
            yield from self._decode(data[start : start + INPUT_BYTES_MAX])

    def _decode(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._decompressor is None or self._decompressor.eof:
                self._decompressor = self._start_member(data)
            try:
                part = self._decompressor.decompress(data, OUTPUT_BYTES_MAX)
            except zlib.error:
                raise self._unreadable("its data are damaged") from None
            data = self._decompressor.unconsumed_tail or self._decompressor.unused_data
            if part or data:
                yield part
            while len(part) == OUTPUT_BYTES_MAX and not data and not self._decompressor.eof:  # the rest is inside zlib
                if part := self._decompressor.decompress(b"", OUTPUT_BYTES_MAX):
                    yield part

    def _start_member(self, data: bytes) -> "zlib._Decompress":
        self._members += 1
        if self._members > (MEMBERS_MAX if self._coding == "gzip" else 1):
            raise self._unreadable("it goes on after its end")
        if not self._bits:
            self._bits = _ZLIB_BITS if data[0] & 0x0F == zlib.DEFLATED else _RAW_BITS
        return zlib.decompressobj(self._bits)

    def finish(self) -> None:
        if self._decompressor is None or not self._decompressor.eof:
            raise self._unreadable("it ends too early")

    def _unreadable(self, reason: str) -> ClientError:
        return bad_request(f"The body can't be read as {self._coding}: {reason}.")
