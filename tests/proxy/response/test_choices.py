"""Split of a body for several choices, and merge of their chunks."""

import json
from typing import Any

import msgspec
import pytest

from warmline_proxy.errors import ClientError
from warmline_proxy.response.choices import CHOICES_MAX, PROMPTS_MAX, ChoiceMerger, ChoiceRequest, split_choices

INT64_MAX = (1 << 63) - 1


def make_raw_fields(**body: Any) -> dict[str, Any]:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


def split_body(endpoint: str, **body: Any) -> list[tuple[int, int, dict[str, Any]]]:
    choices = split_choices(endpoint, make_raw_fields(**body))
    return [(each.prompt_index, each.sample_index, json.loads(msgspec.json.encode(each.fields))) for each in choices]


def test_n_gives_choices_with_consecutive_seeds() -> None:
    assert split_body("chat", messages=[], n=3, seed=7) == [
        (0, 0, {"messages": [], "seed": 7}),
        (0, 1, {"messages": [], "seed": 8}),
        (0, 2, {"messages": [], "seed": 9}),
    ]
    assert split_body("chat", n=2) == [(0, 0, {}), (0, 1, {})], "no seed given"
    assert split_body("chat", n=2.0, seed=7.0)[1][2] == {"seed": 8}
    assert split_body("chat", n=2, seed=-1)[1][2] == {"seed": -1}, "a random one"
    assert split_body("chat", n=2, seed=INT64_MAX)[1][2] == {"seed": -INT64_MAX - 1}
    assert split_body("chat", n=2, seed="x")[1][2] == {"seed": "x"}, "refused by the backend"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
        ([1, 2, 3], [[1, 2, 3]]),
        (["a"], [["a"]]),  # unchanged: accepted by the backend
        ([], [[]]),
        ('["a", "b"]', ['["a", "b"]']),
        (5, [5]),
    ],
)
def test_prompts_are_split(prompt: Any, prompts: list[Any]) -> None:
    assert [body["prompt"] for _, _, body in split_body("completion", prompt=prompt)] == prompts


def test_each_prompt_has_n_choices() -> None:
    got = split_body("completion", prompt=["a", "b"], n=2, best_of=2, seed=1)
    assert [(prompt, number, body["prompt"], body["seed"]) for prompt, number, body in got] == [
        (0, 0, "a", 1),
        (0, 1, "a", 2),
        (1, 0, "b", 1),
        (1, 1, "b", 2),
    ]
    assert all("n" not in body and "best_of" not in body for _, _, body in got)
    assert len(split_body("chat", prompt=["a", "b"])) == 1, "not a field of chat"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        *(({"n": n}, "n", f"from 1 to {CHOICES_MAX}") for n in (0, -1, CHOICES_MAX + 1, 2.5, "2", True)),
        ({"best_of": 3}, "best_of", "leave it out"),
        ({"n": 2, "best_of": 3}, "best_of", "leave it out"),
        ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt", f"at most {PROMPTS_MAX}"),
    ],
)
def test_invalid_n_best_of_and_prompts_return_400(body: dict[str, Any], param: str, words: str) -> None:
    for endpoint in ("completion",) if "prompt" in body else ("chat", "completion"):
        with pytest.raises(ClientError) as refused:
            split_choices(endpoint, make_raw_fields(**body))
    error = json.loads(refused.value.body)["error"]
    assert refused.value.status == 400 and error["param"] == param and words in error["message"]


def make_chunk(part: str, *choices: dict[str, Any], **more: Any) -> dict[str, msgspec.Raw]:
    return make_raw_fields(id=f"chatcmpl-{part}", created=int(part[-1]), model="m", choices=list(choices), **more)


def make_plain_chunk(chunk: Any) -> Any:
    return json.loads(msgspec.json.encode(chunk))


def make_usage_chunk(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_merged_chunks_have_one_id_indices_and_total_usage() -> None:
    choices = [ChoiceRequest({}, 0, 0), ChoiceRequest({}, 0, 1), ChoiceRequest({}, 1, 0)]
    merger = ChoiceMerger("abc", choices)
    merged = merger.merge_chunk(1, "abc.1", make_chunk("abc.1", {"index": 0, "delta": {"content": "x"}}, usage=None))
    assert make_plain_chunk(merged) == {
        "id": "chatcmpl-abc",
        "created": 1,
        "model": "m",
        "choices": [{"index": 1, "delta": {"content": "x"}}],
        "usage": None,
    }
    later = make_plain_chunk(merger.merge_chunk(2, "abc.2", make_chunk("abc.2", {"index": 0, "delta": {}})))
    assert (later["id"], later["created"], later["choices"][0]["index"]) == ("chatcmpl-abc", 1, 2)
    assert merger.merge_chunk(0, "abc.0", make_chunk("abc.0", usage=make_usage_chunk(10, 3, 4))) is None
    assert merger.merge_chunk(1, "abc.1", make_chunk("abc.1", usage=make_usage_chunk(10, 4, 9))) is None
    assert merger.merge_chunk(2, "abc.2", make_chunk("abc.2", usage=make_usage_chunk(20, 5, 0))) is None
    total = make_plain_chunk(merger.build_usage_chunk())
    assert total["choices"] == [] and total["id"] == "chatcmpl-abc"
    assert total["usage"] == {**make_usage_chunk(30, 12, 4), "completion_tokens_details": {"reasoning_tokens": 3}}
