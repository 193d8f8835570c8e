"""Tool calls of each family: a tokenizer with its markers, and two calls as it writes them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from support.backend.small_tokenizers import make_marked_tokenizer


def make_tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


WEATHER = make_tool("get_weather", city={"type": "string"}, days={"type": "integer"}, zip={"type": "string"})
RUN = make_tool(
    "run",
    command={"type": "string"},
    flags={"type": "array", "items": {"type": "string"}},
    env={"type": "object"},
    dry={"type": "boolean"},
    limit={"type": ["number", "null"]},
)
NOW = make_tool("now")
TOOLS = [WEATHER, RUN, NOW]
COMMAND = 'grep -c "<b>" a.txt &&\n  echo \'{"a": 1}\''
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "São Paulo", "days": 3, "zip": "01310"}),
    ("run", {"command": COMMAND, "flags": ["-l", "a b"], "env": {"A": "1"}, "dry": True, "limit": None}),
]
_JSON_COMMAND = r'"grep -c \"<b>\" a.txt &&\n  echo ' + r"'{\"a\": 1}'" + '"'
_WEATHER_JSON = '{"city": "São Paulo", "days": 3, "zip": "01310"}'
_RUN_JSON = f'{{"command": {_JSON_COMMAND}, "flags": ["-l", "a b"], "env": {{"A": "1"}}, "dry": true, "limit": null}}'


@dataclass(frozen=True)
class Family:
    name: str  # of the format
    template: str  # what of its template tells it
    markers: tuple[str, ...]  # special tokens
    calls: str  # CALLS as it writes them
    think: tuple[str, str] = ("", "")
    one_call: str = ""  # where it writes no more than one: CALLS[1]

    def tokenizer(self, folder: Path) -> TokenizerWrapper:
        return _make_tokenizer(self, folder)

    def __str__(self) -> str:
        return self.name


@cache
def _make_tokenizer(family: Family, folder: Path) -> TokenizerWrapper:
    think = tuple(marker for marker in family.think if marker)
    return make_marked_tokenizer(
        folder / family.name, [*family.markers, *think], "{% if tools %}" + family.template + "{% endif %}"
    )


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _qwen(name: str, **values: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def _glm(name: str, prefix: str = "", **values: str) -> str:
    tags = (f"<{prefix}arg_key>", f"</{prefix}arg_key>", f"<{prefix}arg_value>", f"</{prefix}arg_value>")
    lines = "".join(f"{tags[0]}{key}{tags[1]}\n{tags[2]}{value}{tags[3]}\n" for key, value in values.items())
    return f"<{prefix}tool_call>{name}\n{lines}</{prefix}tool_call>"


def _invoke(name: str, prefix: str = "", **values: str) -> str:
    lines = "".join(f'<{prefix}parameter name="{k}">{v}</{prefix}parameter>\n' for k, v in values.items())
    return f'<{prefix}invoke name="{name}">\n{lines}</{prefix}invoke>\n'


def _dsml(name: str, strings: tuple[str, ...], **values: str) -> str:
    bar = "｜DSML｜"  # noqa: RUF001
    lines = "".join(
        f'<{bar}parameter name="{k}" string="{str(k in strings).lower()}">{v}</{bar}parameter>\n'
        for k, v in values.items()
    )
    return f'<{bar}invoke name="{name}">\n{lines}</{bar}invoke>\n'


def _minicpm(name: str, **values: str) -> str:
    params = "".join(
        f'<param name="{k}">{f"<![CDATA[{v}]]>" if set(v) & set("<&" + chr(10)) else v}</param>'
        for k, v in values.items()
    )
    return f'<function name="{name}">{params}</function>'


def _kimi2(number: int, name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _kimi3(name: str, **values: tuple[str, str]) -> str:
    arguments = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, (kind, value) in values.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'


def _deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"  # noqa: RUF001


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001
_DEEPSEEK_INNER = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")  # noqa: RUF001
_WEATHER = {"city": "São Paulo", "days": "3", "zip": "01310"}
_RUN = {"command": COMMAND, "flags": '["-l", "a b"]', "env": '{"A": "1"}', "dry": "true", "limit": "null"}
_THINK = ("<think>", "</think>")
_PYTHON_COMMAND = r"""'grep -c "<b>" a.txt &&\n  echo \'{"a": 1}\''"""
_Q = '<|"|>'

FAMILIES = [
    Family(
        "json_tools",
        "<tool_call> tool_call.name",
        ("<tool_call>", "</tool_call>"),
        _hermes("get_weather", _WEATHER_JSON) + "\n" + _hermes("run", _RUN_JSON),
        _THINK,
    ),
    Family(
        "qwen3_coder",
        "<tool_call>\n<function=",
        ("<tool_call>", "</tool_call>"),
        _qwen("get_weather", **_WEATHER) + "\n" + _qwen("run", **_RUN),
        _THINK,
    ),
    Family(
        "glm47",
        "<arg_key>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        _glm("get_weather", **_WEATHER) + "\n" + _glm("run", **_RUN),
        _THINK,
    ),
    Family(
        "longcat",
        "<longcat_tool_call>",
        ("<longcat_tool_call>", "</longcat_tool_call>"),
        _glm("get_weather", "longcat_", **_WEATHER) + "\n" + _glm("run", "longcat_", **_RUN),
        ("<longcat_think>", "</longcat_think>"),
    ),
    Family(
        "minimax_m2",
        "<minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        f"<minimax:tool_call>\n{_invoke('get_weather', **_WEATHER)}{_invoke('run', **_RUN)}</minimax:tool_call>",
        _THINK,
    ),
    Family(
        "deepseek_v32",
        "｜DSML｜",  # noqa: RUF001
        ("｜DSML｜",),  # noqa: RUF001
        "<｜DSML｜function_calls>\n"  # noqa: RUF001
        + _dsml("get_weather", ("city", "zip"), **_WEATHER)
        + _dsml("run", ("command",), **_RUN)
        + "</｜DSML｜function_calls>",  # noqa: RUF001
        _THINK,
    ),
    Family(
        "deepseek_v3",
        _DEEPSEEK[0],
        (*_DEEPSEEK, *_DEEPSEEK_INNER),
        _DEEPSEEK[0] + _deepseek("get_weather", _WEATHER_JSON) + _deepseek("run", _RUN_JSON) + _DEEPSEEK[1],
        _THINK,
    ),
    Family(
        "minicpm5",
        '<function name="<param name="',
        (),
        _minicpm("get_weather", **_WEATHER) + "\n" + _minicpm("run", **_RUN),
        _THINK,
    ),
    Family(
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        "<|tool_calls_section_begin|>"
        + _kimi2(0, "get_weather", _WEATHER_JSON)
        + _kimi2(1, "run", _RUN_JSON)
        + "<|tool_calls_section_end|>",
        _THINK,
    ),
    Family(
        "kimi_k3",
        "<|open|>",
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        "<|open|>tools<|sep|>"
        + _kimi3("get_weather", city=("string", "São Paulo"), days=("number", "3"), zip=("string", "01310"))
        + _kimi3(
            "run",
            command=("string", COMMAND),
            flags=("array", _RUN["flags"]),
            env=("object", _RUN["env"]),
            dry=("boolean", "true"),
            limit=("null", "null"),
        )
        + "<|close|>tools<|sep|>",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    Family(
        "mistral",
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        f"[TOOL_CALLS]get_weather[ARGS]{_WEATHER_JSON}[TOOL_CALLS]run[ARGS]{_RUN_JSON}",
        ("[THINK]", "[/THINK]"),
    ),
    Family(
        "pythonic",
        "<|tool_list_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[get_weather(city="São Paulo", days=3, zip="01310"), '
        f"run(command={_PYTHON_COMMAND}, flags=['-l', 'a b'], "
        'env={"A": "1"}, dry=True, limit=None)]<|tool_call_end|>',
        _THINK,
    ),
    Family(
        "gemma4",
        "<|tool_call><tool_call|>",
        ("<|tool_call>", "<tool_call|>", _Q, "<|channel>", "<channel|>"),
        f"<|tool_call>call:get_weather{{city:{_Q}São Paulo{_Q},days:3,zip:{_Q}01310{_Q}}}<tool_call|>"
        f"<|tool_call>call:run{{command:{_Q}{COMMAND}{_Q},flags:[{_Q}-l{_Q},{_Q}a b{_Q}],"
        f"env:{{A:{_Q}1{_Q}}},dry:true,limit:null}}<tool_call|>",
        ("<|channel>thought", "<channel|>"),
    ),
    Family(
        "llama3",
        '<|python_tag|> "parameters"',
        ("<|python_tag|>", "<|eom_id|>"),
        f'{{"name": "get_weather", "parameters": {_WEATHER_JSON}}}; {{"name": "run", "parameters": {_RUN_JSON}}}',
    ),
    Family(
        "seed_oss",
        "<seed:tool_call>",
        ("<seed:tool_call>", "</seed:tool_call>"),
        (_qwen("get_weather", **_WEATHER) + "\n" + _qwen("run", **_RUN))
        .replace("<tool_call>", "<seed:tool_call>")
        .replace("</tool_call>", "</seed:tool_call>"),
        ("<seed:think>", "</seed:think>"),
    ),
    Family(
        "command_a",
        "<|START_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{_WEATHER_JSON}}},\n    {{"tool_call_id": "1", "tool_name": "run", "parameters": {_RUN_JSON}}}\n]'
        "<|END_ACTION|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Family(
        "phi4",
        "<|tool_call|><|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}, '
        f'{{"name": "run", "arguments": {_RUN_JSON}}}]<|/tool_call|>',
    ),
    Family(
        "granite",
        "<|tool_call|>",
        ("<|tool_call|>",),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {_WEATHER_JSON}}}, '
        f'{{"name": "run", "arguments": {_RUN_JSON}}}]',
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
HARMONY = Family(
    "harmony", "", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"), ""
)
