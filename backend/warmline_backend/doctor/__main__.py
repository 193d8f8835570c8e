"""Command `python -m warmline_backend.doctor MODEL`, or with `--models`.

Exit codes: 0 success, warnings included; 1 a check failed, or a model can never be loaded; 2 usage.
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
from warmline_common.process.parent_watch import watch_parent
from warmline_common.settings.flags import FlagParser, check_setting
from warmline_common.settings.models import ModelConfig, parse_models

PARENT_GRACE_S = 5.0  # there is nothing to save


def main(arguments: Sequence[str] | None = None) -> int:
    watch_parent(PARENT_GRACE_S)  # of the keeper, which reads sizes
    parser = _build_parser()
    try:
        values = parser.parse_values(arguments)
        models = parse_models(str(check_setting("models", values.pop("models"))))
    except ValueError as error:
        parser.error(str(error))
    as_json, models_memory_gb = values.pop("json"), values.pop("models_memory_gb")
    settings = DoctorSettings(**values)
    for args in (settings.chat_template_args, *(model.settings.get("chat_template_args", "{}") for model in models)):
        if problem := describe_reserved_args(json.loads(str(args))):
            parser.error(problem)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whatever is not here is a finding, not a download
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.ERROR)
    if models:
        return _examine_several(models, settings, models_memory_gb, as_json)
    return _examine_one(settings, as_json)


def _examine_one(settings: DoctorSettings, as_json: bool) -> int:
    from warmline_backend.doctor import examine, report  # after the environment: transformers reads it once

    examined = examine.examine_model(settings)
    if as_json:
        _write_json(report.convert_to_json(examined))
    else:
        report.print_report(examined)
    return 1 if examined.verdict is FindingLevel.FAIL else 0


def _examine_several(
    models: Sequence[ModelConfig], settings: DoctorSettings, models_memory_gb: float, as_json: bool
) -> int:
    from warmline_backend.doctor.several import examinations, report  # as above

    examined = examinations.examine_models(models, settings, models_memory_gb)
    if as_json:
        _write_json(report.convert_several_to_json(examined))
    else:
        report.print_several(examined)
    return 0 if examined.is_servable else 1


def _write_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _build_parser() -> FlagParser:
    parser = FlagParser("doctor", "Says whether a model can be served.")
    parser.add_argument("model", help="a folder, or the name of a repository in the hub's cache")
    parser.add_argument("--models", default="[]", help="several models in place of this one, as the setting has them")
    parser.add_argument("--models-memory-gb", type=gigabytes, default=0.0, help="for all models together")
    parser.add_argument("--json", action="store_true", help="for programs instead of people")
    parser.add_argument("--called", default="", help="what `warmline serve` is to be given as the model")
    parser.add_argument("--home", default="")
    parser.add_argument("--memory-gb", type=gigabytes, default=0.0, help="a Mac of so much memory, not this machine")
    parser.add_argument("--prefill-tokens-s", type=finite, default=0.0, help="how fast it prefills, for times")
    parser.add_argument("--disk-gb-s", type=finite, default=0.0, help="how fast its disk is read, for times")
    return parser


if __name__ == "__main__":
    exit_codes.run_main(main)
