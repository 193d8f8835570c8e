"""`python -m warmline_backend.doctor MODEL`.

Exit codes: 0 fine, perhaps with warnings; 1 something is wrong; 2 usage.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence

from warmline_backend.config import describe_reserved_args, parse_step_size, parse_template_args
from warmline_backend.doctor.findings import FindingLevel
from warmline_backend.doctor.sample_prompt import DoctorSettings
from warmline_common.process.arguments import finite, gigabytes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    given = vars(parser.parse_args(arguments))
    if problem := describe_reserved_args(parse_template_args(given["chat_template_args"])):
        parser.error(problem)
    as_json = given.pop("json")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever is not here is a finding, not a download
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.ERROR)
    from warmline_backend.doctor import examine as examination  # after the environment: transformers reads it once
    from warmline_backend.doctor import report  # after the environment: transformers reads it once

    examined = examination.examine_model(DoctorSettings(**given))
    if as_json:
        sys.stdout.write(json.dumps(report.convert_to_json(examined), indent=2, ensure_ascii=False) + "\n")
    else:
        report.print_report(examined)
    return 1 if examined.verdict is FindingLevel.FAIL else 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmline_backend.doctor", description="Says whether a model can be served.")
    parser.add_argument("model", help="a folder, or the name of a repository in the hub's cache")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--called", default="", help="what `warmline serve` is to be given as the model")
    parser.add_argument("--home", default="")
    parser.add_argument("--memory-gb", type=gigabytes, default=0.0, help="a Mac of so much memory, not this machine")
    parser.add_argument("--prefill-tokens-s", type=finite, default=0.0, help="how fast it prefills, for times")
    parser.add_argument("--disk-gb-s", type=finite, default=0.0, help="how fast its disk is read, for times")
    parser.add_argument("--memory-budget-gb", type=gigabytes, default=0.0)
    parser.add_argument(
        "--prefill-step-size", type=_keep_text(parse_step_size), default=DoctorSettings.prefill_step_size
    )
    parser.add_argument("--kv-bits", type=int, default=0)
    parser.add_argument("--kv-group-size", type=int, default=DoctorSettings.kv_group_size)
    parser.add_argument(
        "--chat-template-args", type=_keep_text(parse_template_args), default=DoctorSettings.chat_template_args
    )
    parser.add_argument("--adapter-path", default="")
    parser.add_argument("--trust-remote-code", action="store_true")
    return parser


def _keep_text(check: Callable[[str], object]) -> Callable[[str], str]:
    """argparse's type for what the backend's own will be asked to take, kept as it was given."""

    def checked(text: str) -> str:
        check(text)
        return text

    return checked


if __name__ == "__main__":
    sys.exit(main())
