"""Memory that a model takes, as doctor reports it, its backend divides it, and the keeper of several models lends it.

Pure.
"""

from dataclasses import dataclass

KV_SHARE = 0.7  # of what weights leave free, where no budget is set; the rest is for prefill steps


def compute_memory_budget(weight_bytes: int, machine_bytes: int) -> int:
    """Bytes for residents and running requests without a configured budget: a share of what the weights leave."""
    return max(int((machine_bytes - weight_bytes) * KV_SHARE), 0)


@dataclass(frozen=True)
class ModelSize:
    """Memory without which a model is not loaded among several.

    `kv_min_bytes`: KV of a conversation of CONTEXT_TOKENS_MIN tokens; `kv_set_bytes`: its budget by the settings, 0 for
    none.
    """

    weight_bytes: int
    step_bytes: int  # of a prefill step after so many tokens
    kv_min_bytes: int
    kv_set_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.step_bytes

    @property
    def floor_bytes(self) -> int:
        """The least KV budget: the settings may ask for less than the shortest context takes."""
        return min(self.kv_min_bytes, self.kv_set_bytes) if self.kv_set_bytes else self.kv_min_bytes

    @property
    def need_bytes(self) -> int:
        return self.fixed_bytes + self.floor_bytes

    def kv_max_bytes(self, total_bytes: int) -> int:
        """KV budget where no other model is loaded; 0 where the model doesn't fit even then."""
        chosen = self.kv_set_bytes or compute_memory_budget(self.weight_bytes, total_bytes)
        return max(0, min(max(chosen, self.floor_bytes), total_bytes - self.fixed_bytes))
