"""The command line that serves the model that was examined."""

import shlex

from warmline_backend.doctor.sample_prompt import Question


def serve_line(question: Question, *, own_code: bool, budget_wanted_gb: float) -> str:
    """Quoted for a shell: what was asked for, with what the model needs besides."""
    usual = Question(question.model)
    budget = budget_wanted_gb or question.memory_budget_gb
    options: list[tuple[str, object, bool]] = [  # with whether to say it
        ("--model", question.called or question.model, True),
        ("--home", question.home, bool(question.home)),
        ("--memory-budget-gb", f"{budget:g}", budget > 0),
        ("--prefill-step-size", question.prefill_step_size, question.prefill_step_size != usual.prefill_step_size),
        ("--kv-bits", question.kv_bits, question.kv_bits > 0),
        ("--kv-group-size", question.kv_group_size, question.kv_bits > 0),
        ("--chat-template-args", question.chat_template_args, question.chat_template_args != usual.chat_template_args),
        ("--adapter-path", question.adapter_path, bool(question.adapter_path)),
    ]
    words = ["warmline", "serve"]
    for flag, value, said in options:
        if said:
            words += [flag, str(value)]
    if own_code or question.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)
