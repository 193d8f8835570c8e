"""Resolution of `model` and `models` from the file, variables and flags, and back to flags of services."""

import json
from pathlib import Path

import pytest

from support.run.warmline_command import run_warmline
from warmline_common.settings.models import ModelConfig, parse_models
from warmline_common.settings.resolve import ConfigurationError, ResolvedConfig, resolve
from warmline_run.model_folders import check_model_folders
from warmline_run.services.service import make_processes, parse_arguments
from warmline_run.settings.effective import format_settings

TABLES = """
[[models]]
name = "large"
path = "/models/large"
aliases = ["big"]
pinned = true
kv_bits = 4

[[models]]
path = "org/small"
chat_template_args = {enable_thinking = false}
"""
JSON = '[{"path": "/models/other"}, {"path": "org/small"}]'


def resolve_models(
    home: Path, toml: str = "", environment: dict[str, str] | None = None, **flags: object
) -> ResolvedConfig:
    (home / "warmline.toml").write_text(toml)
    return resolve({"home": str(home), **flags}, environment or {})


def list_names(config: ResolvedConfig) -> list[str]:
    return [model.name for model in parse_models(str(config["models"]))]


def test_tables_are_models_in_their_order(tmp_path: Path) -> None:
    config = resolve_models(tmp_path, TABLES)
    assert parse_models(str(config["models"])) == [
        ModelConfig("large", "/models/large", ("big",), True, settings={"kv_bits": 4}),
        ModelConfig("small", "org/small", settings={"chat_template_args": '{"enable_thinking": false}'}),
    ]
    assert config["model"] == "/models/large"
    sources = {config.effective_settings[name].source for name in ("model", "models")}
    assert sources == {str(tmp_path / "warmline.toml")}


def test_variable_and_flag_replace_tables(tmp_path: Path) -> None:
    variable = resolve_models(tmp_path, TABLES, {"WARMLINE_MODELS": JSON})
    assert (list_names(variable), variable.effective_settings["models"].source) == (
        ["other", "small"],
        "WARMLINE_MODELS",
    )
    assert list_names(resolve_models(tmp_path, TABLES, {"WARMLINE_MODELS": JSON}, models='[{"path": "x"}]')) == ["x"]
    assert resolve_models(tmp_path, TABLES, models="[]")["models"] == "[]"


def test_repeated_flag_serves_each_model(tmp_path: Path) -> None:
    config = resolve_models(tmp_path, 'model = "/c"', {"WARMLINE_MODEL": "/d"}, model=["/models/a", "demo"])
    assert list_names(config) == ["a", "smollm2-135m-instruct"]
    assert (config["model"], config.effective_settings["model"].source) == ("/models/a", "--model")
    assert resolve_models(tmp_path, model=["/models/a"])["models"] == "[]", "given once, it is as ever"
    assert resolve_models(tmp_path, model=["/models/a"])["model"] == "/models/a"


def test_list_in_file_equals_repeated_flag(tmp_path: Path) -> None:
    config = resolve_models(tmp_path, 'model = ["/models/a", "org/b"]')
    assert (list_names(config), config["model"]) == (["a", "b"], "/models/a")
    assert list_names(resolve_models(tmp_path, 'model = ["/models/a", "org/b"]', model="b")) == ["b", "a"]
    assert resolve_models(tmp_path, 'model = ["/models/a"]')["models"] == "[]"


@pytest.mark.parametrize("layer", ["flag", "variable", "file"])
@pytest.mark.parametrize("name", ["large", "big", "small"])
def test_name_of_configured_model_makes_it_the_default(tmp_path: Path, layer: str, name: str) -> None:
    toml = f"model = '{name}'\n{TABLES}" if layer == "file" else TABLES
    environment = {"WARMLINE_MODEL": name} if layer == "variable" else {}
    config = resolve_models(tmp_path, toml, environment, **({"model": [name]} if layer == "flag" else {}))
    first, path = ("small", "org/small") if name == "small" else ("large", "/models/large")
    assert (list_names(config)[0], len(list_names(config)), config["model"]) == (first, 2, path)


def test_unknown_model_of_higher_layer_is_served_alone(tmp_path: Path) -> None:
    flag = resolve_models(tmp_path, TABLES, {"WARMLINE_MODELS": JSON}, model=["/x"])
    variable = resolve_models(tmp_path, TABLES, {"WARMLINE_MODEL": "/x"})
    for config, source in ((flag, "--model"), (variable, "WARMLINE_MODEL")):
        assert (config["model"], config["models"]) == ("/x", "[]")
        assert config.effective_settings["models"].source == source
    assert resolve_models(tmp_path, TABLES, model=["/x"], served_name="mine")["served_name"] == "mine"


def test_word_of_higher_layer_is_served_alone_where_it_can_be_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smal").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("smal", "demo", "org/smal"):
        config = resolve_models(tmp_path, TABLES, model=[name])
        assert (config["model"], config["models"]) == (name, "[]")


