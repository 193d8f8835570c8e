"""Starts on an index whose file is damaged: each must bring everything back, and end no process.

    python tests/support/index/page_damage.py               (`make index-damage`: ten minutes of a processor)
    python tests/support/index/page_damage.py --sample 40

Without a sample: every bit of the two meta pages and of the page of tables that is in use, 64 bits of each further
page's header and 100 of its body, every page zeroed, filled with ones, and overwritten by each other page, and the
file cut at every half page.  With one: so many of these cases, chosen by the seed.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.index.damage import A, list_texts, save_conversations
from support.index.indexes import BUDGET, HEADER_BYTES, PAGE_BYTES, count_matched, make_home, save
from warmline_common.storage.home import Home
from warmline_proxy.index.index import Index, IndexStoreError
from warmline_proxy.index.recovery.startup import reconcile
from warmline_proxy.index.recovery.verify import verify_index
from warmline_proxy.store.page_checks import find_page_flaw

META_USED_BYTES = 152
BITS_OF_HEADER, BITS_OF_BODY = 64, 100
FULL_CHECK_INTERVAL = 16
START_S_MAX = 5.0
CRASHED = "ended by "


@dataclass(frozen=True)
class DamageCase:
    """A damage to the file: `at` is a bit, a page or a size in bytes, by `kind`."""

    kind: str  # "flip", "zeros", "ones", "copy", "cut"
    at: int
    source: int = 0  # of a copy: the page

    def apply(self, data: bytes) -> bytes:
        damaged, begin = bytearray(data), self.at * PAGE_BYTES
        if self.kind == "flip":
            damaged[self.at // 8] ^= 1 << self.at % 8
        elif self.kind == "cut":
            del damaged[self.at :]
        elif self.kind == "copy":
            damaged[begin : begin + PAGE_BYTES] = data[self.source * PAGE_BYTES :][:PAGE_BYTES]
        else:
            damaged[begin : begin + PAGE_BYTES] = (b"\xff" if self.kind == "ones" else b"\0") * PAGE_BYTES
        return bytes(damaged)


class DamagedHome:
    """Home whose index's file is damaged again and again; its other files are restored where a start changed them."""

    def __init__(self, root: Path) -> None:
        self._template, self._home = make_home(root / "template"), Home(root / "home")
        with Index(self._template, BUDGET) as index:
            reconcile(index)
            for number in range(30):  # so many that tables have branches, and deleted rows leave free pages
                save(index, [number] * 5, may_replace=False)
            save(index, [77, *range(1200)])  # its tokens take overflow pages
            save_conversations(index)
            self._texts = list_texts(index)
            self._states = self._list_states(index)
        shutil.copytree(self._template.root, self._home.root)
        self.data = self._find_file(self._template).read_bytes()
        self._stored = self._list_stored()

    def list_cases(self) -> Iterator[DamageCase]:
        rng, pages = random.Random(1), range(len(self.data) // PAGE_BYTES)
        tables = next(page for page in pages if b"checkpoints" in self._read_page(page) and self._is_newest(page))
        for page in pages:
            begin = page * PAGE_BYTES
            if page < 2:
                at = range(META_USED_BYTES)
            elif page == tables:
                at = self._list_used_bytes(page)
            else:
                header = rng.sample(range(8 * HEADER_BYTES), BITS_OF_HEADER)
                body = rng.sample(range(8 * HEADER_BYTES, 8 * PAGE_BYTES), BITS_OF_BODY)
                yield from (DamageCase("flip", 8 * begin + bit) for bit in (*header, *body))
                continue
            yield from (DamageCase("flip", 8 * (begin + byte) + bit) for byte in at for bit in range(8))
        for page in pages:
            yield DamageCase("zeros", page)
            yield DamageCase("ones", page)
            yield from (DamageCase("copy", page, source) for source in pages if source != page)
        yield from (DamageCase("cut", size) for size in range(0, len(self.data), PAGE_BYTES // 2))

    def check(self, case: DamageCase) -> str:
        """Start after this damage, check, save, and start again; what was wrong, or ""."""
        self._restore()
        file = self._find_file(self._home)
        file.write_bytes(case.apply(self.data))
        is_refused = bool(find_page_flaw(file))  # then all such starts go on alike, with an empty index
        begin = time.monotonic()
        with Index(self._home, BUDGET) as index:
            reconcile(index)
            if (seconds := time.monotonic() - begin) > START_S_MAX:
                return f"started after {seconds:.1f} s"
            if list_texts(index) != self._texts or self._list_states(index) != self._states:
                return f"has {len(list_texts(index))} of {len(self._texts)} segments"
            if is_refused and case.at % FULL_CHECK_INTERVAL:
                return ""
            if findings := verify_index(index):
                return f"has findings: {findings[0]}"
            save(index, [*A[:390], 1, 2, 3])
            if count_matched(index, [*A[:390], 1, 2, 3]) != 393:
                return "a save is not found"
        with Index(self._home, BUDGET) as index:
            if mended := reconcile(index).mended:
                return f"the next start mends {mended}"
        return ""

    def _is_newest(self, page: int) -> bool:
        """True for the page that the newer meta names as the root of the tables."""
        metas = [self._read_page(number)[HEADER_BYTES:META_USED_BYTES] for number in (0, 1)]
        newest = max(metas, key=lambda meta: int.from_bytes(meta[-8:], "little"))
        return int.from_bytes(newest[-24:-16], "little") == page

    def _list_used_bytes(self, page: int) -> list[int]:
        lower, upper = (int.from_bytes(self._read_page(page)[at : at + 2], "little") for at in (12, 14))
        return [*range(lower), *range(upper, PAGE_BYTES)]

    def _read_page(self, page: int) -> bytes:
        return self.data[page * PAGE_BYTES :][:PAGE_BYTES]

    @staticmethod
    def _find_file(home: Home) -> Path:
        (file,) = home.index.glob("*/data.mdb")
        return file

    @staticmethod
    def _list_states(index: Index) -> dict[str, tuple[str, int]]:
        return {row.id: (row.segment, row.position) for row in index.snapshot().checkpoints.values()}

    def _list_stored(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._home.segments.rglob("*") if path.is_file()}

    def _restore(self) -> None:
        for name in ("index", *([] if self._list_stored() == self._stored else ["segments"])):
            shutil.rmtree(self._home.root / name, ignore_errors=True)
            shutil.copytree(self._template.root / name, self._home.root / name)


def run_cases(home: DamagedHome, cases: Sequence[DamageCase]) -> Iterator[tuple[DamageCase, str]]:
    """Each case that went wrong, and how; in a child process, which another one follows where it is ended."""
    done = 0
    while done < len(cases):
        read_end, write_end = os.pipe()
        if not (child := os.fork()):
            _run_in_child(home, cases[done:], write_end)
        os.close(write_end)
        with os.fdopen(read_end, "r") as lines:
            for line in lines:
                if problem := line.strip():
                    yield cases[done], problem
                done += 1
        _, status = os.waitpid(child, 0)
        if done < len(cases):
            yield cases[done], CRASHED + (signal.Signals(status).name if os.WIFSIGNALED(status) else str(status))
            done += 1


def _run_in_child(home: DamagedHome, cases: Sequence[DamageCase], write_end: int) -> None:
    try:
        for case in cases:
            try:
                problem = home.check(case)
            except (IndexStoreError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            os.write(write_end, problem.replace("\n", " ").encode() + b"\n")
    finally:
        os._exit(0)  # after any other error too, which the parent notes: nothing of it may run twice


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=0, help="so many cases alone; 0: all")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        home = DamagedHome(Path(folder))
        cases = list(home.list_cases())
        if options.sample:
            cases = random.Random(options.seed).sample(cases, options.sample)
        wrong: Counter[str] = Counter()
        for case, problem in run_cases(home, cases):
            wrong[case.kind] += 1
            print(f"{case}: {problem}", flush=True)
    pages, kinds = len(home.data) // PAGE_BYTES, Counter(case.kind for case in cases)
    print(f"{len(cases)} damages to {pages} pages: {dict(kinds)}; {wrong.total()} went wrong")
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
