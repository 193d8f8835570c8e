"""`warmline` over stand-ins for backends and for the doctor.  Usage: run_keeper.py ARGUMENTS_OF_WARMLINE"""

import os
import sys
from pathlib import Path

from warmline_run import child_process, processes
from warmline_run.cli import main
from warmline_run.keeper import app, keeper
from warmline_run.keeper.backends import model_process

FOLDER = Path(__file__).parent
STAND_INS = {
    "warmline_backend": "stand_in_backend.py",
    "warmline_backend.doctor": "stand_in_doctor.py",
    "warmline_proxy": "stand_in_proxy.py",
    "warmline_run.cli": "run_keeper.py",
}


def module_arguments(name: str) -> list[str]:
    return [sys.executable, str(FOLDER / STAND_INS[name])] if name in STAND_INS else original(name)


original = processes.module_arguments
vars(processes)["module_arguments"] = module_arguments

if __name__ == "__main__":
    child_process.RESTART_DELAY_FIRST_S = float(os.environ.get("TEST_RESTART_DELAY_S", "0.05"))
    model_process.FIRST_ANSWER_TIMEOUT_S = float(os.environ.get("TEST_FIRST_ANSWER_TIMEOUT_S", "120"))
    model_process.STOP_MARGIN_S = float(os.environ.get("TEST_STOP_MARGIN_S", "15"))
    app.LOCK_WAIT_S = 0.2
    keeper.STANDBY_DELAY_S = float(os.environ.get("TEST_STANDBY_DELAY_S", "3600"))
    main()
