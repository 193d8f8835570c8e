"""Progress of a prompt's prefill, for its client.  Pure."""

from warmline_proxy.api.base import PromptProgress
from warmline_proxy.request_log import RequestLog


def measure_progress(request_log: RequestLog, processed: int) -> PromptProgress:
    """Progress of a request whose first `processed` tokens have KV rows, those included that it reuses."""
    reuse = request_log.plan.reuse if request_log.plan else 0
    prefill_s = request_log.elapsed_s() - request_log.prefill_began_s if request_log.prefill_began_s else 0.0
    return PromptProgress(request_log.prompt_tokens, min(reuse, processed), processed, int(prefill_s * 1000))
