"""Command `python -m warmline_backend.doctor MODEL`.

Exit codes: 0 success, warnings included; 1 a check failed; 2 usage.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence

from warmline_backend.config import describe_reserved_args
from warmline_backend.doctor.findings import FindingLevel
from warmline_backend.doctor.settings import DoctorSettings
from warmline_common.process import exit_codes
from warmline_common.process.arguments import finite, gigabytes
from warmline_common.settings.flags import FlagParser, SettingError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    try:
        values = parser.parse_values(arguments)
    except SettingError as error:
        parser.error(str(error))
    if problem := describe_reserved_args(json.loads(values["chat_template_args"])):
        parser.error(problem)
    as_json = values.pop("json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever is not here is a finding, not a download
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.ERROR)
    from warmline_backend.doctor import examine, report  # after the environment: transformers reads it once

    examined = examine.examine_model(DoctorSettings(**values))
    if as_json:
        sys.stdout.write(json.dumps(report.convert_to_json(examined), indent=2, ensure_ascii=False) + "\n")
    else:
        report.print_report(examined)
    return 1 if examined.verdict is FindingLevel.FAIL else 0


def _build_parser() -> FlagParser:
    parser = FlagParser("doctor", "Says whether a model can be served.")
    parser.add_argument("model", help="a folder, or the name of a repository in the hub's cache")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--called", default="", help="what `warmline serve` is to be given as the model")
    parser.add_argument("--home", default="")
    parser.add_argument("--memory-gb", type=gigabytes, default=0.0, help="a Mac of so much memory, not this machine")
    parser.add_argument("--prefill-tokens-s", type=finite, default=0.0, help="how fast it prefills, for times")
    parser.add_argument("--disk-gb-s", type=finite, default=0.0, help="how fast its disk is read, for times")
    return parser


if __name__ == "__main__":
    exit_codes.run_main(main)
