"""`warmline gates` against servers with one fault each: the right gates fail, with the reason."""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.run.smoke_servers import (
    AnswersAtRandom,
    BreaksStreams,
    CachesFirstTurnOnly,
    CachesNothing,
    CachesWholeSteps,
    GarbageAfterTurns,
    HonestServer,
    IgnoresCachePrompt,
    IgnoresModelName,
    IgnoresResponseFormat,
    LeaksEndToken,
    LeaksReasoning,
    NeverAnswers,
    NeverReady,
    OmitsDone,
    OmitsUsage,
    RefusesResponseFormat,
    RejectsOtherNames,
    RequiresKey,
    SendsNoCalls,
    SendsNumberAsString,
    ServesOneAtATime,
    SwapsAnswers,
    WrongWordAfterTurns,
    run_server,
)
from warmline_common.settings.resolve import ConfigurationError, resolve
from warmline_common.storage.file_lock import process_lock
from warmline_run.smoke import client
from warmline_run.smoke.check import FAILED, NOT_RUN, PASSED, Outcome, Scale, Target
from warmline_run.smoke.client import SmokeClient
from warmline_run.smoke.runner import (
    CHECKS,
    EXIT_FAILED,
    EXIT_PASSED,
    EXIT_UNREACHABLE,
    Endpoint,
    find_checks,
    find_endpoint,
    normalize_url,
    run_checks,
)

NAMES = [gate.name for gate in CHECKS]
SMALL = Scale(turns_count=6, turn_bytes=400, long_tokens=1500, quick_s=0.0)
TIMEOUT_S = 20.0


def run_gates(
    server: type[HonestServer],
    names: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    home: Path | None = None,
    grid_tokens: int = 0,
) -> dict[str, Outcome]:
    async def ask() -> dict[str, Outcome]:
        async with (
            run_server(server()) as url,
            SmokeClient(url, timeout_s=timeout_s, model="honest-model") as server_client,
        ):
            target = Target(
                server_client, "seed", SMALL, grid_tokens=grid_tokens, home=home, may_restart=home is not None
            )
            return {check.name: await check.evaluate(target) for check in find_checks(names)}

    return asyncio.run(ask())


def test_honest_server_passes_all_checks_without_restart() -> None:
    seen = run_gates(HonestServer)
    assert list(seen) == NAMES
    assert {name: outcome.detail for name, outcome in seen.items() if outcome.result == FAILED} == {}
    assert [name for name in NAMES if seen[name].result == NOT_RUN] == ["restart"]
    assert "--restart" in seen["restart"].detail


@pytest.mark.parametrize(
    ("server", "gate", "message", "others"),
    [
        (LeaksEndToken, "no-markup", "'<|im_end|>' stands in the content of a short answer", ()),
        (LeaksReasoning, "no-markup", "'</think>'", ()),
        (IgnoresModelName, "any-name", "calls its model 'honest-model'", ()),
        (RejectsOtherNames, "any-name", "answered 404: model openai/gates-a not found", ()),
        (SendsNoCalls, "tool-call", "has none: finish_reason 'tool_calls'", ()),
        (SendsNumberAsString, "tool-call", "'count' is '3'", ()),
        (IgnoresResponseFormat, "exact-answer", "allows nothing but 'warm-4711'", ()),
        (
            AnswersAtRandom,
            "exact-answer",
            "asked twice at temperature 0",
            ("streaming", "three-at-once", "long-transcript"),
        ),
        (GarbageAfterTurns, "long-transcript", "is not the cold one: they part at token 1", ()),
        (WrongWordAfterTurns, "long-transcript", "they part at token 21", ()),
        (IgnoresCachePrompt, "long-transcript", "asked to compute turn 2 cold", ()),
        (CachesNothing, "tool-result", "0 tokens were reused", ("long-transcript", "cancel")),
        (CachesFirstTurnOnly, "long-transcript", "the one before it", ()),
        (OmitsDone, "streaming", "without [DONE]", ()),
        (OmitsUsage, "streaming", "no usage", ("cancel",)),
        (BreaksStreams, "streaming", "broke in mid-answer", ("tool-call", "any-name", "no-markup", "cancel")),
        (SwapsAnswers, "three-at-once", "beside two others and alone", ()),
        (ServesOneAtATime, "cancel", "until a long prompt was computed whole", ()),
    ],
)
def test_each_wrong_server_fails_its_check(
    server: type[HonestServer], gate: str, message: str, others: Sequence[str]
) -> None:
    seen = run_gates(server)
    failed = {name: outcome.detail for name, outcome in seen.items() if outcome.result == FAILED}
    assert set(failed) == {gate, *others}, failed
    assert message in failed[gate]


