"""The command line that serves the model that was examined."""

import shlex

from warmline_backend.doctor.sample_prompt import DoctorSettings


def format_serve_command(settings: DoctorSettings, *, has_custom_code: bool, budget_needed_gb: float) -> str:
    """Quoted for a shell: what was asked for, with what the model needs besides."""
    usual = DoctorSettings(settings.model)
    budget = budget_needed_gb or settings.memory_budget_gb
    options: list[tuple[str, object, bool]] = [  # with whether to say it
        ("--model", settings.called or settings.model, True),
        ("--home", settings.home, bool(settings.home)),
        ("--memory-budget-gb", f"{budget:g}", budget > 0),
        ("--prefill-step-size", settings.prefill_step_size, settings.prefill_step_size != usual.prefill_step_size),
        ("--kv-bits", settings.kv_bits, settings.kv_bits > 0),
        ("--kv-group-size", settings.kv_group_size, settings.kv_bits > 0),
        ("--chat-template-args", settings.chat_template_args, settings.chat_template_args != usual.chat_template_args),
        ("--adapter-path", settings.adapter_path, bool(settings.adapter_path)),
    ]
    words = ["warmline", "serve"]
    for flag, value, said in options:
        if said:
            words += [flag, str(value)]
    if has_custom_code or settings.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)
