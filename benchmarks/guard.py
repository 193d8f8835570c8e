"""How often the garbage guard is tripped by what nobody would call garbage.

Texts that are on every machine, and generated ones, are cut into answers of `--answer-tokens` tokens, and each is fed
to a guard of its own, token by token.  The demo model's tokenizer, which spells numbers digit by digit, stands for real
ones; bytes stand for the worst: a character a token.

Usage: .venv/bin/python benchmarks/guard.py [--answer-tokens N] [--tokens-max N]
"""

import argparse
import json
import random
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from warmline_backend import demo
from warmline_proxy.response.repetition import RepetitionDetector

HERE = Path(__file__).parents[1]
FILES_MAX = 2000
GENERATED = 300
Tokenize = Callable[[str], list[str]]


def load_tokenizer() -> Tokenize:
    """The demo model's."""
    _, facts = mx.load(str(demo.find_gguf_file()), return_metadata=True)
    with tempfile.TemporaryDirectory() as folder:
        demo._write_tokenizer(Path(folder), facts)
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).tokens)


def read_files(root: str | Path, *patterns: str) -> Iterator[str]:
    found = sorted(path for pattern in patterns for path in Path(root).rglob(pattern) if path.is_file())
    for path in found[:FILES_MAX]:
        yield path.read_text(errors="replace")


def read_python_sources() -> Iterator[str]:
    yield from read_files(sysconfig.get_path("stdlib"), "*.py")


def read_c_headers() -> Iterator[str]:
    yield from read_files(sysconfig.get_path("include"), "*.h")


def read_prose() -> Iterator[str]:
    yield from read_files(HERE / "docs", "*.md")
    yield from (path.read_text() for path in sorted(HERE.glob("*.md")))
    yield from read_files(sysconfig.get_path("purelib"), "*.md", "*.rst", "METADATA", "LICENSE*")


def make_corpus(make: Callable[[random.Random], str]) -> Callable[[], Iterator[str]]:
    return lambda: (make(random.Random(seed)) for seed in range(GENERATED))


def make_words(chance: random.Random, count: int) -> str:
    return " ".join("".join(chance.choices("etaoinshrdlucm", k=chance.randint(2, 9))) for _ in range(count))


def make_record(chance: random.Random) -> dict[str, object]:
    return {
        "id": chance.randrange(10**9),
        "name": make_words(chance, 2),
        "active": chance.random() < 0.5,
        "score": round(chance.random() * 100, 3),
        "counts": [0] * 8 + [chance.randrange(3) for _ in range(4)],
        "note": None if chance.random() < 0.5 else make_words(chance, 6),
        "tags": [make_words(chance, 1) for _ in range(chance.randrange(4))],
    }


def make_json(chance: random.Random) -> str:
    return json.dumps([make_record(chance) for _ in range(20)], indent=chance.choice([None, 2]))


def make_csv(chance: random.Random) -> str:
    """Mostly zeros, as counts and sparse measurements are."""
    rows = (
        ",".join("0" if chance.random() < 0.8 else f"{chance.random() * 50:.2f}" for _ in range(12)) for _ in range(60)
    )
    return "\n".join(["date," + ",".join(f"column{n}" for n in range(11)), *rows])


def make_markdown_table(chance: random.Random) -> str:
    columns = chance.randint(3, 12)
    lines = ["| " + " | ".join(make_words(chance, 1) for _ in range(columns)) + " |", "|" + "---|" * columns]
    lines += ["| " + " | ".join(str(chance.randrange(100)) for _ in range(columns)) + " |" for _ in range(40)]
    return "\n".join(lines)


def make_boxed_table(chance: random.Random) -> str:
    """As databases and terminals draw them: rulers up to 80 characters wide."""
    widths = [chance.randint(4, 18) for _ in range(4)]
    ruler = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
    rows = ("| " + " | ".join(make_words(chance, 1)[:width].ljust(width) for width in widths) + " |" for _ in range(25))
    return "\n".join([ruler, *rows, ruler])


def make_ruled_report(chance: random.Random) -> str:
    """Headings between full-width rulers, as in plain-text reports."""
    return "\n".join(
        f"{chance.choice('-=*#') * 78}\n{make_words(chance, 4)}\n\n{make_words(chance, 60)}" for _ in range(8)
    )


def make_hex_dump(chance: random.Random) -> str:
    return "\n".join(chance.randbytes(16).hex(" ") for _ in range(60))


def make_matrix(chance: random.Random) -> str:
    """A sparse matrix, forty columns of zeros in a row of it."""
    rows = [["0"] * 40 for _ in range(20)]
    for _ in range(12):
        rows[chance.randrange(20)][chance.randrange(40)] = "1"
    return "[[" + "],\n [".join(", ".join(row) for row in rows) + "]]"


def make_long_numbers(chance: random.Random) -> str:
    """What big integers look like: 300 digits each."""
    return "\n".join(f"n = {chance.randrange(10**299, 10**300)}" for _ in range(6))


CORPORA: dict[str, Callable[[], Iterator[str]]] = {
    "Python's standard library": read_python_sources,
    "C headers": read_c_headers,
    "prose: documentation, licences": read_prose,
    "JSON": make_corpus(make_json),
    "CSV, mostly zeros": make_corpus(make_csv),
    "Markdown tables": make_corpus(make_markdown_table),
    "boxed tables": make_corpus(make_boxed_table),
    "hex dumps": make_corpus(make_hex_dump),
    "reports with rulers of 78 characters": make_corpus(make_ruled_report),
    "matrices of 40 columns of zeros": make_corpus(make_matrix),
    "integers of 300 digits": make_corpus(make_long_numbers),
}


def measure_corpus(
    corpus: Iterator[str], tokenize: Tokenize, answer_tokens: int, tokens_max: int
) -> tuple[int, int, Counter[str]]:
    """How many tokens and answers there were, and why how many of these tripped a guard."""
    tokens, answers, reasons = 0, 0, Counter[str]()
    for text in corpus:
        pieces = tokenize(text)
        for start in range(0, len(pieces), answer_tokens):
            guard = RepetitionDetector()
            for piece in pieces[start : start + answer_tokens]:
                guard.feed(piece)
            answers += 1
            if guard.reason:
                reasons[parse_kind(guard.reason)] += 1
        tokens += len(pieces)
        if tokens >= tokens_max:
            break
    return tokens, answers, reasons


def parse_kind(reason: str) -> str:
    return next(kind for kind in ("one token", "cycle", "digits") if kind in reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer-tokens", type=int, default=1000)
    parser.add_argument("--tokens-max", type=int, default=3_000_000, help="of each corpus")
    flags = parser.parse_args()
    for name, split in {"the demo model's tokens": load_tokenizer(), "a token a character": list}.items():
        table = Table("corpus", "tokens", "answers", "tripped", "one token", "cycle", "digits", title=name)
        for corpus, texts in CORPORA.items():
            tokens, answers, reasons = measure_corpus(texts(), split, flags.answer_tokens, flags.tokens_max)
            share = f"{reasons.total() / answers:.2%}"
            counts = [str(reasons[kind]) for kind in ("one token", "cycle", "digits")]
            table.add_row(corpus, f"{tokens:,}", f"{answers:,}", share, *counts)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
