"""`warmline doctor --json` for the keeper's tests: sizes are in the model's folder, in `sizes.json`.

`machine_bytes` there is what the machine has, if not a terabyte.
"""

import json
import os
import sys
import time
from pathlib import Path

from warmline_common.process.parent_watch import watch_parent

MACHINE_BYTES = 10**12


def main(arguments: list[str]) -> int:
    folder, budget_gb = Path(arguments[-1]), read_flag(arguments, "--memory-budget-gb")
    with (folder / "events").open("a") as file:
        file.write(json.dumps({"event": "examined", "pid": os.getpid()}) + "\n")
    while (folder / "hold_size").exists():
        time.sleep(0.02)
    if not (sizes := folder / "sizes.json").exists():
        finding = {"level": "FAIL", "area": "files", "what": "config.json is missing", "todo": "copy it"}
        print(json.dumps({"findings": [finding], "weights": None, "memory": None}))
        return 1
    weights, step, kv = json.loads(sizes.read_text())
    load = {"weight_bytes": weights, "step_bytes": step, "kv_min_bytes": kv, "kv_set_bytes": int(budget_gb * 10**9)}
    machine = folder / "machine_bytes"
    memory = {"machine_bytes": int(machine.read_text()) if machine.exists() else MACHINE_BYTES, "load": load}
    print(json.dumps({"findings": [], "weights": {"bytes": weights}, "memory": memory}))
    return 0


def read_flag(arguments: list[str], name: str) -> float:
    return float(arguments[arguments.index(name) + 1]) if name in arguments else 0.0


if __name__ == "__main__":
    watch_parent(5.0)
    sys.exit(main(sys.argv[1:]))