def test_clear_refusal_is_not_a_failure() -> None:
    seen = run_gates(RefusesResponseFormat, ["exact-answer", "three-at-once"])
    assert seen["exact-answer"].result == NOT_RUN and "no forms here" in seen["exact-answer"].detail
    assert seen["three-at-once"].result == PASSED and "none can be held to a value" in seen["three-at-once"].detail


def test_prompts_shorter_than_a_step_prove_no_reuse() -> None:
    seen = run_gates(CachesNothing, ["tool-result", "long-transcript", "cancel"], grid_tokens=8192)
    assert {outcome.result for outcome in seen.values()} == {NOT_RUN}
    for name in ("tool-result", "long-transcript"):
        assert "too short for reuse in exact mode, which keeps whole steps of 8192" in seen[name].detail


def test_exact_mode_reuse_is_judged_by_grid() -> None:
    with_grid = run_gates(CachesWholeSteps, grid_tokens=CachesWholeSteps.STEP_TOKENS)
    assert {name: outcome.detail for name, outcome in with_grid.items() if outcome.result == FAILED} == {}
    assert (with_grid["tool-result"].result, with_grid["long-transcript"].result) == (NOT_RUN, PASSED)
    without_grid = run_gates(CachesWholeSteps)
    assert {name for name, outcome in without_grid.items() if outcome.result == FAILED} == {
        "tool-result",
        "long-transcript",
        "cancel",
    }


def test_settings_apply_to_own_server_only(tmp_path: Path) -> None:
    lines = ["port = 9000", 'host = "0.0.0.0"', 'client_key = "hush"', "kv_bits = 8", 'reuse = "exact"']
    (tmp_path / "warmline.toml").write_text("\n".join(lines))
    config = resolve({"home": str(tmp_path)}, {})
    own = Endpoint("http://127.0.0.1:9000/v1", "hush", tmp_path, 2048, 0.4)
    assert find_endpoint(config, "", {}) == find_endpoint(config, "http://127.0.0.1:9000/v1/", {}) == own
    assert find_endpoint(config, "http://other:9000/v1", {}) == Endpoint("http://other:9000/v1", "", None)
    assert find_endpoint(config, "http://[::1]:9001/v1", {}) == Endpoint("http://[::1]:9001/v1", "", tmp_path)
    apart = resolve({"home": str(tmp_path), "kv_bits": "8,4"}, {})
    assert find_endpoint(apart, "", {}).tolerance == 6.0, "as the coarser half"
    variable = {"WARMLINE_CLIENT_KEY": "mine"}
    assert find_endpoint(config, "http://other/v1", variable).key == "mine"


def test_running_proxy_of_home_is_default_target(tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text('client_key = "hush"')
    (tmp_path / "run").mkdir()
    proxy_file = tmp_path / "run" / "proxy.json"
    config = resolve({"home": str(tmp_path)}, {})
    place = json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:9000"})
    proxy_file.write_text(place)
    running, settings = "http://127.0.0.1:9000/v1", "http://127.0.0.1:8026/v1"
    with process_lock(tmp_path / "home.lock"):
        assert (
            find_endpoint(config, "", {}) == find_endpoint(config, running, {}) == Endpoint(running, "hush", tmp_path)
        )
        assert find_endpoint(config, settings, {}).url == settings
        assert find_endpoint(config, "http://other/v1", {}).url == "http://other/v1"
        variable = {"WARMLINE_PORT": "9001"}
        assert find_endpoint(resolve({"home": str(tmp_path)}, variable), "", variable).url == "http://127.0.0.1:9001/v1"
        for broken in (json.dumps({"pid": 1, "url": running}), "", "[]", '{"pid": 1}'):
            proxy_file.write_text(broken)
            assert find_endpoint(config, "", {}).url == settings
    proxy_file.write_text(place)  # left by one that was killed: its pid, and its port, may be somebody else's by now
    assert find_endpoint(config, "", {}).url == settings
    assert find_endpoint(config, running, {}) == Endpoint(running, "", tmp_path), "who listens there hears no key"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://127.0.0.1:8026", "http://127.0.0.1:8026/v1"),
        ("http://127.0.0.1:8026/", "http://127.0.0.1:8026/v1"),
        ("http://127.0.0.1:8026/v1/", "http://127.0.0.1:8026/v1"),
        ("https://[::1]:1/v1/chat/completions", "https://[::1]:1/v1"),
        ("http://h/chat/completions/", "http://h/v1"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4"),
    ],
)
def test_address_near_base_url_is_normalized(given: str, meant: str) -> None:
    assert normalize_url(given) == meant


