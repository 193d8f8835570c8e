"""Precedence of the layers of settings, and their refusals."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from warmline_backend.config import parse_config as parse_backend
from warmline_common.settings.parsers import STABILIZE_RULES
from warmline_common.settings.resolve import (
    ConfigurationError,
    ResolvedConfig,
    describe_misspelt_variables,
    read_setting,
    resolve,
)
from warmline_common.settings.table import SETTINGS, list_settings
from warmline_proxy.config import parse_config as parse_proxy
from warmline_proxy.explain.prompt_head import RULES
from warmline_run import openblas, processes


def resolve_settings(
    home: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: object
) -> ResolvedConfig:
    (home / "warmline.toml").write_text(toml)
    return resolve({"home": str(home), **flags}, environment or {})


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    toml = "prefill_step_size = 100\nport = 9001\ndisk_budget_gb = 2"
    environment = {"WARMLINE_PREFILL_STEP_SIZE": "200", "WARMLINE_PORT": "9002"}
    config = resolve_settings(tmp_path, toml, environment, prefill_step_size="300")
    origin = config.effective_settings
    assert (config["prefill_step_size"], origin["prefill_step_size"].source) == (300, "--prefill-step-size")
    assert (config["port"], origin["port"].source) == (9002, "WARMLINE_PORT")
    assert (config["disk_budget_gb"], origin["disk_budget_gb"].source) == (2.0, str(tmp_path / "warmline.toml"))
    assert (config["host"], origin["host"].source) == ("127.0.0.1", "default")


def test_home_selects_toml_file(tmp_path: Path) -> None:
    (tmp_path / "warmline.toml").write_text('reuse = "off"')
    config = resolve({}, {"WARMLINE_HOME": str(tmp_path)})
    assert (config["home"], config.effective_settings["home"].source) == (str(tmp_path), "WARMLINE_HOME")
    assert config["reuse"] == "off"


def test_every_default_is_valid(tmp_path: Path) -> None:
    config = resolve_settings(tmp_path)
    for name, setting in SETTINGS.items():
        if setting.default != "":
            assert setting.parse(setting.default) == setting.default, name
        if name != "home":
            assert config[name] == setting.default


def test_unknown_key_suggests_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key 'disk-budget'; did you mean 'disk_budget_gb'\?"):
        resolve_settings(tmp_path, "disk-budget = 3")
    with pytest.raises(ConfigurationError, match="unknown key 'zzz'; known keys: model, "):
        resolve_settings(tmp_path, "zzz = 3")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("port = 70000", "port .*warmline.toml.*from 1 to 65535, not 70000"),
        ("port = true", "port .*whole number"),
        ("port = ", "no valid TOML"),
        ("reuse = exact", "no valid TOML: .*line 1.*; texts want quotes"),
        ("disk_budget_gb = -1", "disk_budget_gb .*gigabytes, from 0 to 1000000, not"),
        ("disk_budget_gb = nan", "disk_budget_gb .*gigabytes, from 0 to 1000000, not"),
        ('reuse = "sometimes"', "reuse .*fast, exact or off, not 'sometimes'"),
        ("kv_bits = 7", 'kv_bits .*0, or 2, 3, 4, 5, 6 or 8 bits, or two of these for keys .* as in "8,4", not 7$'),
        ("kv_bits = true", "kv_bits .*0, or 2, 3, 4, 5, 6 or 8 bits, or two of these"),
        ("kv_bits = '8,4,4'", "kv_bits .*two of these for keys and values, as in \"8,4\", not '8,4,4'$"),
        ("kv_bits = '8,0'", "kv_bits .*two of these for keys and values, as in \"8,4\", not '8,0'$"),
        ("kv_bits = []", "kv_bits .*two of these"),
        (
            "kv_group_size = '64,16'",
            "kv_group_size .*expected 32, 64 or 128, or two of these .*\"64,32\", not '64,16'$",
        ),
        ("kv_boundary_layers = -1", "kv_boundary_layers .*whole number from 0 to 1000, not -1$"),
        (
            "kv_boundary_layers = 2",
            "kv_boundary_layers .*expected kv_bits with it, .*; set kv_bits, or leave it out$",
        ),
        ("kv_bits = 4\nkv_boundary_layers = 2", "kv_boundary_layers .*expected kv_boundary_bits with it, such as 8 or"),
        ("kv_bits = 4\nkv_boundary_bits = 8", "kv_boundary_bits .*expected kv_boundary_layers with it, a number of"),
        ("model = 7", "model .*expected text"),
        (
            'client_key = "hush "',
            r"client_key .*expected printable characters, and no spaces at the ends[^,]*send that$",
        ),
        ("trust_remote_code = 2", "true or false"),
        ('home = "/elsewhere"', r"warmline.toml: 'home' can't be set in this file; use --home or WARMLINE_HOME$"),
        ("[server]", "unknown table 'server': settings stand at the top of this file, in no table"),
        ("[[server]]", "unknown table 'server'"),
        ("server.port = 8026", "unknown table 'server'"),
        ("[port]", "port .*whole number from 1 to 65535, not {}"),
        ("responses_keep_mb = 1000000.1", "responses_keep_mb .*megabytes, from 0 to 1000000, not 1000000.1"),
        ("responses_keep_days = 36501", "responses_keep_days .*days, from 0 to 36500, or off, not 36501"),
        ("body_budget_mb = 1000001", "body_budget_mb .*whole number from 1 to 1000000, not 1000001"),
        ("audit_tolerance = 1e7", "audit_tolerance .*nats, from 0 to 1000000, not"),
        ("queue_timeout_s = -1", "queue_timeout_s .*seconds, from 0 to 1000000000, not -1"),
        ('total_timeout_s = "soon"', "total_timeout_s .*seconds, from 0 to 1000000000, not 'soon'"),
        ("stall_timeout_s = inf", "stall_timeout_s .*from 0 to"),
        ("heartbeat_after_s = true", "heartbeat_after_s .*from 0 to"),
        ("audit_fraction = 7", "audit_fraction .*from 0 to 1"),
        ("wedge_timeout_s = 0", "wedge_timeout_s .*from 0.001 to 1000000000"),
        ("partial_save_tokens = 0.5", "partial_save_tokens .*whole number"),
        ("connections_max = 0", "connections_max .*from 1 "),
        ('on_disconnect = "finish"', "on_disconnect .*stop or finish-prefill, not 'finish'"),
        ("prefill_step_size = 0", "prefill_step_size .*from 1 to 65536, or auto, not 0"),
        ('prefill_step_size = "fast"', "prefill_step_size .*, or auto, not 'fast'"),
        ("temp = -1", "temp .*a number, 0 or more"),
        ("top_p = 2", "top_p .*from 0 to 1"),
        ("gpu_keepalive = -1", "gpu_keepalive .*seconds, from 0 to"),
        ("chat_template_args = '{'", "chat_template_args .*a JSON object such as .*line 1 column 2"),
        ("chat_template_args = '[1]'", "chat_template_args .*a JSON object such as"),
        ("chat_template_args = 7", "chat_template_args .*a JSON object such as .*, not 7"),
        ("chat_template_args = '{\"a\": NaN}'", "chat_template_args .*NaN is no JSON"),
        ("chat_template_args = {when = 2020-01-01}", "chat_template_args .*a JSON object such as"),
        ("chat_template_args = {much = inf}", "chat_template_args .*a JSON object such as"),
    ],
)
def test_bad_values_are_refused_in_one_line(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve_settings(tmp_path, toml)
    assert "\n" not in str(caught.value) or "TOML" in message


def test_irregular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "warmline.toml")
    with pytest.raises(ConfigurationError, match=r"warmline\.toml can't be read: it is no regular file"):
        resolve({"home": str(tmp_path)}, {})
    assert read_setting(tmp_path, "port", {}) == SETTINGS["port"].default


@pytest.mark.parametrize(
    ("name", "most"), [("responses_keep_mb", 1e6), ("disk_budget_gb", 1e6), ("stall_timeout_s", 1e9)]
)
def test_stated_maximum_is_accepted(tmp_path: Path, name: str, most: float) -> None:
    assert resolve_settings(tmp_path, f"{name} = {most}")[name] == most


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "some.name"])
def test_other_hosts_need_client_key(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"--lan, .*cachectl key add NAME --home {tmp_path}\)"):
        resolve_settings(tmp_path, host=host)
    assert resolve_settings(tmp_path, 'client_key = "abc"', host=host)["host"] == host
    assert resolve_settings(tmp_path, "lan = true", host=host)["host"] == host
    (tmp_path / "keys.json").touch()
    assert resolve_settings(tmp_path, "", host=host)["host"] == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_client_key(tmp_path: Path, host: str) -> None:
    assert resolve_settings(tmp_path, host=host)["host"] == host


def test_ports_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must differ"):
        resolve_settings(tmp_path, port="8025")


def test_client_key_is_passed_by_environment_only(tmp_path: Path) -> None:
    config = resolve_settings(tmp_path, 'client_key = "from-file"')
    surroundings = {"WARMLINE_CLIENT_KEY": "stale", "PATH": "/bin"}
    proxy, backend = processes.proxy_command(config, surroundings), processes.backend_command(config, "m", surroundings)
    assert proxy.environment["WARMLINE_CLIENT_KEY"] == "from-file"
    assert "WARMLINE_CLIENT_KEY" not in backend.environment
    assert not any("from-file" in argument for argument in proxy.arguments + backend.arguments)


def test_unset_values_are_not_passed(tmp_path: Path) -> None:
    config = resolve_settings(tmp_path, "disk_budget_gb = 0", trust_remote_code=True, model="/m")
    backend, proxy = (
        processes.backend_command(config, "/m", {}).arguments,
        processes.proxy_command(config, {}).arguments,
    )
    assert "--trust-remote-code" in backend
    assert not {"--kv-bits", "--memory-budget-gb", "--max-tokens", "--adapter-path", "--served-name"} & set(backend)
    assert proxy[proxy.index("--disk-budget-gb") + 1] == "0.0"  # 0 means none, not the default


def test_every_setting_reaches_its_processes(tmp_path: Path) -> None:
    config = resolve_settings(tmp_path, drain_timeout_s="7.5", on_disconnect="finish-prefill", send_timeout_s="1e3")
    given = processes.proxy_command(config, {})
    proxy = parse_proxy(given.arguments[4:], {})
    for setting in list_settings("proxy"):
        assert setting.name == "home" or getattr(proxy, setting.name) == config[setting.name], setting.name
    backend = parse_backend(processes.backend_command(config, "m", {}).arguments[4:])
    assert (backend.drain_timeout_s, backend.running_count_max) == (7.5, 16)
    assert given.drain_timeout_s == 7.5


def test_stabilize_rules_reach_proxy(tmp_path: Path) -> None:
    assert STABILIZE_RULES == RULES
    for config in (
        resolve_settings(tmp_path, stabilize=" times, tool-order,times"),
        resolve_settings(tmp_path, 'stabilize = ["times", "tool-order"]'),
    ):
        proxy = parse_proxy(processes.proxy_command(config, {}).arguments[4:], {})
        assert proxy.stabilize_rules == ("times", "tool-order")
    assert parse_proxy(processes.proxy_command(resolve_settings(tmp_path), {}).arguments[4:], {}).stabilize_rules == ()
    for wrong in ('stabilize = "clocks"', "stabilize = 3", "stabilize = [1]"):
        with pytest.raises(ConfigurationError, match=r"stabilize .*expected some of times, dates, ids"):
            resolve_settings(tmp_path, wrong)


def test_cors_origins_reach_proxy(tmp_path: Path) -> None:
    for config in (
        resolve_settings(tmp_path, cors_origins="http://localhost:3000, https://a.example"),
        resolve_settings(tmp_path, 'cors_origins = ["http://localhost:3000", "https://a.example"]'),
    ):
        proxy = parse_proxy(processes.proxy_command(config, {}).arguments[4:], {})
        assert proxy.allowed_origins == {"http://localhost:3000", "https://a.example"}
    assert (
        parse_proxy(
            processes.proxy_command(resolve_settings(tmp_path, cors_origins="*"), {}).arguments[4:], {}
        ).cors_origins
        == "*"
    )
    assert (
        parse_proxy(processes.proxy_command(resolve_settings(tmp_path), {}).arguments[4:], {}).allowed_origins == set()
    )
    for wrong in ('cors_origins = "a.example"', "cors_origins = true", 'cors_origins = ["https://a.example/"]'):
        with pytest.raises(ConfigurationError, match=r"cors_origins .*expected origins such as https://app"):
            resolve_settings(tmp_path, wrong)


def test_template_arguments_reach_backend(tmp_path: Path) -> None:
    expected = {"enable_thinking": False, "reasoning_effort": None, "greeting": "grüß"}
    given = '{"enable_thinking": false, "reasoning_effort": null, "greeting": "grüß"}'
    table = '[chat_template_args]\nenable_thinking = false\ndeep = {n = 1.5, tags = ["a"]}'
    flag = resolve_settings(tmp_path, table, chat_template_args=given)
    variable = resolve_settings(tmp_path, table, {"WARMLINE_CHAT_TEMPLATE_ARGS": given})
    for config in (flag, variable):
        assert parse_backend(processes.backend_command(config, "m", {}).arguments[4:]).template_args == expected
    file = resolve_settings(tmp_path, table)
    assert file.effective_settings["chat_template_args"].source == str(tmp_path / "warmline.toml")
    template_args = parse_backend(processes.backend_command(file, "m", {}).arguments[4:]).template_args
    assert template_args == {"enable_thinking": False, "deep": {"n": 1.5, "tags": ["a"]}}
    assert resolve_settings(tmp_path, environment={"WARMLINE_CHAT_TEMPLATE_ARGS": ""})["chat_template_args"] == "{}"


def test_backend_defaults_equal_table(tmp_path: Path) -> None:
    options = {"prefill_step_size": "auto", "temp": "0.7", "top_p": "0.9", "gpu_keepalive": "2.5", "max_tokens": "9"}
    config = resolve_settings(tmp_path, trust_remote_code=True, **options)
    backend = parse_backend(processes.backend_command(config, "m", {}).arguments[4:])
    assert (backend.prefill_step_size, backend.temperature, backend.top_p) == (0, 0.7, 0.9)
    assert (backend.gpu_keepalive_s, backend.max_tokens, backend.trust_remote_code) == (2.5, 9, True)
    alone = parse_backend(["--home", str(tmp_path), "--model", "m", "--running-count-max", "16"])
    assert parse_backend(processes.backend_command(resolve_settings(tmp_path), "m", {}).arguments[4:]) == replace(
        alone, port=8025, served_name="smollm2-135m-instruct"
    )


def test_misspelt_variable_suggests_nearest() -> None:
    environment = {"WARMLINE_PROT": "1", "WARMLINE_COLOUR": "red", "WARMLINE_PORT": "9", "PORT": "8", "WARMLINE_": ""}
    environment |= {"WARMLINE_body_budget_mb": "7", "warmline_port": "9"}
    ours = {"WARMLINE_PARENT_PIPE": "5", "WARMLINE_CLIENT_KEY": "k", "WARMLINE_HOME": "/h"}
    assert describe_misspelt_variables({**environment, **ours}) == [
        "WARMLINE_ is no setting and has no effect",
        "WARMLINE_COLOUR is no setting and has no effect",
        "WARMLINE_PROT is no setting and has no effect; did you mean WARMLINE_PORT?",
        "WARMLINE_body_budget_mb is no setting and has no effect; did you mean WARMLINE_BODY_BUDGET_MB?",
        "warmline_port is no setting and has no effect; did you mean WARMLINE_PORT?",
    ]


def test_backend_environment_limits_openblas_spinning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(openblas, "is_openblas_needed", lambda: True)
    monkeypatch.setattr(openblas, "find_library", lambda: Path("/x/libopenblas.so.0"))
    config = resolve_settings(tmp_path)
    environment = processes.backend_command(config, "m", {"OPENBLAS_NUM_THREADS": "1"}).environment
    assert environment["LD_PRELOAD"] == "/x/libopenblas.so.0"
    assert environment["OPENBLAS_THREAD_TIMEOUT"] == "20" and environment["OPENBLAS_NUM_THREADS"] == "1"
    theirs = processes.backend_command(config, "m", {"OPENBLAS_THREAD_TIMEOUT": "4"}).environment
    assert theirs["OPENBLAS_THREAD_TIMEOUT"] == "4"


def test_home_must_be_utf_8(tmp_path: Path) -> None:
    """For LMDB; anywhere else a path may have any bytes."""
    with pytest.raises(ConfigurationError, match="expected a directory whose path is UTF-8"):
        resolve({"home": f"{tmp_path}/{os.fsdecode(bytes([0xFF, 0xFE]))}"}, {})
    resolve({"home": f"{tmp_path}/h\u00e4user"}, {})