def test_one_folder_with_unlike_settings_is_two_models(tmp_path: Path) -> None:
    config = resolve_models(tmp_path, f"{TABLES}[[models]]\nname = 'precise'\npath = '/models/large'\nkv_bits = 8")
    assert list_names(config) == ["large", "small", "precise"]


def test_model_may_turn_off_quantization_of_all(tmp_path: Path) -> None:
    toml = "kv_bits = [8, 4]\nkv_boundary_layers = 2\nkv_boundary_bits = 8\nmodel = 'small'\n"
    tables = "[[models]]\npath = '/large'\nkv_bits = 0\n[[models]]\npath = 'org/small'\nkv_boundary_layers = 0\n"
    config = resolve_models(tmp_path, toml + tables)
    assert [model.settings for model in parse_models(str(config["models"]))] == [
        {"kv_boundary_layers": 0},
        {"kv_bits": 0},
    ]
    assert config["kv_bits"] == "8,4"


@pytest.mark.parametrize(
    ("toml", "environment", "flags", "message"),
    [
        (f"model = '/x'\n{TABLES}", {}, {}, "model .*toml.*: /x is none of .*: name the default, one of large, small"),
        (TABLES, {"WARMLINE_MODEL": "/x"}, {"models": JSON}, r"model \(from WARMLINE_MODEL\): /x is none of"),
        ("", {}, {"models": JSON, "model": ["/a", "/b"]}, "model .*--model.*: expected one model, the default's name"),
        (f"model = ['a', 'b']\n{TABLES}", {}, {}, "model .*toml.*: expected one model, the default's name"),
        (TABLES, {}, {"served_name": "mine"}, "served_name .*--served-name.*: mine can't name several models"),
        ("", {}, {"model": ["/a/x", "/b/x"]}, r"model \(from --model\): the name 'x' is given to two models, /a/x and"),
        ("", {}, {"model": ["/a/x", "/a/x/"]}, r"model .*: /a/x/ is given twice, .*: keep it once$"),
        (f"{TABLES}[[models]]\nname = 'b'\npath = '/models/large'\nkv_bits = '4'", {}, {},
         r"/models/large is given twice, with the same settings: keep it once as 'large', with aliases = \[\"b\"\]"),
        (f"{TABLES}[[models]]\nname = 'big'\npath = '/b'", {}, {},
         "the alias 'big' of 'large' is the name of another model, /b: remove it from `aliases` in the table of 'la"),
        (f"{TABLES}[[models]]\nname = 'b'\npath = '/b'\naliases = ['large']", {}, {},
         "the alias 'large' of 'b' is the name of another model, /models/large: remove it from .* in the table of 'b'"),
        (f"{TABLES}[[models]]\nname = 'b'\npath = '/b'\naliases = ['big']", {}, {},
         "the alias 'big' is given to two models, 'large' and 'b': remove it from `aliases` in the table of one of"),
        (TABLES, {}, {"model": ["smal"]},
         r"model \(from --model\): smal is none of .*: name the default, one of large, small, or give a folder or"),
        (TABLES, {"WARMLINE_MODEL": "smal"}, {}, r"model \(from WARMLINE_MODEL\): smal is none .* large, small, or"),
        ("", {}, {"model": ["/a", ""]}, r"model \(from --model\): model 2: path: expected a folder, .*, not ''"),
        ("model = []", {}, {}, "model .*expected text, not"),
        ("model = ['a', 2]", {}, {}, "models .*model 2: path: expected text, not 2"),
        (TABLES.replace("= 4", "= 7"), {}, {}, r"models .*: model 1 \(large\): kv_bits: expected 0, or 2, .*, not 7"),
        (f"{TABLES}kv_bits = '8,4'\nkv_boundary_layers = 2", {}, {},
         r"model 'small': kv_boundary_layers \(from .*toml\): expected kv_boundary_bits with it, such as 8 or .8,8.$"),
        (f"{TABLES}kv_boundary_bits = 8", {}, {},
         r"model 'small': kv_boundary_bits \(from .*toml\): expected kv_boundary_layers with it, a number .* 2$"),
        (f"{TABLES}port = 3", {}, {}, r"model 2: 'port' holds for all models: write it at the top of the file"),
        (f"{TABLES}kv_bit = 8", {}, {}, r"model 2: unknown key 'kv_bit'; did you mean 'kv_bits'\?"),
        ("[[models]]\nmodel = 'x'", {}, {}, r"model 1: unknown key 'model'; did you mean 'path'\?"),
        ("", {"WARMLINE_MODELS": "[{"}, {}, r"models \(from WARMLINE_MODELS\): expected tables \[\[models"),
        ("[models]\nlarge = 1", {}, {}, r"toml: \[models\] is one table; write \[\[models\]\], before each"),
        ("models = 3", {}, {}, r"expected tables \[\[models\]\], or a JSON list of objects, not 3"),
        ("[[model]]\npath = 'x'", {}, {}, r"unknown tables \[\[model\]\]; did you mean \[\[models\]\]\?"),
        ("[[modles]]\npath = 'x'", {}, {}, r"unknown tables \[\[modles\]\]; did you mean \[\[models\]\]\?"),
        ("[server]", {}, {}, r"in no table, as in port = 8026; only models and prompts to prewarm have tables"),
    ],
)  # fmt: skip
def test_bad_models_are_refused_in_one_line(
    tmp_path: Path, toml: str, environment: dict[str, str], flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        resolve_models(tmp_path, toml, environment, **flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({}, {}),
        ({}, {"model": ["small"]}),
        ({}, {"model": ["/x"]}),
        ({}, {"model": ["/models/a", "demo"]}),
        ({}, {"models": JSON}),
        ({"WARMLINE_MODELS": JSON}, {}),
        ({"WARMLINE_MODELS": JSON, "WARMLINE_MODEL": "small"}, {}),
        ({"WARMLINE_MODELS": JSON}, {"model": ["/x"]}),
        ({"WARMLINE_MODEL": "small"}, {}),
        ({"WARMLINE_MODEL": "/x"}, {"log_files": True}),
    ],
)
@pytest.mark.parametrize("top", ["", "model = 'small'"])
def test_services_resolve_the_same_models(
    tmp_path: Path, environment: dict[str, str], flags: dict[str, object], top: str
) -> None:
    config = resolve_models(tmp_path, f"{top}\n{TABLES}", environment, **{**flags, "log_files": True})
    for service in make_processes(config, environment):
        again = resolve(parse_arguments(service.arguments), {})
        assert dict(again) == dict(config)