@pytest.mark.parametrize("wrong", ["h:8026/v1", "ftp://h/v1", "http://h:99999/v1", "http:///v1", "http://h/v1?a=b", ""])
def test_bad_address_is_refused_with_example(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected an address such as http://127\.0\.0\.1:8026/v1"):
        normalize_url(wrong)


def test_url_of_other_api_fails_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def ask(model: str) -> int:
        async with run_server(HonestServer()) as url:
            target = Target(SmokeClient(f"{url}/v2", "", TIMEOUT_S, model), "seed", SMALL)
            return await run_checks(target, find_checks(["load"]))

    assert asyncio.run(ask("")) == EXIT_UNREACHABLE
    shown = capsys.readouterr()
    assert not shown.out and "/v2/models is not found (404): give the base URL" in shown.err
    assert asyncio.run(ask("honest-model")) == EXIT_FAILED


@pytest.mark.parametrize("server", [NeverAnswers, NeverReady])
def test_silent_server_times_out(server: type[HonestServer]) -> None:
    seen = run_gates(server, ["load"], timeout_s=0.3 if server is NeverAnswers else 2.0)["load"]
    assert seen.result == FAILED
    assert ("no whole answer within 0.3 s" if server is NeverAnswers else "the model is being loaded") in seen.detail


class EndlessEvent(HonestServer):
    """Its streams end in an event that never does."""

    def make_stream_end(self) -> bytes:
        return b"data: " + b"x" * 100


def test_event_of_any_length_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "EVENT_BYTES_MAX", 99)
    seen = run_gates(EndlessEvent, ["streaming"])["streaming"]
    assert seen.result == FAILED and "the stream can't be read: an event of more than" in seen.detail


def test_restart_check_ignores_other_homes(tmp_path: Path) -> None:
    assert "can't be read" in run_gates(HonestServer, ["restart"], home=tmp_path)["restart"].detail
    (tmp_path / "secret").write_text("other")
    seen = run_gates(HonestServer, ["restart"], home=tmp_path)["restart"]
    assert seen.result == NOT_RUN and "does not run from" in seen.detail


@pytest.mark.parametrize(
    ("server", "names", "key", "strict", "code"),
    [
        (HonestServer, ["load", "restart"], "", False, EXIT_PASSED),
        (HonestServer, ["load", "restart"], "", True, EXIT_FAILED),
        (IgnoresModelName, ["any-name"], "", False, EXIT_FAILED),
        (RequiresKey, ["load"], "", False, EXIT_UNREACHABLE),
        (RequiresKey, ["load"], "open", False, EXIT_PASSED),
    ],
)
def test_smoke_exit_codes(server: type[HonestServer], names: list[str], key: str, strict: bool, code: int) -> None:
    async def ask() -> int:
        async with run_server(server()) as url:
            target = Target(SmokeClient(url, key, TIMEOUT_S), "seed", SMALL)
            return await run_checks(target, find_checks(names), strict=strict)

    assert asyncio.run(ask()) == code


def test_checks_run_in_fixed_order() -> None:
    assert [gate.name for gate in find_checks(["streaming", "load"])] == ["load", "streaming"]
    assert {outcome.result for outcome in run_gates(HonestServer, ["streaming", "load"]).values()} == {PASSED}
