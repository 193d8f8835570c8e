"""The command that starts a client, with its variables, as a shell takes it.  Pure."""

import shlex
from collections.abc import Mapping, Sequence

HIDDEN = "'***'"


def format_client_command(
    variables: Mapping[str, str], key_variable: str, key_expression: str, arguments: Sequence[str]
) -> str:
    """One command, a variable a line.  `key_expression` is written as it is."""
    assigned = [f"{key_variable}={key_expression}"]
    assigned += [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n".join([*assigned, shlex.join(arguments)])
