"""Exit codes of cachectl, and errors as one line on stderr and a code.

0 success, 1 findings or nothing matched, 2 usage or no home, 3 refused (in use, the proxy refused, or not all could be
done), 130 interrupted, 141 closed output.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NoReturn

import typer

from warmline_cachectl import client
from warmline_cachectl.views.columns import printable
from warmline_common.process.exit_codes import OUTPUT_ERRORS, describe_output_error, discard_output
from warmline_common.settings.hints import add_home
from warmline_proxy.auth.key_store import KeyNotFoundError, KeyStoreError, NoClientKeysError
from warmline_proxy.index.index import IndexStoreError

EXIT_OK, EXIT_FOUND, EXIT_USAGE, EXIT_REFUSED = 0, 1, 2, 3
EXIT_INTERRUPTED = 130  # shells' code for SIGINT
ADD_KEY_HINT = "make one with `cachectl key add NAME`, or start with `warmline serve --lan`"

_command_home: ContextVar[Path | str] = ContextVar("_command_home", default="")


def set_command_home(home: Path) -> Path:
    """Take note of the home that the command acts on, for the hints of its errors."""
    _command_home.set(home.expanduser().absolute())
    return home


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with a line and a code on errors whose text is for people."""
    try:
        yield
    except BrokenPipeError:  # the reader of the output is gone: `cli` handles that
        raise
    except client.HomeNotFoundError as error:
        fail(str(error), EXIT_USAGE)
    except NoClientKeysError as error:
        fail(f"{error}; {ADD_KEY_HINT}", EXIT_FOUND)
    except KeyNotFoundError as error:
        fail(str(error), EXIT_FOUND)
    except (client.CachectlError, IndexStoreError, KeyStoreError) as error:
        fail(str(error), EXIT_REFUSED)
    except OSError as error:
        fail_on_os_error(error)


def fail_on_os_error(error: OSError, *, is_output: bool = False) -> NoReturn:
    """Fail; where it may be output that can't be written, without the output that waits.

    `is_output`: it is output.
    """
    message = str(error)
    if error.errno in OUTPUT_ERRORS:
        discard_output(sys.stdout)
        message = describe_output_error(error) if is_output else message
    fail(message, EXIT_REFUSED)


def fail(message: str, code: int) -> NoReturn:
    shown = printable(add_home(message, _command_home.get()))  # it may quote an archive's name of a model
    print(f"cachectl: {shown}", file=sys.stderr)
    raise typer.Exit(code)
