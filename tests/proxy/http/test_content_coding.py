"""Content codings of bodies: aliases, members, damage, and pieces of bounded size."""

import gzip
import zlib

import pytest

from warmline_proxy.errors import ClientError
from warmline_proxy.http.content_coding import OUTPUT_BYTES_MAX, create_decoder

TEXT = b'{"messages": []}'


def decode(coding: str, data: bytes, step: int = 1 << 20) -> bytes:
    decoder, pieces = create_decoder([coding]), list[bytes]()
    for start in range(0, len(data), step):
        pieces += decoder.decode(data[start : start + step])
    decoder.finish()
    assert max(map(len, pieces), default=0) <= OUTPUT_BYTES_MAX
    return b"".join(pieces)


def pack_raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("headers", "coding"),
    [
        ([], ""),
        ([""], ""),
        (["identity"], ""),
        (["gzip"], "gzip"),
        (["GZIP"], "gzip"),
        (["x-gzip"], "gzip"),
        (["gzip, identity"], "gzip"),
        (["identity", "gzip"], "gzip"),
        ([" identity ,, deflate"], "deflate"),
    ],
)
def test_coding_is_read(headers: list[str], coding: str) -> None:
    data = {"": TEXT, "gzip": gzip.compress(TEXT), "deflate": zlib.compress(TEXT)}[coding]
    decoder = create_decoder(headers)
    assert b"".join(decoder.decode(data)) == TEXT
    decoder.finish()


@pytest.mark.parametrize(
    "header", ["br", "zstd", "compress", "x-compress", "snappy", "gzip, gzip", "deflate, gzip", "gzip; q=1", "ünïcode"]
)
def test_other_codings_are_415(header: str) -> None:
    with pytest.raises(ClientError) as caught:
        create_decoder([header])
    assert caught.value.status == 415
    assert caught.value.build_response(b"").headers["Accept-Encoding"].startswith("gzip, deflate")


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_bodies_are_decoded(step: int) -> None:
    assert decode("", TEXT, step) == TEXT
    assert decode("gzip", gzip.compress(TEXT), step) == TEXT
    assert decode("gzip", gzip.compress(TEXT[:5]) + gzip.compress(TEXT[5:]), step) == TEXT
    assert decode("deflate", zlib.compress(TEXT), step) == TEXT
    assert decode("deflate", pack_raw_deflate(TEXT), step) == TEXT


@pytest.mark.parametrize("size", [OUTPUT_BYTES_MAX - 1, OUTPUT_BYTES_MAX, OUTPUT_BYTES_MAX + 1, 9 * OUTPUT_BYTES_MAX])
def test_large_bodies_come_in_pieces(size: int) -> None:
    assert decode("gzip", gzip.compress(bytes(size))) == bytes(size)
    assert decode("gzip", gzip.compress(bytes(size)), 100) == bytes(size)


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", TEXT),
        ("gzip", gzip.compress(TEXT)[:-1]),
        ("gzip", gzip.compress(TEXT)[:3]),
        ("gzip", gzip.compress(TEXT) + b"more"),
        ("gzip", gzip.compress(TEXT)[:-8] + bytes(8)),
        ("gzip", zlib.compress(TEXT)),
        ("deflate", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT) + b"more"),
        ("deflate", zlib.compress(TEXT)[:-2]),
    ],
)
def test_damaged_bodies_are_400(coding: str, data: bytes) -> None:
    with pytest.raises(ClientError) as caught:
        decode(coding, data)
    assert caught.value.status == 400 and coding in str(caught.value)
