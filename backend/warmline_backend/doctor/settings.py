"""Settings of an examination: model, serving options and machine."""

from dataclasses import dataclass

from warmline_common.settings.parsers import STEP_AUTO, Value
from warmline_common.settings.quantization import KvQuantization, make_quantization

PREFILL_STEP_SIZE = 2048  # the setting's default; also what "auto" is taken for


@dataclass(frozen=True)
class DoctorSettings:
    model: str  # a folder, or the name of a repository in the hub's cache
    called: str = ""  # what `warmline serve` is to be given; "": the same
    home: str = ""  # where another than the default is used
    memory_gb: float = 0.0  # of a Mac; 0: this machine
    prefill_tokens_s: float = 0.0  # how fast the machine is, for times; 0: not known
    disk_gb_s: float = 0.0
    memory_budget_gb: float = 0.0
    wired_limit_gb: float = 0.0
    prefill_step_size: Value = PREFILL_STEP_SIZE  # a number, or "auto"
    kv_bits: Value = 0  # a number, or "8,4" for keys and values
    kv_group_size: Value = 64
    kv_boundary_layers: int = 0
    kv_boundary_bits: Value = 0
    chat_template_args: str = "{}"
    adapter_path: str = ""
    speculation: str = "auto"
    draft_model: str = ""
    trust_remote_code: bool = False

    @property
    def step_tokens(self) -> int:
        return PREFILL_STEP_SIZE if self.prefill_step_size == STEP_AUTO else int(self.prefill_step_size)

    @property
    def kv_quantization(self) -> KvQuantization | None:
        return make_quantization(self.kv_bits, self.kv_group_size, self.kv_boundary_layers, self.kv_boundary_bits)
