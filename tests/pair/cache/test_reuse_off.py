"""`--reuse off`: neither memory nor disk is used."""

from pathlib import Path

from support.pair.pair import FolderOf, Message, Pair


def ask_turns(pair: Pair) -> list[tuple[int, str]]:
    """Ask three turns of one conversation; their cached tokens and sources."""
    messages: list[Message] = [{"role": "user", "content": "Say something, please."}]
    seen = []
    for words in (None, "And more?", "And more?"):
        if words:
            messages.append({"role": "user", "content": words})
        reply = pair.chat(messages, max_tokens=8)
        messages.append({"role": "assistant", "content": reply.text})
        pair.settle()
        seen.append((reply.cached, reply.headers["X-Warmline-Cache"]))
    return seen


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_reuse_off_reads_and_writes_no_kv(tiny_folder: FolderOf, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    with Pair(tmp_path, model) as warm:
        assert ask_turns(warm)[1][0] > 0
    with Pair(tmp_path, model, "--reuse", "off") as pair:
        before = list_files(pair.home.segments)
        assert before, "something could have been reused"
        assert ask_turns(pair) == [(0, "cold 0")] * 3
        assert list_files(pair.home.segments) == before
        assert pair.residents() == []
        reply = pair.chat([{"role": "user", "content": "Why?"}], max_tokens=1)
        assert 'miss="reuse is off"' in pair.perf_line(reply)
        assert pair.cachectl("verify", "--deep")["findings"] == []
