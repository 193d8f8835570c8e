"""Dashboard queries and files over HTTP."""

import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import warmline_proxy.dashboard
from support.index.indexes import begin_save, commit_save
from support.many_segments import CHAIN, MODEL, fill_index
from support.proxy.harness import ProxyHarness, on_loop, run_proxy
from warmline_common.protocol.tokens import namespace
from warmline_proxy.auth import key_store as keys_file
from warmline_proxy.store.rows import RequestRecord

ANSWER_BYTES_MAX = 120_000


async def get_json(served: ProxyHarness, path: str, status: int = 200, **parameters: str) -> Any:
    headers = {"Authorization": f"Bearer {served.home.load_secret()}"}
    async with served.client.get(f"{served.url}{path}", params=parameters, headers=headers) as response:
        assert response.status == status, await response.text()
        assert len(await response.read()) < ANSWER_BYTES_MAX
        return await response.json()


@on_loop
async def test_sessions_pages(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        conversations = fill_index(served.index, 300)
        total = conversations + conversations // 3
        pages = [
            await get_json(served, "/warmline/sessions", offset=str(at), count="7") for at in range(0, total + 7, 7)
        ]
        ids = [each["id"] for page in pages for each in page["sessions"]]
        assert len(ids) == len(set(ids)) == total == pages[0]["total"] == pages[0]["matching"]
        assert pages[-1]["sessions"] == [] or len(pages[-1]["sessions"]) < 7
        used = [each["last_used"] for page in pages for each in page["sessions"]]
        assert used == sorted(used, reverse=True), "last used first"
        found = await get_json(served, "/warmline/sessions", q="HALF-27")
        assert [each["client"] for each in found["sessions"]] == ["client-half-27"] and found["total"] == total
        (line,) = found["sessions"]
        assert line["segments"] == CHAIN // 2 + 2 and line["model"] == MODEL and line["pinned"] is False


@on_loop
async def test_sessions_sort(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        fill_index(served.index, 120)
        for name in ("client", "tokens", "bytes", "bytes_alone", "requests", "last_used", "created"):
            up = await get_json(served, "/warmline/sessions", sort=name)
            down = await get_json(served, "/warmline/sessions", sort=f"-{name}")
            values = [each[name] for each in up["sessions"]]
            assert values == sorted(values) and [each[name] for each in down["sessions"]] == values[::-1], name


@on_loop
async def test_tree(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        conversations = fill_index(served.index, 400)
        top = await get_json(served, "/warmline/tree")
        assert top["total"] == 2 and {each["root"] for each in top["nodes"]} == {
            namespace(f"fingerprint {number}").hex() for number in range(2)
        }
        (stem,) = (await get_json(served, "/warmline/tree", root=top["nodes"][0]["id"]))["nodes"]
        assert (stem["start"], stem["end"], stem["children"]) == (0, 128, conversations // 2)
        assert stem["bytes_below"] == top["nodes"][0]["bytes_below"]
        first = await get_json(served, "/warmline/tree", parent=stem["id"], count="15")
        rest = await get_json(served, "/warmline/tree", parent=stem["id"], offset="15", count="200")
        nodes = first["nodes"] + rest["nodes"]
        assert len({each["id"] for each in nodes}) == len(nodes) == first["total"] == conversations // 2
        assert [each["place"] for each in nodes] == list(range(len(nodes)))
        sizes = [each["bytes_below"] for each in nodes]
        assert sizes == sorted(sizes, reverse=True) and stem["bytes"] + sum(sizes) == stem["bytes_below"]
        short = next(each for each in nodes if each["children"])
        assert short["ending"][0]["client"].startswith("client-half-") and short["sessions_below"] == 2


@on_loop
async def test_recreated_key_has_own_label(tmp_path: Path) -> None:
    """Distinct from the removed key's and from conversations stored without a key."""
    async with run_proxy(tmp_path) as served:
        store_session(served, "", 1)
        assert await list_key_labels(served) == [""]
        for number in (2, 3):
            key = keys_file.add_key(served.home, "default")
            store_session(served, key.tenant, number)
            served.index.record_request(make_record(number, namespace(MODEL, key.tenant)))
            assert (await list_key_labels(served))[-1] == "default"
            keys_file.remove_key(served.home, "default")
            assert (await list_key_labels(served))[-1] == "a removed key", "only the keys have changed"
        key = keys_file.add_key(served.home, "default")
        store_session(served, key.tenant, 4)
        assert await list_key_labels(served) == ["no key", "a removed key", "a removed key", "default"]
        tree = await get_json(served, "/warmline/tree")
        assert sorted(each["key"] for each in tree["nodes"]) == sorted(await list_key_labels(served))
        found = await get_json(served, "/warmline/sessions", q="removed")
        assert found["matching"] == 2
        served.index.record_request(make_record(4, namespace(MODEL, key.tenant)))
        served.index.flush()
        activity = await get_json(served, "/warmline/activity")
        assert [each["key"] for each in activity["requests"]] == ["default", "default (removed)", "default (removed)"]
        explained = await get_json(served, "/warmline/explain", request="request-2")
        assert explained["request"]["key"] == "default (removed)"


async def list_key_labels(served: ProxyHarness) -> list[str]:
    """Labels of the conversations, in the order in which they were stored."""
    return [each["key"] for each in (await get_json(served, "/warmline/sessions", sort="client"))["sessions"]]


def store_session(served: ProxyHarness, tenant: str, number: int) -> None:
    plan = begin_save(served.index, range(100), root=namespace(MODEL, tenant))
    assert plan is not None
    commit_save(served.index, plan, client=str(number))


def make_record(number: int, root: bytes) -> RequestRecord:
    return RequestRecord(
        id=f"request-{number}",
        at=float(number),
        endpoint="chat",
        client_model="any",
        key="default",
        root=root,
        outcome="ok",
        source="cold",
    )


@on_loop
async def test_path(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        fill_index(served.index, 60)
        (line,) = (await get_json(served, "/warmline/sessions", q="client-5"))["sessions"]
        path = await get_json(served, "/warmline/path", session=line["id"])
        assert [each["start"] for each in path["nodes"]] == [0, 0, 128] and path["tokens"] == line["tokens"]
        leaf = path["nodes"][-1]
        assert leaf["ending"] == [{"id": line["id"], "title": "", "client": "client-5", "created": line["created"]}]
        assert await get_json(served, "/warmline/path", segment=leaf["id"]) == path


@on_loop
async def test_summary_is_refreshed_after_change(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        assert (await get_json(served, "/warmline/sessions"))["total"] == 0
        assert (await get_json(served, "/warmline/tree"))["nodes"] == []
        fill_index(served.index, 20)
        (line,) = (await get_json(served, "/warmline/sessions", q="client-1"))["sessions"]
        headers = {"Authorization": f"Bearer {served.home.load_secret()}"}
        body = {"session": line["id"]}
        async with served.client.post(f"{served.url}/warmline/pin", json=body, headers=headers) as response:
            assert response.status == 200
        (line,) = (await get_json(served, "/warmline/sessions", q="client-1"))["sessions"]
        assert line["pinned"] and line["pinned_all"]
        async with served.client.post(f"{served.url}/warmline/purge", json=body, headers=headers) as response:
            assert response.status == 200
        assert (await get_json(served, "/warmline/sessions", q="client-1"))["sessions"] == []
        await get_json(served, "/warmline/path", 404, session=line["id"])


@on_loop
async def test_activity(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        for number in range(3):
            assert (await served.chat(f"Number {number}", session_id=f"talk {number}")).status == 200
        records = await served.wait_until_saved()
        reply = await get_json(served, "/warmline/activity", count="2")
        assert (reply["total"], reply["history"]["requests"]) == (3, 3)
        assert [each["id"] for each in reply["requests"]] == [record.id for record in records[:2]]
        assert [each["client"] for each in reply["requests"]] == ["talk 2", "talk 1"]
        created_by_id = {
            each["id"]: each["created"] for each in (await get_json(served, "/warmline/sessions"))["sessions"]
        }
        assert [each["created"] for each in reply["requests"]] == [
            created_by_id[record.session] for record in records[:2]
        ]
        assert "parting" not in reply["requests"][0] and "root" not in reply["requests"][0]
        assert (await get_json(served, "/warmline/activity", offset="2"))["requests"][0]["id"] == records[2].id


@pytest.mark.parametrize(
    ("path", "parameters", "status", "says"),
    [
        ("/warmline/sessions", {"count": "201"}, 400, "count must be a whole number from 0 to 200"),
        ("/warmline/sessions", {"offset": "-1"}, 400, "offset must be a whole number"),
        ("/warmline/sessions", {"sort": "colour"}, 400, "sort must be one of title, client, model,"),
        ("/warmline/activity", {"count": "many"}, 400, "count must be"),
        ("/warmline/tree", {"parent": "0" * 32}, 404, "is not stored"),
        ("/warmline/tree", {"parent": "<script>"}, 404, "'<script>' is not stored"),
        ("/warmline/path", {}, 400, "Name either a session or a segment."),
        ("/warmline/path", {"session": "a", "segment": "b"}, 400, "Name either a session or a segment."),
        ("/warmline/path", {"segment": "f" * 32}, 404, "is not stored"),
        ("/admin/secret", {}, 404, "the dashboard is /admin"),
        ("/admin/../rows.py", {}, 404, ""),
        ("/admin/%2e%2e/pages.py", {}, 404, ""),
    ],
)
@on_loop
async def test_bad_queries_return_4xx(
    tmp_path: Path, path: str, parameters: dict[str, str], status: int, says: str
) -> None:
    async with run_proxy(tmp_path) as served:
        assert says in str(await get_json(served, path, status, **parameters))


@on_loop
async def test_page_security_headers(tmp_path: Path) -> None:
    async with run_proxy(tmp_path) as served:
        for path, kind in (("/admin", "text/html"), ("/admin/", "text/html"), ("/admin/main.js", "text/javascript")):
            async with served.client.get(served.url + path) as response:
                assert response.status == 200 and response.content_type == kind and response.charset == "utf-8"
                assert response.headers["Cache-Control"] == "no-store"
                assert response.headers["X-Frame-Options"] == "DENY"
                policy = response.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "frame-ancestors 'none'" in policy and "unsafe" not in policy and "http" not in policy
        headers = {"Authorization": f"Bearer {served.home.load_secret()}"}
        async with served.client.post(f"{served.url}/admin", headers=headers) as response:
            assert response.status == 405


def test_pages_have_no_external_links_or_inline_code() -> None:
    static = files(warmline_proxy.dashboard) / "static"
    for file in static.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text, file.name
        assert " style=" not in text and " onclick=" not in text, file.name


def test_wheel_contains_pages(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/dashboard/static/" in name}
    assert packed == {file.name for file in (files(warmline_proxy.dashboard) / "static").iterdir()} != set()
