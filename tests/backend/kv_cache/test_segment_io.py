"""Rows and states through files and back: the continuation equals the cold run from any restored position."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open

from support.backend.cold_runs import compare_greedy
from support.backend.engine_driver import FINGERPRINT, SchedulerDriver, cut_chain, make_loader, save_segments
from support.backend.families import FAMILIES, compute_cold, get_tolerance, load_family, make_prompt
from warmline_backend.kv_cache.byte_buffers import view_bytes
from warmline_backend.kv_cache.codecs import CodecKind, flatten
from warmline_backend.kv_cache.kv import KV, RowsUnavailableError
from warmline_backend.kv_cache.segment_io import BadChainError, DamagedFileError, OperationCancelledError
from warmline_common.protocol.messages import CheckpointRef, SegmentRef
from warmline_common.protocol.tokens import pack_tokens
from warmline_common.storage import disk
from warmline_common.storage.segment_copy import SegmentCopy
from warmline_common.storage.segment_file import read_header_from, read_tokens, verify_file

PROMPT = make_prompt(170)
CHECKPOINTS = (30, 90, 169)
POOL = ThreadPoolExecutor(3)


def list_positions(driver: SchedulerDriver, tokens: int) -> list[int]:
    return [*CHECKPOINTS, tokens] if driver.served.layout.has_states else [1, 31, 32, 33, 64, 100, 169, 171, tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_position_restores(family: str, root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family(family, root), step=50)
    turn = driver.run(PROMPT, 40, checkpoints=CHECKPOINTS)
    kv = driver.scheduler.save_source.find_kv(1, resident_id=turn.result.resident)
    tokens = list(kv.tokens)
    assert tokens == PROMPT + turn.generated and len(tokens) == 210
    chain, checkpoints = save_segments(kv, tmp_path, [64, 100, 210])
    for path in tmp_path.iterdir():
        verify_file(path)
    for position in list_positions(driver, 210):
        at = next((ref for ref in checkpoints if ref.position == position), None)
        read = make_loader(driver.served, tmp_path, POOL).load(
            pack_tokens(tokens[:position]), cut_chain(chain, position), at, lambda: False
        )
        restored = driver.scheduler.install_resident("", read.build(driver.served.layout))
        prompt = tokens[:position] + make_prompt(20, 7)
        warm = driver.run(prompt, 10, resident=restored, reuse=position)
        truth = compute_cold(driver.served, family, prompt, 10)
        assert compare_greedy(truth.tokens, warm.generated, truth.margins, get_tolerance(family)), position
        assert warm.result.timings.prefilled == 20
    check_cut(driver, tmp_path, tokens, chain, checkpoints)


def check_cut(
    driver: SchedulerDriver, folder: Path, tokens: list[int], chain: list[SegmentRef], checkpoints: list[CheckpointRef]
) -> None:
    """Check that a last file truncated at the restored position still restores it, and no more."""
    until, whole = CHECKPOINTS[-1], chain[-1]
    cut = SegmentRef(id="c" * 32, start=whole.start, end=until, upto=until)
    with (folder / f"{whole.id}.safetensors").open("rb") as file:
        header = read_header_from(file)
        copy = SegmentCopy(file, header, msgspec.structs.replace(header.meta, id=cut.id, end=until))
        disk.write_durable(folder / f"{cut.id}.safetensors", copy.read_chunks())
    at = next((ref for ref in checkpoints if ref.position == until), None)
    reads = make_loader(driver.served, folder, POOL)
    before, after = (
        reads.load(pack_tokens(tokens[:until]), links, at, lambda: False)
        for links in (cut_chain(chain, until), [*chain[:-1], cut])
    )
    assert before.rows.keys() == after.rows.keys() and (before.rows or before.state)
    for name, buffer in before.rows.items():
        rows = until - buffer.shape.first  # what is behind them is undefined
        assert mx.array_equal(buffer.unsigned[:, :, :rows], after.rows[name].unsigned[:, :, :rows]), name
    with pytest.raises((BadChainError, DamagedFileError)):
        reads.load(pack_tokens(tokens[: until + 1]), [*chain[:-1], cut], at, lambda: False)


def list_addresses(kv: KV) -> list[int]:
    """Addresses of the buffers of leaves that keep all rows."""
    leaves = zip(kv.layout.leaves, (held for _, held in flatten(kv.layers)), strict=True)
    arrays = tree_flatten([[held.keys, held.values] for leaf, held in leaves if leaf.codec.kind is CodecKind.ROWS])
    unsigned = [array.view(mx.uint8) for _, array in arrays if array.nbytes]
    mx.eval(unsigned)
    return [np.frombuffer(view_bytes(array), np.uint8).ctypes.data for array in unsigned]


@pytest.mark.parametrize("family", FAMILIES)
def test_room_of_restored_buffers_is_filled_in_place_and_never_read(family: str, root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family(family, root))
    turn = driver.run(PROMPT, 20)
    kv = driver.scheduler.save_source.find_kv(1, resident_id=turn.result.resident)
    chain, checkpoints = save_segments(kv, tmp_path, [kv.length])
    prompt = [*kv.tokens, *make_prompt(300, 7)]

    def restore() -> KV:
        read = make_loader(driver.served, tmp_path, POOL).load(
            pack_tokens(kv.tokens), chain, checkpoints[-1] if checkpoints else None, lambda: False, b"", len(prompt)
        )
        for buffer in filter(lambda each: each.data.nbytes, read.rows.values()):
            _, heads, rows, _ = buffer.shape.shape
            room = np.frombuffer(buffer.data, np.uint8).reshape(heads, rows, -1)[:, kv.length - buffer.shape.first :]
            room[:] = 0xFF  # NaN in any floating type
        return read.build(driver.served.layout)

    restored_kv = restore()
    places = list_addresses(restored_kv)
    assert restored_kv.buffer_rows == (512 if places else kv.length)
    restored_kv.prefill(driver.served.model, prompt[kv.length :])
    assert list_addresses(restored_kv) == places
    truth = compute_cold(driver.served, family, prompt, 12)
    driver.submit(make_prompt(160, 4), 20)  # a batch mate, where the family can have one
    warm = driver.run(prompt, 12, resident=driver.scheduler.install_resident("", restore()), reuse=kv.length)
    assert compare_greedy(truth.tokens, warm.generated, truth.margins, get_tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_conversation_saves_only_its_tail(family: str, root: Path, tmp_path: Path) -> None:
    """Save, restore, continue, save the new rows, restore all: each file has only its own rows."""
    driver = SchedulerDriver(load_family(family, root), step=50)
    turn = driver.run(PROMPT, 40)
    chain, checkpoints = save_segments(
        driver.scheduler.save_source.find_kv(1, resident_id=turn.result.resident), tmp_path, [210]
    )
    tokens = PROMPT + turn.generated
    read = make_loader(driver.served, tmp_path, POOL).load(
        pack_tokens(tokens), chain, checkpoints[-1] if checkpoints else None, lambda: False
    )
    resident = driver.scheduler.install_resident("", read.build(driver.served.layout))
    prompt = tokens + make_prompt(60, 3)
    more = driver.run(prompt, 45, resident=resident, reuse=210)
    kv = driver.scheduler.save_source.find_kv(1, resident_id=more.result.resident)
    rows = kv.slice_rows(210, kv.length)
    assert {array.shape[2] for array in rows.values()} == {kv.length - 210}
    if driver.served.layout.window:
        with pytest.raises(RowsUnavailableError):
            kv.slice_rows(100, kv.length)  # those of before the restore are on disk alone


def test_file_sizes_match_rows(root: Path, tmp_path: Path) -> None:
    for family in FAMILIES:
        driver = SchedulerDriver(load_family(family, root))
        kv = driver.scheduler.save_source.find_kv(1, resident_id=driver.run(PROMPT, 40).result.resident)
        folder = tmp_path / family
        folder.mkdir()
        chain, _ = save_segments(kv, folder, [3, 64, 210])
        for link in chain:
            size = (folder / f"{link.id}.safetensors").stat().st_size
            assert size <= 1.03 * (link.end - link.start) * driver.served.row_bytes + 4096, (family, link)


def test_files_are_valid_safetensors(root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family("deepseek_v32", root))
    kv = driver.scheduler.save_source.find_kv(1, resident_id=driver.run(PROMPT, 4).result.resident)
    chain, _ = save_segments(kv, tmp_path, [174])
    path = tmp_path / f"{chain[0].id}.safetensors"
    with safe_open(path, "numpy") as file:
        assert file.get_tensor("tokens").tolist() == kv.tokens
        assert {"0.0.keys", "0.0.values", "0.1.keys"} <= set(file.keys())
    assert mx.array_equal(mx.load(str(path))["1.0.keys"], kv.slice_rows(0, 174)["1.0.keys"])
    assert oct(path.stat().st_mode)[-3:] == "600"


@pytest.fixture
def stored(root: Path, tmp_path: Path) -> tuple[SchedulerDriver, list, bytes, Path]:  # type: ignore[type-arg]
    driver = SchedulerDriver(load_family("llama", root))
    kv = driver.scheduler.save_source.find_kv(1, resident_id=driver.run(PROMPT, 30).result.resident)
    chain, _ = save_segments(kv, tmp_path, [64, 128, 200])
    return driver, chain, pack_tokens(kv.tokens), tmp_path


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "foreign", "empty"])
def test_damage_names_file_and_intact_prefix(stored, damage: str) -> None:  # type: ignore[no-untyped-def]
    driver, chain, tokens, folder = stored
    path = folder / f"{chain[1].id}.safetensors"
    wanted = make_loader(driver.served, folder, POOL)
    match damage:
        case "flip":
            flip_bit(path, path.stat().st_size - 100)
        case "truncate":
            path.write_bytes(path.read_bytes()[:-100])
        case "empty":
            path.write_bytes(b"")
        case "delete":
            path.unlink()
        case "foreign":
            data = path.read_bytes()
            path.write_bytes(data.replace(FINGERPRINT.encode(), b"e" * 64))
    with pytest.raises(DamagedFileError) as caught:
        wanted.load(tokens, chain, None, lambda: False)
    reasons = {"flip": "checksum", "truncate": "truncated", "delete": "missing", "foreign": "foreign"}
    assert caught.value.file_id == chain[1].id and caught.value.good_prefix == 64
    assert caught.value.reason == reasons.get(damage, "truncated")
    read = wanted.load(tokens[: 64 * 4], chain[:1], None, lambda: False)
    assert read.build(driver.served.layout).length == 64


def test_any_flipped_byte_is_detected(stored) -> None:  # type: ignore[no-untyped-def]
    driver, chain, tokens, folder = stored
    path = folder / f"{chain[0].id}.safetensors"
    sound = path.read_bytes()
    for at in range(0, len(sound), 97):
        flip_bit(path, at)
        with pytest.raises(DamagedFileError):
            make_loader(driver.served, folder, POOL).load(tokens[: 64 * 4], chain[:1], None, lambda: False)
        path.write_bytes(sound)


def test_differing_tokens_are_refused(stored) -> None:  # type: ignore[no-untyped-def]
    driver, chain, tokens, folder = stored
    other = tokens[: 70 * 4] + b"\x05" + tokens[70 * 4 + 1 :]
    with pytest.raises(DamagedFileError, match="differs at token 70"):
        make_loader(driver.served, folder, POOL).load(other, chain, None, lambda: False)


def test_segment_after_other_tokens_is_foreign(root: Path, tmp_path: Path) -> None:
    """Rows depend on all tokens before them: the same words after other ones have other rows."""
    driver = SchedulerDriver(load_family("llama", root))
    folders = [tmp_path / name for name in "ab"]
    for folder, prompt in zip(folders, (PROMPT, [*make_prompt(64, 5), *PROMPT[64:]]), strict=True):
        folder.mkdir()
        kv = driver.scheduler.save_source.find_kv(1, resident_id=driver.run(prompt, 1).result.resident)
        chain, _ = save_segments(kv, folder, [64, 128, 170])
    tokens, path = pack_tokens(PROMPT), folders[0] / f"{chain[1].id}.safetensors"
    path.write_bytes((folders[1] / path.name).read_bytes())
    verify_file(path)
    assert read_tokens(path) == tokens[64 * 4 : 128 * 4]
    with pytest.raises(DamagedFileError, match=r"foreign: segment .* was computed after other tokens") as caught:
        make_loader(driver.served, folders[0], POOL).load(tokens, chain, None, lambda: False)
    assert (caught.value.file_id, caught.value.good_prefix) == (chain[1].id, 64)


def test_checkpoint_after_other_tokens_is_foreign(root: Path, tmp_path: Path) -> None:
    driver = SchedulerDriver(load_family("qwen3_5", root))
    folders = [tmp_path / name for name in "ab"]
    for folder, prompt in zip(folders, (PROMPT, make_prompt(170, 5)), strict=True):
        folder.mkdir()
        kv = driver.scheduler.save_source.find_kv(
            1, resident_id=driver.run(prompt, 1, checkpoints=(90,)).result.resident
        )
        chain, checkpoints = save_segments(kv, folder, [90])
    (at,) = (ref for ref in checkpoints if ref.position == 90)
    path = folders[0] / f"{at.id}.safetensors"
    path.write_bytes((folders[1] / path.name).read_bytes())
    verify_file(path)
    with pytest.raises(DamagedFileError, match=r"foreign: checkpoint .* was computed after other tokens") as caught:
        make_loader(driver.served, folders[0], POOL).load(pack_tokens(PROMPT[:90]), chain, at, lambda: False)
    assert (caught.value.file_id, caught.value.good_prefix) == (at.id, 90)


def test_files_of_other_root_are_foreign(stored) -> None:  # type: ignore[no-untyped-def]
    driver, chain, tokens, folder = stored
    with pytest.raises(DamagedFileError, match="foreign") as caught:
        make_loader(driver.served, folder, POOL).load(tokens, chain, None, lambda: False, b"r" * 16)
    assert (caught.value.file_id, caught.value.good_prefix) == (chain[0].id, 0)


def test_invalid_chains_are_refused(stored) -> None:  # type: ignore[no-untyped-def]
    driver, chain, tokens, folder = stored
    for links, ids in (([chain[1]], tokens), (chain[:2], tokens), (chain[::2], tokens), ([], b"")):
        with pytest.raises(BadChainError):
            make_loader(driver.served, folder, POOL).load(ids, links, None, lambda: False)
    with pytest.raises(OperationCancelledError):
        make_loader(driver.served, folder, POOL).load(tokens, chain, None, lambda: True)


def test_running_request_can_be_saved(root: Path, tmp_path: Path) -> None:
    for family in FAMILIES:
        driver = SchedulerDriver(load_family(family, root), step=40)
        folder = tmp_path / family
        folder.mkdir()
        name, log = driver.submit(PROMPT, 60)
        driver.submit(make_prompt(160, 4), 60)  # a batch mate, where the family can have one
        driver.run_until(lambda log=log: len(log.events) > 30)  # type: ignore[misc]
        kv = driver.scheduler.save_source.find_kv(1, running_id=name)
        at = kv.length
        tokens = list(kv.tokens)
        kv.capture_checkpoint()
        chain, checkpoints = save_segments(kv, folder, [at])
        driver.run_until(lambda log=log: log.is_ended)  # type: ignore[misc]
        last = checkpoints[-1] if checkpoints else None
        read = make_loader(driver.served, folder, POOL).load(pack_tokens(tokens), chain, last, lambda: False)
        restored = driver.scheduler.install_resident("", read.build(driver.served.layout))
        warm = driver.run([*tokens, 65], 6, resident=restored, reuse=at)
        truth = compute_cold(driver.served, family, [*tokens, 65], 6)
        assert compare_greedy(truth.tokens, warm.generated, truth.margins, get_tolerance(family)), family
