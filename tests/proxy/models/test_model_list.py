"""`/v1/models` and its entries where several models are served."""

from pathlib import Path

from support.keeper.fake_keeper import run_models
from support.proxy.harness import on_loop

TWO = {"large": 10, "small": 10}


@on_loop
async def test_models_are_listed_with_whether_they_are_loaded(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",)) as harness:
        await harness.ask("large")
        async with harness.client.get(f"{harness.url}/v1/models") as response:
            listed = (await response.json())["data"]
        assert [(each["id"], each["loaded"]) for each in listed] == [("large", True), ("small", False)]
        headers = {"anthropic-version": "2023-06-01"}
        async with harness.client.get(f"{harness.url}/v1/models", headers=headers) as response:
            assert [each["id"] for each in (await response.json())["data"]] == ["large", "small"]


@on_loop
async def test_configured_names_alone_have_an_entry(tmp_path: Path) -> None:
    async with run_models(tmp_path, TWO, 20, ("large",), configs={"small": {"aliases": ("org/mini",)}}) as harness:
        for name, root in (("large", "large"), ("org/mini", "small"), ("org/mini/", "small")):
            async with harness.client.get(f"{harness.url}/v1/models/{name}") as response:
                entry = await response.json()
            assert (response.status, entry["id"], entry["root"]) == (200, name.rstrip("/"), root)
        async with harness.client.get(f"{harness.url}/v1/models/zzz") as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == 'No model "zzz" is configured; there are large, small.'
