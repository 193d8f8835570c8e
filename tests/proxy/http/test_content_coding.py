"""Content codings of bodies: aliases, lists and members are read, in small parts; what can't be undone is refused."""

import gzip
import zlib
from functools import partial

import pytest

from warmline_proxy.errors import ClientError
from warmline_proxy.http.content_coding import MEMBERS_MAX, OUTPUT_BYTES_MAX, create_decoder

pack_gzip = partial(gzip.compress, mtime=0)  # test ids have the bytes
TEXT = b'{"messages": [{"role": "user", "content": "Hi."}]}' * 50
RAW_DEFLATE = zlib.compress(TEXT)[2:-4]


def decode(values: list[str], data: bytes, size: int = 1 << 20) -> bytes:
    decoder, parts = create_decoder(values), list[bytes]()
    for start in range(0, len(data), size):
        parts += decoder.decode(data[start : start + size])
    decoder.finish()
    assert all(len(part) <= OUTPUT_BYTES_MAX for part in parts)
    return b"".join(parts)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("values", "data"),
    [
        ([], TEXT),
        (["identity"], TEXT),
        (["", " , identity"], TEXT),
        (["gzip"], pack_gzip(TEXT)),
        (["GZip"], pack_gzip(TEXT)),
        (["x-gzip"], pack_gzip(TEXT)),
        (["gzip, identity"], pack_gzip(TEXT)),
        (["identity", "gzip"], pack_gzip(TEXT)),
        (["gzip"], pack_gzip(TEXT[:99]) + pack_gzip(b"") + pack_gzip(TEXT[99:])),
        (["deflate"], zlib.compress(TEXT)),
        (["deflate"], RAW_DEFLATE),
    ],
)
def test_body_is_decoded(values: list[str], data: bytes, size: int) -> None:
    assert decode(values, data, size) == TEXT


@pytest.mark.parametrize(
    "values",
    [["gzip, gzip"], ["gzip", "deflate"], ["br"], ["zstd"], ["compress"], ["gz ip"], ["gzip; q=1"], ["\u00fcn"]],
)
def test_other_codings_return_415(values: list[str]) -> None:
    with pytest.raises(ClientError) as caught:
        create_decoder(values)
    assert caught.value.status == 415
    assert caught.value.build_response(b"{}").headers["Accept-Encoding"] == "gzip, deflate, identity"


@pytest.mark.parametrize(
    ("coding", "data", "reason"),
    [
        ("gzip", TEXT, "damaged"),
        ("gzip", b"", "too early"),
        ("gzip", pack_gzip(TEXT)[:-9], "too early"),
        ("gzip", pack_gzip(TEXT) + b"rest", "damaged"),
        ("gzip", pack_gzip(TEXT)[:-1] + b"x", "damaged"),
        ("gzip", pack_gzip(b"") * (MEMBERS_MAX + 1), "after its end"),
        ("deflate", zlib.compress(TEXT)[:-9], "too early"),
        ("deflate", zlib.compress(TEXT) + b"rest", "after its end"),
        ("deflate", b"\xff" * 50, "damaged"),
    ],
)
def test_damaged_body_returns_400(coding: str, data: bytes, reason: str) -> None:
    with pytest.raises(ClientError, match=f"400.*can't be read as {coding}.*{reason}"):
        decode([coding], data)


def test_few_bytes_never_become_many_at_once() -> None:
    decoder = create_decoder(["gzip"])
    parts = decoder.decode(pack_gzip(bytes(5 << 20), 1))
    assert len(next(parts)) == OUTPUT_BYTES_MAX
    assert OUTPUT_BYTES_MAX + sum(map(len, parts)) == 5 << 20
    decoder.finish()
