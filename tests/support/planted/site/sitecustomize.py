"""Faults in a real pair's processes, and the gate in the backend's; `planted.faults` is the other side.

With this folder on PYTHONPATH, Python runs this file at the start of every process.  In proxy and backend it wraps each
operation of `warmline_common.storage.disk`, in the backend also the parts of an engine step: a chunk of prefill
("prefill"), the decode step that ends a prefill ("first"), a decode step of a group ("decode").  Each of them looks
into the folder that PLANTED_FOLDER names:

- a socket `gate`: a step is announced there as a line of JSON, waits for a byte and sends `ended` at its end; engine
  commands are announced there too, once they are in the mailbox.  A closed gate stops nothing.
- a file `order-PHASE` or `order-any`: its content is the fault of the step's next call of the model; the file is
  renamed to `taken`.
- a file `disk-proxy` or `disk-backend`: the order for that process's disk operations; see `planted_disk`.
- with PLANTED_BUGS set, a file `bug`: the name of the active bug of `planted_bugs`.

PLANTED_MAP_BYTES is the initial size of the proxy's LMDB map, PLANTED_RETRY_INTERVAL_S the interval of its save
retries, PLANTED_RESTART_DELAY_S the delay of all restarts by `warmline serve`.  With PLANTED_HOLD_LOADS set, a backend
announces the load of its model at the gate, too, as a step "load".
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FOLDER = Path(os.environ["PLANTED_FOLDER"])
BUGS = os.environ.get("PLANTED_BUGS")
RESTART_DELAY_S = os.environ.get("PLANTED_RESTART_DELAY_S")
HOLD_LOADS = os.environ.get("PLANTED_HOLD_LOADS")
CONFIGURATION_FAULT = 2  # exit code after which the supervisor does not restart


# ---- faults, each within a step, after the caches were updated and before a token is sampled


def fail() -> None:
    """Raise what mlx raises when a computation fails."""
    import mlx.core as mx

    mx.eval(mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu))


def hang() -> None:
    """Block this thread for good; the other threads run on."""
    threading.Event().wait()


def freeze() -> NoReturn:
    """Block for good with the interpreter's lock held: no thread of this process runs any more."""
    pause = ctypes.PyDLL(None).pause
    while True:
        pause()


def crash() -> None:
    ctypes.string_at(0)


def run_out_of_memory() -> None:
    """End the process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], object]] = {
    "raise": fail,
    "device": fail,
    "hang": hang,
    "freeze": freeze,
    "segv": crash,
    "abort": os.abort,  # as an error in one of Metal's command buffers ends a process
    "oom": run_out_of_memory,
}


@contextlib.contextmanager
def orders_in_calls(model: Any, phase: str) -> Iterator[None]:
    """Let each call of the model take an order, after its real work; a broken device stays so.

    A step that computes nothing, such as followers that start with all they need, takes none.
    """
    kind = type(model)
    real = kind.__call__
    taken = ""

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        computed = real(*arguments, **options)
        if taken := taken or take_order(phase):
            FAULTS[taken]()
        return computed

    kind.__call__ = call
    try:
        yield
    finally:
        if taken != "device":
            kind.__call__ = real


def take_order(phase: str) -> str:
    for name in (phase, "any"):
        with contextlib.suppress(FileNotFoundError):
            (FOLDER / f"order-{name}").rename(FOLDER / "taken")
            return (FOLDER / "taken").read_text()
    return ""


# ---- the gate


def connect_to_gate() -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(FOLDER / "gate"))
    except OSError:
        connection.close()
        return None
    return connection


def send(connection: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # just closed
        connection.sendall(json.dumps({"process": os.getpid(), **message}).encode() + b"\n")


@contextlib.contextmanager
def wait_at_gate(phase: str, requests: list[str]) -> Iterator[None]:
    connection = connect_to_gate()
    if connection is None:
        yield
        return
    with connection:
        send(connection, phase=phase, requests=requests)
        with contextlib.suppress(OSError):
            connection.recv(1)
        yield
        send(connection, phase="ended")


# ---- wrapped functions


def wrap_step(owner: object, name: str, phase: str, sequences: Callable[[Any], list[Any]]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(self: Any, *arguments: Any, **options: Any) -> Any:
        members = sequences(self)
        with (
            wait_at_gate(phase, [member.request.id for member in members]),
            orders_in_calls(members[0].served.model, phase),
        ):
            return real(self, *arguments, **options)

    setattr(owner, name, wrapped)


def wrap_submit(kind: type) -> None:
    real = kind.submit  # type: ignore[attr-defined]

    @functools.wraps(real)
    def wrapped(self: Any, work: Callable[..., Any]) -> Any:
        answer = real(self, work)
        if connection := connect_to_gate():
            with connection:
                send(connection, asked=" ".join(work.__code__.co_names))
        return answer

    kind.submit = wrapped  # type: ignore[attr-defined]


def wrap_load() -> None:
    """Wrap the function before the backend's main module imports it."""
    from warmline_backend.model import model

    real = model.load_served_model

    @functools.wraps(real)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        with wait_at_gate("load", []):
            return real(*arguments, **options)

    model.load_served_model = wrapped