def test_repeated_flag_is_parsed_as_list() -> None:
    assert parse_arguments(["--model", "a", "--port", "3", "--model", "b", "--model", "c"]) == {
        "model": ["a", "b", "c"],
        "port": "3",
    }


def test_services_get_absolute_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "adapter", "small"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    entries = [
        {"path": "a", "adapter_path": "adapter", "draft_model": "small"},
        {"path": "org/b", "draft_model": "org/c"},
    ]
    config = resolve_models(tmp_path, models=json.dumps(entries))
    again = resolve(parse_arguments(make_processes(config, {})[0].arguments), {})
    first, second = parse_models(str(again["models"]))
    assert (first.path, first.settings["adapter_path"]) == (str(tmp_path / "a"), str(tmp_path / "adapter"))
    assert first.settings["draft_model"] == str(tmp_path / "small")
    assert (second.path, second.settings["draft_model"]) == ("org/b", "org/c")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[[models]]\nname = 'x'\npath = 'a'", r"x \(from models, .*toml\): a depends on the current folder"),
        ("[[models]]\npath = '/b'\nadapter_path = 'a'", r"b: adapter_path \(from models, .*\): a depends on"),
        ("[[models]]\npath = '/b'\ndraft_model = 'a'", r"b: draft_model \(from models, .*\): a depends on"),
        ("model = ['/b', 'a']", r"a \(from models, .*toml\): a depends on the current folder; write it whole"),
    ],
)
def test_services_refuse_relative_folders_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str, message: str
) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        make_processes(resolve_models(tmp_path, toml), {})


def test_missing_folder_of_one_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").touch()
    toml = f"[[models]]\npath = '{tmp_path}/large'\n[[models]]\npath = 'org/small'"
    check_model_folders(resolve_models(tmp_path, toml))
    more = f"{toml}\n[[models]]\npath = '{tmp_path}/larg'"
    with pytest.raises(ConfigurationError, match=rf"models \(from .*toml\): larg: {tmp_path}/larg: there is no such"):
        check_model_folders(resolve_models(tmp_path, more))


def test_settings_table_lists_models(tmp_path: Path) -> None:
    lines = list(format_settings(resolve_models(tmp_path, TABLES, model=["small"]).effective_settings))
    assert lines[-3:] == [
        "\nmodels, the default first",
        '  small  org/small      chat_template_args = {"enable_thinking": false}',
        "  large  /models/large  pinned, also big, kv_bits = 4",
    ]
    (row,) = [line for line in lines if line.startswith("models ")]
    assert row.split() == ["models", "2,", "see", "below", str(tmp_path / "warmline.toml")]
    (row,) = [line for line in lines if line.startswith("model ")]
    assert row.split() == ["model", "small,", "the", "default", "--model"]


def test_config_command_takes_repeated_flag(tmp_path: Path) -> None:
    done = run_warmline("config", "--home", str(tmp_path), "--model", "/m/a", "--model", "org/b", "--json")
    shown = json.loads(done.stdout)
    assert shown["models"]["source"] == "--model"
    assert [model["path"] for model in json.loads(shown["models"]["value"])] == ["/m/a", "org/b"]
