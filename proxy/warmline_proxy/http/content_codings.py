"""Content codings of request bodies (RFC 9110, 8.4): those that are read, and their bounded decoding.  Pure."""

import zlib
from collections.abc import Iterator, Sequence

from warmline_proxy.errors import READABLE_CODINGS, UNSUPPORTED_MEDIA_TYPE, ClientError, bad_request

PIECE_BYTES_MAX = 256 * 1024  # of decoded bytes, so that the event loop can do other work in between
_GZIP, _DEFLATE = "gzip", "deflate"
_ALIASES = {"x-gzip": _GZIP, "x-deflate": _DEFLATE}
_GZIP_WINDOW_BITS, _ZLIB_WINDOW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS
_ZLIB_METHOD = 8  # the lower half of zlib's first byte; no deflate stream without zlib's header begins so


def parse_content_coding(headers: Sequence[str]) -> str:
    """Coding named by the Content-Encoding headers, "" for none.  Raises ClientError 415 for any that is not read."""
    names = [name.strip().lower() for header in headers for name in header.split(",")]
    codings = [_ALIASES.get(name, name) for name in names if name not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1 or codings[0] not in READABLE_CODINGS:
        message = (
            "The body is compressed in a way that can't be undone here; send it with one of the content codings "
            f"{' and '.join(READABLE_CODINGS)}, or plain."
        )
        raise bad_request(message, status=UNSUPPORTED_MEDIA_TYPE)
    return codings[0]


class BodyDecoder:
    """Decoder of one body, fed as it comes."""

    def __init__(self, coding: str) -> None:
        """`coding`: of `parse_content_coding`."""
        self._coding = coding
        self._stream: zlib._Decompress | None = None

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Decoded bytes in pieces of at most PIECE_BYTES_MAX.  Raises ClientError 400 for damaged data."""
        if not self._coding:
            yield data
            return
        has_more = False  # decoded bytes that the last piece had no room for
        while data or has_more:
            if self._stream is None or self._stream.eof:  # gzip allows several members, one after the other
                self._stream = self._open_stream(data[0])
            try:
                piece = self._stream.decompress(data, PIECE_BYTES_MAX)
            except zlib.error:
                raise self._make_error("it is damaged, or compressed in another way") from None
            has_ended = self._stream.eof
            data = self._stream.unused_data if has_ended else self._stream.unconsumed_tail
            has_more = len(piece) == PIECE_BYTES_MAX and not has_ended
            if piece:
                yield piece

    def finish(self) -> None:
        """Raises ClientError 400 where the data ended too early."""
        if self._stream is not None and not self._stream.eof:
            raise self._make_error("it ends too early")

    def _open_stream(self, first_byte: int) -> "zlib._Decompress":
        if self._stream is not None and self._coding == _DEFLATE:
            raise self._make_error("more bytes follow its end")
        if self._coding == _GZIP:
            return zlib.decompressobj(_GZIP_WINDOW_BITS)
        return zlib.decompressobj(_ZLIB_WINDOW_BITS if first_byte & 0x0F == _ZLIB_METHOD else -_ZLIB_WINDOW_BITS)

    def _make_error(self, fault: str) -> ClientError:
        return bad_request(f"The body can't be read as {self._coding}, which its Content-Encoding names: {fault}.")