def plant_in_backend() -> None:
    from warmline_backend.engine.engine import Engine
    from warmline_backend.generation.sequence import Sequence
    from warmline_backend.scheduler import prefill
    from warmline_backend.scheduler.decoding import decode_group

    wrap_step(Sequence, "prefill_chunk", "prefill", lambda one: [one])
    wrap_step(prefill, "prefill_last_chunks", "prefill", list)
    wrap_step(decode_group, "make_decode_batch", "first", list)
    wrap_step(decode_group.DecodeGroup, "step", "decode", lambda group: list(group.sequences))
    wrap_submit(Engine)


def plant_in_proxy() -> None:
    from warmline_proxy.index.index import Index
    from warmline_proxy.pipeline.save_health import SaveHealth

    if map_bytes := os.environ.get("PLANTED_MAP_BYTES"):
        set_default(Index, "map_bytes", int(map_bytes))
    if interval_s := os.environ.get("PLANTED_RETRY_INTERVAL_S"):
        set_default(SaveHealth, "retry_interval_s", float(interval_s))


def set_default(kind: type, name: str, value: object) -> None:
    """Change the default of a constructor's argument, by keyword or position."""
    init: Any = kind.__init__  # type: ignore[misc]
    if name in (init.__kwdefaults__ or {}):
        init.__kwdefaults__[name] = value
        return
    names = init.__code__.co_varnames[: init.__code__.co_argcount][-len(init.__defaults__) :]
    init.__defaults__ = tuple(
        value if each == name else old for each, old in zip(names, init.__defaults__, strict=True)
    )
    assert name in names


def plant_in_disk(process: str) -> None:
    # from this folder, which is on the path of a process with faults
    from planted_disk import DiskFaults, wrap_operations

    from warmline_common.storage import disk

    wrap_operations(disk, DiskFaults(FOLDER, process))


def plant_bugs(process: str) -> None:
    import planted_bugs

    plant = {"backend": planted_bugs.plant_in_backend, "proxy": planted_bugs.plant_in_proxy}[process]
    plant(planted_bugs.active_in(FOLDER))


def plant_in_serve(delay_s: float) -> None:
    from warmline_run import child_process

    assert delay_s < child_process.RESTART_DELAY_MAX_S
    child_process.RESTART_DELAY_FIRST_S = child_process.RESTART_DELAY_MAX_S = delay_s


try:
    if "warmline_backend" in sys.orig_argv:
        plant_in_backend()
        plant_in_disk("backend")
        if HOLD_LOADS:
            wrap_load()
        if BUGS:
            plant_bugs("backend")
    elif "warmline_proxy" in sys.orig_argv:
        plant_in_proxy()
        plant_in_disk("proxy")
        if BUGS:
            plant_bugs("proxy")
    elif RESTART_DELAY_S and "serve" in sys.orig_argv:
        plant_in_serve(float(RESTART_DELAY_S))
except Exception:  # noqa: BLE001  a test must not pass without its fault
    traceback.print_exc()
    os._exit(CONFIGURATION_FAULT)
