"""Parameters: parsed values, defaults, and refusals with their messages."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmline_backend.request.params import TOKENS_UNBOUNDED, BadRequestError, GenerationParams, parse_params

VOCABULARY = 1000


def parse_body(
    endpoint: str = "chat", *, context: int = 100, prompt: int = 10, default: int = 0, **body: Any
) -> GenerationParams:
    return parse_params(
        endpoint,
        body,
        context_tokens_max=context,
        prompt_tokens=prompt,
        vocabulary_size=VOCABULARY,
        default_max_tokens=default,
    )


def catch_refusal(endpoint: str = "chat", **body: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse_body(endpoint, **body)
    assert caught.value.status == 400
    return caught.value


def test_empty_body_is_greedy_up_to_context() -> None:
    assert parse_body() == GenerationParams(max_tokens=90)
    assert parse_body().is_greedy


NULLS = [
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_context_size", "logprobs", "n"),
    *("top_logprobs", "stream", "stream_options", "ignore_eos", "response_format", "tool_choice", "functions"),
    *("best_of", "echo", "suffix", "min_tokens", "stop_token_ids", "allowed_token_ids"),
]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_null_means_absent(endpoint: str) -> None:
    assert parse_body(endpoint, **dict.fromkeys(NULLS)) == parse_body(endpoint)


def test_unknown_fields_are_ignored() -> None:
    assert parse_body(user="me", metadata={"a": 1}, reasoning_effort="high") == parse_body()


def test_all_fields_are_parsed() -> None:
    params = parse_body(
        temperature=1,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-7,
        stop=["a", "b"],
        stop_token_ids=[7, 0],
        min_tokens=3,
        allowed_token_ids=[5, 999],
        presence_penalty=1.5,
        frequency_penalty=-2,
        repetition_penalty=1.1,
        repetition_context_size=64,
        logit_bias={"5": 3, "999": -100},
        logprobs=True,
        top_logprobs=5,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
        max_tokens=7,
    )
    assert params == GenerationParams(
        temperature=1.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-7,
        stop=("a", "b"),
        stop_token_ids=(7, 0),
        min_tokens=3,
        allowed_token_ids=(5, 999),
        presence_penalty=1.5,
        frequency_penalty=-2.0,
        repetition_penalty=1.1,
        repetition_context_size=64,
        logit_bias={5: 3.0, 999: -100.0},
        logprobs=True,
        top_logprobs=5,
        stream=True,
        include_usage=True,
        ignore_eos=True,
        max_tokens=7,
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 91}, 90),  # a limit beyond the context is cut to it
        ({"max_tokens": 10**30}, 90),
        ({"max_tokens": 1e30}, 90),
        ({"max_tokens": 4.0}, 4),
        ({"max_tokens": -1}, 90),  # llama.cpp's for no limit
        ({"max_tokens": -1.0}, 90),
        ({"max_tokens": 5, "max_completion_tokens": -1}, 90),
        ({"max_tokens": -1, "min_tokens": 5}, 90),
    ],
)
def test_max_tokens(body: dict[str, Any], expected: int) -> None:
    assert parse_body(**body).max_tokens == expected


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    assert parse_body(min_tokens=90).min_tokens == 90
    assert parse_body(min_tokens=500).min_tokens == 90, "what the context leaves"
    assert parse_body(min_tokens=5, max_tokens=5).min_tokens == 5
    for name in ("max_tokens", "max_completion_tokens"):
        error = catch_refusal(min_tokens=6, **{name: 5})
        assert error.param == "min_tokens" and f"more than '{name}', 5" in error.message


def test_completions_have_sixteen_tokens_by_default() -> None:
    assert parse_body("completion").max_tokens == parse_body("completion", max_tokens=None).max_tokens == 16
    assert parse_body("completion", prompt=95).max_tokens == 5
    assert parse_body("completion", default=20).max_tokens == 20, "the owner's default goes first"
    assert parse_body("completion", max_tokens=30).max_tokens == 30
    assert parse_body("completion", max_tokens=-1).max_tokens == 90
    assert parse_body("completion", echo=True, max_tokens=0).max_tokens == 0
    assert parse_body("completion", min_tokens=16).min_tokens == 16
    assert "more than 'max_tokens', 16" in catch_refusal("completion", min_tokens=17).message


INTEGERS = ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "repetition_context_size", "n")


def test_floats_without_a_fraction_are_integers() -> None:
    for name in INTEGERS:
        assert parse_body(**{name: 1.0}) == parse_body(**{name: 1}), name
        assert type(getattr(parse_body(**{name: 1.0}), name, 1)) is int, name
        assert "integer" in catch_refusal(**{name: 20.5}).message, name
    assert parse_body(logprobs=True, top_logprobs=4.0).top_logprobs == 4
    assert parse_body("completion", logprobs=4.0).top_logprobs == 4
    assert parse_body(stop_token_ids=[7.0], allowed_token_ids=[5.0]) == parse_body(
        stop_token_ids=[7], allowed_token_ids=[5]
    )


def test_seed_of_minus_one_is_random() -> None:
    assert parse_body(seed=-1).seed is parse_body(seed=-1.0).seed is None
    assert parse_body(seed=-2).seed == -2


def test_biases_may_be_pairs() -> None:
    assert parse_body(logit_bias=[]).logit_bias == {}
    assert parse_body(logit_bias=[[5, 3], [7.0, False], [999, -1.5]]).logit_bias == {5: 3.0, 7: -100.0, 999: -1.5}
    for wrong in (
        [5],
        [[5]],
        [["a", 1]],
        [[1000, 1]],
        [[-1, 1]],
        [[5, True]],
        [[5, "x"]],
        [[5, 101]],
        [[True, 1]],
        [{}],
    ):
        assert catch_refusal(logit_bias=wrong).param in ("logit_bias", "logit_bias.5"), wrong


def test_default_max_tokens() -> None:
    assert parse_body(default=20).max_tokens == 20
    assert parse_body(default=20, max_tokens=30).max_tokens == 30
    assert parse_body(default=20, prompt=95).max_tokens == 5


def test_default_sampling() -> None:
    def sampling(**body: Any) -> tuple[float, float]:
        params = parse_params(
            "chat",
            body,
            context_tokens_max=100,
            prompt_tokens=10,
            vocabulary_size=300,
            default_temperature=0.7,
            default_top_p=0.9,
        )
        return params.temperature, params.top_p

    assert sampling() == (0.7, 0.9)
    assert sampling(temperature=None, top_p=None) == (0.7, 0.9)
    assert sampling(temperature=0) == (0.0, 0.9)
    assert sampling(temperature=1.2, top_p=1) == (1.2, 1.0)
    assert parse_body(context=0).max_tokens == TOKENS_UNBOUNDED


@pytest.mark.parametrize("prompt", [100, 101, 5000])
def test_context_overflow_names_token_counts(prompt: int) -> None:
    error = catch_refusal(prompt=prompt, messages=[])
    assert error.code == "context_length_exceeded" and error.param == "messages"
    assert "maximum context length is 100 tokens" in error.message and f"{prompt} tokens" in error.message


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -2, 1.5, "5", True, [], {}])
def test_max_tokens_must_be_positive_integers(name: str, value: object) -> None:
    error = catch_refusal(**{name: value})
    assert error.param == name and name in error.message and "an integer of at least 1" in error.message


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("temperature", [-0.1, "1", True, [], float("nan"), float("inf"), 10**400]),
        ("top_p", [-0.1, 1.1, "0.5", True, float("nan")]),
        ("min_p", [-0.1, 1.1, {}, False]),
        ("top_k", [-2, 1.5, "5", True]),
        ("seed", [1.5, "x", True, 1 << 64]),
        ("presence_penalty", [2.1, -2.1, "1", True]),
        ("frequency_penalty", [2.1, -2.1, "1", True]),
        ("repetition_penalty", [-1, "1", True]),
        ("repetition_context_size", [0, -1, True]),
        (
            "logit_bias",
            ["x", {"5": 101}, {"5": "x"}, {"5": True}, {"1000": 1}, {"-1": 1}, {"x": 1}, {"²": 1}, {"": 1}],
        ),
        ("stop_token_ids", [5, "5", [-1], [1000], [1.5], ["5"], [True], [1] * 257, {}]),
        ("allowed_token_ids", [5, [], [-1], [1000], [True], {}]),
        ("min_tokens", [-1, 1.5, "5", True]),
        ("use_beam_search", [True]),
        ("stop", [5, [5], [""], "", ["a", None], {}, True, ["x"] * 17]),
        ("logprobs", [1, "yes", {}]),
        ("top_logprobs", [-1, 21, True, 1.5, 5]),  # 5 without logprobs
        ("n", [0, 2, "1", True]),
        ("stream", [1, "true", {}]),
        ("stream_options", [True, [], {"include_usage": 1}]),
        ("ignore_eos", [1, "no"]),
        ("tool_choice", ["any", 1, {}, {"type": "custom"}, {"type": "allowed_tools"}]),
        ("tool_choice", [{"type": "allowed_tools", "allowed_tools": {"mode": "none"}}]),
        ("parallel_tool_calls", [0, "yes", []]),
        ("functions", [[{"name": "f"}]]),
    ],
)
def test_wrong_values_name_field(name: str, wrong: list[object]) -> None:
    for value in wrong:
        error = catch_refusal(**{name: value})
        assert error.param is not None and error.param.split(".")[0] == name, value
        assert f"'{name}" in error.message, (value, error.message)
        assert len(error.message) < 300


@pytest.mark.parametrize("name", ["logprobs", "best_of", "echo", "suffix"])
@pytest.mark.parametrize("value", ["x", -1])
def test_completion_fields(name: str, value: object) -> None:
    if (name, value) != ("suffix", -1):
        assert catch_refusal("completion", **{name: value}).param == name


def test_completion_logprobs_are_a_count() -> None:
    params = parse_body("completion", logprobs=3)
    assert (params.logprobs, params.top_logprobs) == (True, 3)
    assert (parse_body("completion", logprobs=0).logprobs, parse_body("completion").logprobs) == (True, False)


@pytest.mark.parametrize(
    "body",
    [
        {"top_k": VOCABULARY},
        {"top_k": 10**9},
        {"top_k": -1},
        {"top_k": 0},
        {"stream_options": {}},
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"parallel_tool_calls": False},
        {"n": 1},
        {"stop": []},
        {"stop_token_ids": []},
        {"best_of": 1},
        {"use_beam_search": False, "extra_body": {}, "bad_words": [], "prompt_logprobs": None},
        {"repetition_penalty": 0},
        {"tools": [{"type": "function"}]},
        {"functions": []},
        {"logit_bias": {}},
        {"top_p": 0},
        {"seed": 0},
        {"temperature": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"logprobs": True},
    ],
)
def test_unusual_values_are_accepted(body: dict[str, Any]) -> None:
    assert parse_body(**body).max_tokens == 90


def test_greedy_settings() -> None:
    assert (
        parse_body(temperature=1, top_p=0).is_greedy
        and parse_body(temperature=1, top_k=1).is_greedy
        and parse_body(temperature=1e-9).is_greedy
    )
    assert not parse_body(temperature=0.5).is_greedy


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_body_must_be_object(body: object) -> None:
    with pytest.raises(BadRequestError, match="must be a JSON object"):
        parse_params("chat", body, context_tokens_max=0, prompt_tokens=1, vocabulary_size=5)


def test_refusal_is_openai_error_object() -> None:
    assert json.loads(catch_refusal(stop=[5]).encode_reply()) == {
        "error": {
            "message": "'stop' must be a string or a list of up to 16 strings, none empty, not an array",
            "type": "invalid_request_error",
            "param": "stop",
            "code": None,
        }
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["chat", "completion"]), st.dictionaries(st.sampled_from(NULLS), JSON))
def test_any_json_is_parsed_or_refused(endpoint: str, body: dict[str, Any]) -> None:
    try:
        params = parse_body(endpoint, **body)
    except BadRequestError as error:
        assert json.loads(error.encode_reply())["error"]["message"]
    else:
        assert 1 <= params.max_tokens <= 90
