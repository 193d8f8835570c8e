"""Trains the model of this folder and writes its tokenizer and weights here; README.md says how long it takes.

Usage: python tests/support/agent_model/train.py [--steps N] [--batch N] [--out FOLDER]
"""

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.muse_glimmer import Model, ModelArgs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from support.agent_model.agent_dialogues import Dialogues, Piece  # noqa: E402
from support.agent_model.agent_folder import CONFIG, TOKENIZER, VOCABULARY, WEIGHTS, pack_weights, unpack_weights  # noqa: E402
from support.agent_model.agent_template import SPECIAL_TOKENS  # noqa: E402

LENGTH = 512  # tokens of a training sequence
RATE, RATE_END = 3e-3, 5e-5
SEED = 1
ROPED_PAIRS = 8
# Words keep the space before them, except after a colon, where a copied text may begin; digits and signs stand alone.
SPLIT = r"(?<=:) | ?[A-Za-z]+|[0-9]|\n|[ \t]+|[^\sA-Za-z0-9]|\s+"


def read_documents() -> list[str]:
    """English and JSON to make the tokenizer and the noise from: this project's own documentation."""
    root = HERE.parents[2]
    files = [root / "README.md", root / "ARCHITECTURE.md", *sorted((root / "docs").glob("*.md"))]
    return [file.read_text() for file in files]


def make_corpus() -> list[str]:
    examples = Dialogues(["some", "word"], SEED)
    return [*read_documents(), *(text for _ in range(300) for text, _ in examples.make_exchange())]


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=text.startswith("<|")) for text in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def list_words(texts: list[str]) -> list[str]:
    return sorted({word for text in texts for word in text.split() if re.fullmatch(r"[!#-;=?-\[\]-~]+", word)})


def make_model() -> Model:
    """Make a random model, except for heads that look one, two and three tokens back, so copying is learned soon."""
    model = Model(ModelArgs.from_dict(CONFIG))
    embedding = mx.random.normal(model.model.embed_tokens.weight.shape) * 0.5
    embedding[:, 0] = 1.0  # the same for all tokens, for these heads to see
    model.model.embed_tokens.weight = embedding
    attention, size = model.layers[0].self_attn, CONFIG["head_dim"]
    assert isinstance(size, int)
    angles = 1e4 ** (-mx.arange(ROPED_PAIRS) * 2 / size)
    for head in range(3):
        for matrix, shift in ((attention.q_proj, head + 1), (attention.k_proj, 0)):
            weight = mx.random.normal((size, matrix.weight.shape[1])) * 0.02
            weight[:ROPED_PAIRS, 0] = mx.cos(angles * shift)
            weight[size // 2 : size // 2 + ROPED_PAIRS, 0] = -mx.sin(angles * shift)
            matrix.weight[head * size : (head + 1) * size] = weight
    mx.eval(model.parameters())
    return model


def compute_loss(model: Model, tokens: mx.array, learned: mx.array) -> mx.array:
    losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    wanted = learned[:, 1:].astype(mx.float32)
    return (losses * wanted).sum() / wanted.sum()


class SequenceBatches:
    """Batches of training sequences, made in processes of their own, since one takes as long as a training step."""

    def __init__(self, words: list[str], tokenizer: Tokenizer, size: int) -> None:
        self._words, self._tokenizer, self._size = words, tokenizer, size

    def __call__(self, number: int) -> tuple[Any, Any]:
        """The same batch for the same number: (tokens, which are learned), as arrays of numpy."""
        dialogues = Dialogues(self._words, SEED + number)
        rows = [dialogues.make_sequence(partial(encode_ids, self._tokenizer), LENGTH) for _ in range(self._size)]
        return np.array([row for row, _ in rows]), np.array([row for _, row in rows])


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def train(model: Model, batches: Iterable[tuple[Any, Any]], steps: int) -> None:
    warm = optim.linear_schedule(0, RATE, steps // 20)
    schedule = optim.join_schedules([warm, optim.cosine_decay(RATE, steps - steps // 20, RATE_END)], [steps // 20])
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.02)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(tokens: mx.array, learned: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(model, compute_loss)(model, tokens, learned)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return loss

    began = time.monotonic()
    for number, (tokens, learned) in enumerate(batches, 1):
        loss = step(mx.array(tokens), mx.array(learned))
        mx.eval(loss, state)
        if number % max(1, steps // 40) == 0:
            print(f"{number:5} {time.monotonic() - began:6.1f} s  loss {loss.item():.4f}", flush=True)


def examine(model: Model, dialogues: Dialogues, tokenizer: Tokenizer, count: int) -> None:
    """Print, for each kind of exchange, how many of `count` new ones a greedy answer gets wrong, and one of them."""
    for kind, (_, draw) in dialogues.kinds.items():
        wrong = [
            fault for _ in range(count) if (fault := find_fault(model, dialogues.make_opening() + draw(), tokenizer))
        ]
        print(f"{kind}: {len(wrong)} of {count} wrong", *wrong[:3], sep="\n   ", flush=True)


def find_fault(model: Model, pieces: list[Piece], tokenizer: Tokenizer) -> str:
    """Describe the first wrong greedy token; "" if there is none."""
    marked = [(token, wanted) for text, wanted in pieces for token in encode_ids(tokenizer, text)]
    tokens = [token for token, _ in marked]
    predictions: Any = model(mx.array([tokens[:-1]])).argmax(axis=-1)[0].tolist()
    for place, (token, wanted) in enumerate(marked[1:]):
        if wanted and token != predictions[place]:
            before, wrong, right = (
                tokenizer.decode(some, skip_special_tokens=False)
                for some in (tokens[: place + 1], [predictions[place]], [token])
            )
            return f"{before[-240:]!r} >>> {wrong!r} for {right!r}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    texts = make_corpus()
    tokenizer = make_tokenizer(texts)
    mx.random.seed(SEED)
    model = make_model()
    print(sum(value.size for _, value in tree_flatten(model.parameters())), "parameters")
    words = list_words(read_documents())
    with multiprocessing.get_context("spawn").Pool() as pool:
        batches = pool.imap(SequenceBatches(words, tokenizer, arguments.batch), range(arguments.steps))
        train(model, batches, arguments.steps)
    kept = pack_weights(dict(tree_flatten(model.parameters())))
    mx.save_safetensors(str(arguments.out / WEIGHTS.name), kept)
    tokenizer.save(str(arguments.out / TOKENIZER.name))
    model.update(tree_unflatten(list(unpack_weights(kept).items())))
    examine(model, Dialogues(words, SEED - 1), tokenizer, 100)


if __name__ == "__main__":
    main()
