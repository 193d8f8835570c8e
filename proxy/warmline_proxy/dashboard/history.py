"""History of the last requests in time buckets: reused prompt tokens and times to the first token.  Pure."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from warmline_common.protocol.tokens import BLOCK_TOKENS
from warmline_proxy.store.rows import RequestRecord

BUCKETS_MAX = 48
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
BUCKET_WIDTHS_S = (
    *(MINUTE_S, 2 * MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, 30 * MINUTE_S),
    *(HOUR_S, 2 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 7 * DAY_S, 30 * DAY_S),
)


class HistoryBucket(msgspec.Struct, kw_only=True):
    """Requests that began in [at, at + width_s)."""

    at: float  # Unix seconds
    requests: int = 0
    hits: int = 0  # reused a block or more: fewer tokens agree by chance
    prompt_tokens: int = 0  # that were reached, before a cancel
    cached_tokens: int = 0


class RequestHistory(msgspec.Struct, kw_only=True):
    """Totals of all kept records."""

    width_s: int
    buckets: list[HistoryBucket]  # oldest first, without gaps
    requests: int
    hits: int
    prompt_tokens: int
    cached_tokens: int  # prefill saved
    generated_tokens: int
    ttft_warm_s: float  # median of hits; cold: of mostly computed prompts; 0.0 if none
    ttft_cold_s: float


def build_history(records: Sequence[RequestRecord], now: float) -> RequestHistory:
    """Aggregate records in any order; future times of a wrong clock count as `now`."""
    begins = [min(record.at, now) for record in records]
    width_s, first, count = _choose_buckets(min(begins, default=now), now)
    buckets = [HistoryBucket(at=float(first + number * width_s)) for number in range(count)]
    for at, record in zip(begins, records, strict=True):
        bucket = buckets[max(0, min(count - 1, int(at - first) // width_s))]
        bucket.requests += 1
        bucket.hits += _is_hit(record)
        bucket.prompt_tokens += record.reached_tokens
        bucket.cached_tokens += record.cached_tokens
    return RequestHistory(
        width_s=width_s,
        buckets=buckets,
        requests=len(records),
        hits=sum(bucket.hits for bucket in buckets),
        prompt_tokens=sum(bucket.prompt_tokens for bucket in buckets),
        cached_tokens=sum(bucket.cached_tokens for bucket in buckets),
        generated_tokens=sum(record.generated_tokens for record in records),
        ttft_warm_s=_median_ttft_s(filter(_is_hit, records)),
        ttft_cold_s=_median_ttft_s(filter(_is_cold, records)),
    )


def _choose_buckets(first: float, last: float) -> tuple[int, int, int]:
    """(width_s, first bucket's time, count), with the narrowest width that needs at most BUCKETS_MAX buckets."""
    for width_s in BUCKET_WIDTHS_S:
        begin, end = int(first) // width_s, int(last) // width_s
        if end - begin < BUCKETS_MAX:
            return width_s, begin * width_s, end - begin + 1
    width_s = BUCKET_WIDTHS_S[-1]  # years: the first bucket has all older requests
    return width_s, (int(last) // width_s - BUCKETS_MAX + 1) * width_s, BUCKETS_MAX


def _median_ttft_s(records: Iterable[RequestRecord]) -> float:
    times = [each.ttft_s for each in records if each.ttft_s > 0]
    return median(times) if times else 0.0


def _is_hit(record: RequestRecord) -> bool:
    return record.cached_tokens >= BLOCK_TOKENS


def _is_cold(record: RequestRecord) -> bool:
    """True for prompts that were mostly computed: a short reused prompt is neither hit nor cold."""
    return not _is_hit(record) and 2 * record.cached_tokens < record.prompt_tokens
