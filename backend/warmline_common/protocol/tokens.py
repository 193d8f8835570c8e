"""Token ids as bytes, and the chain hashes that find a stored prefix.

A block is 64 consecutive tokens, aligned at absolute positions.  A chain hash names a block *and all before it*:
``h[i] = xxh3_128(h[i-1] || u32le(tokens of block i))`` with ``h[-1] = namespace(fingerprint, tenant)``.  Equal hashes
are only a hint: whoever reuses KV compares the tokens themselves.
"""

import copy
from array import array
from collections.abc import Iterable, Iterator, Sequence
from sys import byteorder
from typing import overload

import xxhash

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
SEGMENT_TOKENS_MAX = 8192
COMPARE_CHUNK_BYTES = 4096  # at a time: large for memcmp, small for finding the difference in


class TokenArray(Sequence[int]):
    """Token ids at 4 bytes each, to which others are appended.  Equal to any list or tuple of the same ids.

    A slice is a copy.  Not for several threads where one of them appends.
    """

    __slots__ = ("ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Raises OverflowError for an id that is no u32."""
        self.ids: array[int] = array("I", ids.ids if isinstance(ids, TokenArray) else ids)

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenArray":
        """The inverse of `pack_tokens`.  Raises ValueError where the length is no multiple of 4."""
        tokens = cls()
        tokens.ids.frombytes(data)
        if byteorder == "big":
            tokens.ids.byteswap()
        return tokens

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> "TokenArray": ...

    def __getitem__(self, place: int | slice) -> "int | TokenArray":
        if isinstance(place, int):
            return self.ids[place]
        part = TokenArray.__new__(TokenArray)
        part.ids = self.ids[place]
        return part

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            return self.ids == other.ids
        return self.ids.tolist() == list(other) if isinstance(other, list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __add__(self, other: Iterable[int]) -> "TokenArray":
        joined = TokenArray(self)
        joined.extend(other)
        return joined

    def __iadd__(self, other: Iterable[int]) -> "TokenArray":
        self.extend(other)
        return self

    def __repr__(self) -> str:
        return f"TokenArray({self.ids.tolist()})"

    def append(self, token: int) -> None:
        self.ids.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        self.ids.extend(tokens.ids if isinstance(tokens, TokenArray) else tokens)

    def tolist(self) -> list[int]:
        return self.ids.tolist()


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as u32 little-endian, 4 bytes a token."""
    if isinstance(ids, TokenArray) and byteorder == "little":
        return ids.ids.tobytes()
    packed = TokenArray(ids).ids
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`.  Raises ValueError where the length is no multiple of 4."""
    return TokenArray.from_bytes(data).tolist()


def namespace(fingerprint: str, tenant: str = "") -> bytes:
    """16-byte root of all chains of one model and one tenant (``h[-1]``)."""
    return xxhash.xxh3_128_digest(f"{fingerprint}\0{tenant}".encode())


def chain_hashes(root: bytes, tokens: bytes) -> Sequence[bytes]:
    """16-byte hash of every *full* block of packed `tokens`, in order; a last partial block has none."""
    block = BLOCK_TOKENS * TOKEN_BYTES
    previous, hashes = root, []
    for start in range(0, len(tokens) - block + 1, block):
        previous = xxhash.xxh3_128_digest(previous + tokens[start : start + block])
        hashes.append(previous)
    return hashes


def prefix_digests(root: bytes, tokens: bytes, positions: Iterable[int]) -> dict[int, str]:
    """Digests by position: xxh3_128 in hex over the root and all packed `tokens` before it, in one pass."""
    hasher, hashed, digests = xxhash.xxh3_128(root), 0, {}
    for position in sorted(set(positions)):
        hasher.update(tokens[hashed * TOKEN_BYTES : position * TOKEN_BYTES])
        hashed = position
        digests[position] = hasher.hexdigest()
    return digests


def prefix_digest(root: bytes, tokens: bytes) -> str:
    """Digest of the position after all packed `tokens`, as `prefix_digests` computes it."""
    return xxhash.xxh3_128_hexdigest(root + tokens)


class PrefixHash:
    """Hashes of all tokens before a position.  Immutable: `extend` makes a longer one.

    Gives the hashes that blocks, files and conversations have at that position; each token is read once.
    """

    def __init__(self, root: bytes) -> None:
        self.length = 0
        self._rooted_hasher, self._tokens_hasher = xxhash.xxh3_128(root), xxhash.xxh3_128()
        self._block_hash = root  # chain hash of the last full block
        self._partial_block = b""  # packed tokens after it

    def extend(self, tokens: bytes) -> "PrefixHash":
        return self.extend_with_hashes(tokens)[0]

    def extend_with_hashes(self, tokens: bytes) -> tuple["PrefixHash", Sequence[bytes]]:
        """(longer prefix, chain hashes of the blocks that end within these tokens)."""
        longer, unhashed = copy.copy(self), self._partial_block + tokens
        hashes = chain_hashes(self._block_hash, unhashed)
        longer.length += len(tokens) // TOKEN_BYTES
        longer._rooted_hasher, longer._tokens_hasher = self._rooted_hasher.copy(), self._tokens_hasher.copy()
        longer._rooted_hasher.update(tokens)
        longer._tokens_hasher.update(tokens)
        longer._partial_block = unhashed[len(hashes) * BLOCK_TOKENS * TOKEN_BYTES :]
        if hashes:
            longer._block_hash = hashes[-1]
        return longer, hashes

    @property
    def digest(self) -> str:
        """Digest as `prefix_digest` computes it."""
        return self._rooted_hasher.hexdigest()

    @property
    def tokens_digest(self) -> bytes:
        """xxh3_128 of the packed tokens alone."""
        return self._tokens_hasher.digest()


def count_common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens that two packed sequences share."""
    size = min(len(a), len(b))
    for start in range(0, size, COMPARE_CHUNK_BYTES):
        end = min(start + COMPARE_CHUNK_BYTES, size)
        mine, theirs = a[start:end], b[start:end]
        if mine != theirs:
            difference = int.from_bytes(mine, "little") ^ int.from_bytes(theirs, "little")
            first = ((difference & -difference).bit_length() - 1) // 8  # the lowest bit set lies in the first byte
            return (start + first) // TOKEN_BYTES
    return size // TOKEN_BYTES


def count_common_chars(a: str, b: str) -> int:
    """Number of leading characters that two strings share, by halves: `startswith` compares at memory speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
