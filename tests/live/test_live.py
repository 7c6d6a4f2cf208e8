"""What people see of a running cluster: the figures, the page in a real browser, the terminal, a session's trees."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.errors import NotFound
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROMPT = "def add(a, b):"
ROLES = ("router", "verifier")
SCREENSHOT_S = 40  # of plots in a screenshot that is kept


class Shown(NamedTuple):
    """A cluster whose router shows itself."""

    cluster: LocalCluster
    page: str  # host:port
    verifier: str  # host:port of its page

    async def glance(self) -> Any:
        return json.loads(await asyncio.to_thread(_get, f"http://{self.page}/live"))

    async def ask(self, tokens: int = 200, **options: Any) -> outrider.Generation:
        async with outrider.AsyncClient(self.cluster.router_address) as client:
            return await client.generate(PROMPT, max_tokens=tokens, ignore_eos=True, seed=4, **options)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bytes(answer.read())


async def _command(*arguments: str) -> tuple[int, str]:
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await running.communicate()
    return running.returncode or 0, output.decode()


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shown() -> AsyncIterator[Shown]:
    lines: list[str] = []
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0", models={"target": MODELS / "target"}, metrics="127.0.0.1:0", policy="rounds", depth=4
        ),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", metrics="127.0.0.1:0")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")],
    )
    async with LocalCluster(config, forward=lambda name, line: lines.append(line)) as cluster:
        pages = [line for line in lines if "metrics at" in line]
        at = {role: line.rpartition("http://")[2].partition("/")[0] for role in ROLES for line in pages if role in line}
        yield Shown(cluster, at["router"], at["verifier"])


async def test_the_figures_add_up_to_the_answers(shown: Shown) -> None:
    before = await shown.glance()
    result = await shown.ask()
    after = await shown.glance()
    assert after["tokens"] - before["tokens"] == result.usage.completion_tokens == 200
    assert after["steps"] - before["steps"] == result.usage.steps
    assert after["accepted"] - before["accepted"] == result.usage.accepted
    assert after["outcomes"]["length"] == before["outcomes"].get("length", 0) + 1
    assert sum(after["reached_by_depth"]) == after["accepted"]
    arms = {worker["role"]: worker["arm"] for worker in after["workers"]}
    assert arms == {"verifier": "rest", "drafter": ""}  # the plan of rounds leaves the arm no choice
    assert PROMPT not in json.dumps(after)


async def test_a_generation_is_listed_while_it_runs(shown: Shown) -> None:
    asking = asyncio.create_task(shown.ask(900))
    while not (running := (await shown.glance())["generations"]):
        assert not asking.done()
    assert running[0]["model"] == "target"
    await asking
    assert (await shown.glance())["generations"] == []


async def test_the_control_page_shows_the_controllers_inputs(shown: Shown) -> None:
    asking = asyncio.create_task(shown.ask(900))
    while not (verifier := json.loads(await asyncio.to_thread(_get, f"http://{shown.verifier}/control")))["sessions"]:
        assert not asking.done()
    while not (router := json.loads(await asyncio.to_thread(_get, f"http://{shown.page}/control")))["generations"]:
        assert not asking.done()
    assert verifier["sessions"][0]["depth"] == router["generations"][0]["depth"] == 4
    seconds = [point["seconds"] for point in verifier["pass"]]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0.0
    assert verifier["steering"]["arm"] in ("turns", "ahead", "rest")
    assert verifier["steering"]["delay_budget_s"] <= 0.1
    assert any(name.startswith("target:") for name in router["priors"])
    await asking


@pytest.mark.parametrize(("path", "status"), [("/../config.py", 404), ("/live.py", 404), ("/metrics/../live", 404)])
async def test_other_paths_are_not_served(shown: Shown, path: str, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(_get, f"http://{shown.page}{path}")
    with refused.value as answer:
        assert answer.code == status


async def test_the_page_can_only_be_read(shown: Shown) -> None:
    request = urllib.request.Request(f"http://{shown.page}/live", method="POST", data=b"{}")
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(urllib.request.urlopen, request, None, 10)
    with refused.value as answer:
        assert answer.code == 405


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium; apt-get install chromium")
PHONE, DESK = (390, 800), (1280, 900)  # CSS pixels


@asynccontextmanager
async def browsing(
    shown: Shown, size: tuple[int, int] = DESK, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[Page]:
    """The page in a browser. Its console has to stay empty."""
    messages = list[str]()
    expect.set_options(timeout=40_000)  # ms; a browser takes its time on a machine that is busy
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = await browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        await page.goto(f"http://{shown.page}/")
        await expect(page.locator("#state")).to_have_text("live")
        yield page
        await browser.close()
    assert messages == []


@asynccontextmanager
async def generating(shown: Shown) -> AsyncIterator[None]:
    """A generation runs all the time, of one session."""
    seen = asyncio.Event()

    async def ask() -> None:
        while not seen.is_set():
            await shown.ask(900)

    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        seen.set()
        await asking


@needs_browser
async def test_the_page_shows_the_figures_in_a_browser(shown: Shown) -> None:
    async with browsing(shown) as page:
        async with generating(shown):
            await expect(page.locator("#generations tbody tr")).to_have_count(1)
            assert await page.locator("#workers tbody tr").count() == 2
            await expect(page.locator("#models tbody tr")).to_have_text(re.compile("^target"))
            await expect(page.locator("#goodput")).to_have_text(re.compile("^[1-9]"))
            await expect(page.locator("#goodput-plot path")).to_have_count(1)
        await expect(page.locator("#generations tbody tr")).to_have_count(0)
        assert await page.locator("#depth-plot rect").count() > 0


@needs_browser
async def test_the_charts_of_a_page_begin_before_it_was_opened(shown: Shown) -> None:
    await shown.ask(900)
    await asyncio.sleep(2.0)  # the router takes its sums each second
    async with browsing(shown) as page:
        await expect(page.locator("#length-plot path")).to_have_count(1)
        assert await page.evaluate("seen.length > 2 && seen.at(-1).tokens - seen[0].tokens >= 900")


@needs_browser
async def test_speed_is_shown_beside_that_of_plain_decoding_and_gamma_while_drafts_are_verified(shown: Shown) -> None:
    async with browsing(shown) as page:
        async with generating(shown):
            await expect(page.locator("#speedup")).to_have_text(re.compile(r"^\d\.\d\d$"))
            await expect(page.locator("#plain")).to_have_text(re.compile(r"^[1-9]\d*/s, plain [1-9]\d* ± \d+ %$"))
            await expect(page.locator("#gamma")).to_have_text("4.0")
        await expect(page.locator("#gamma")).to_have_text("-")
        await expect(page.locator("#saved")).to_have_text(re.compile("^[1-9]"))


@needs_browser
async def test_a_phone_shows_every_column(shown: Shown) -> None:
    async with browsing(shown, PHONE) as page, generating(shown):
        await expect(page.locator("#generations tbody tr")).to_have_count(1)
        cells = await page.locator("#workers td:not(:empty)").all()
        assert len(cells) > 12
        for cell in cells:
            box = await cell.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE[0]


@needs_browser
async def test_a_tree_is_drawn_for_keyboard_users(shown: Shown) -> None:
    async with browsing(shown) as page, generating(shown):
        button = page.locator("#generations button").first
        await expect(button).to_have_attribute("aria-pressed", "false")
        await button.press("Enter")
        await expect(page.locator("#tree")).to_be_visible()
        await expect(page.locator("#tree-state")).to_have_text(re.compile(r"\d+ nodes verified, \d+ accepted"))
        await expect(page.locator("#tree-plot circle.root")).to_have_count(1)
        await expect(page.locator("#tree-plot circle.accepted").first).to_be_attached()
        update = "it => { it.focus(); take(seen.at(-1)); return document.activeElement === it; }"
        assert await button.evaluate(update)  # it keeps the focus


async def test_a_tree_page_has_no_tokens_and_only_running_sessions(shown: Shown) -> None:
    async def tree(session: str) -> Any:
        return json.loads(await asyncio.to_thread(_get, f"http://{shown.page}/tree/{session}"))

    assert "has ended" in (await tree("nobody00"))["problem"]
    assert "has ended" in (await tree(""))["problem"]
    async with generating(shown):
        step: Any = {}
        async with asyncio.timeout(30):
            while not step.get("nodes"):
                for one in (await shown.glance())["generations"]:
                    step = await tree(one["session"])
                await asyncio.sleep(0.05)
    assert step.keys() == {
        *(
            "position",
            "committed",
            "accepted",
            "left_out",
            "hidden",
            "pass_ms",
            "waited_ms",
            "gamma",
            "drafters",
            "nodes",
        )
    }
    assert all(parent < at and 0 <= chance <= 1 for at, (parent, chance, _, _) in enumerate(step["nodes"]))
    assert sum(accepted for _, _, accepted, _ in step["nodes"]) == step["accepted"] < step["committed"]


@needs_browser
async def test_every_element_has_an_accessible_name(shown: Shown) -> None:
    async with browsing(shown) as page, generating(shown):
        await page.locator("#generations button").first.click()
        await expect(page.locator("#tree-plot circle.root")).to_have_count(1)
        for role, least in (("img", 5), ("table", 3), ("button", 1), ("region", 5)):
            found = await page.get_by_role(role).all()
            assert len(found) >= least, role
            for one in found:
                named = await one.evaluate(
                    "it => it.ariaLabel || (it.getAttribute('aria-labelledby') || '').split(' ')"
                    ".map(id => document.getElementById(id)?.textContent).join(' ') || it.textContent"
                )
                assert named.strip(), await one.evaluate("it => it.outerHTML")
        assert await page.locator("th:not([scope])").count() == 0
        assert await page.locator("html").get_attribute("lang") == "en"


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pictured(shown: Shown, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shown]:
    """The cluster, or for screenshots that are kept one whose target is slow enough for trees."""
    if "OUTRIDER_SCREENSHOTS" not in os.environ:
        yield shown
        return
    target, lines = tmp_path_factory.mktemp("padded") / "target", list[str]()
    await asyncio.to_thread(pad_checkpoint, MODELS / "target", target, parameters=150_000_000)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, metrics="127.0.0.1:0"),
        verifier=[VerifierConfig(model=target, name="target", threads=2)],
        drafter=[DrafterConfig(model=MODELS / "drafter")],
    )
    async with LocalCluster(config, forward=lambda name, line: lines.append(line)) as cluster:
        (page,) = (line.rpartition("http://")[2].partition("/")[0] for line in lines if "metrics at" in line)
        yield Shown(cluster, page, "")


@needs_browser
@pytest.mark.parametrize(("name", "size", "scheme"), [("page", DESK, "light"), ("page-dark-phone", PHONE, "dark")])
async def test_the_page_fits_a_screenshot(
    pictured: Shown, tmp_path: Path, name: str, size: tuple[int, int], scheme: Literal["light", "dark"]
) -> None:
    """`make screenshots` keeps them in docs/images."""
    folder = Path(os.environ.get("OUTRIDER_SCREENSHOTS", tmp_path))
    async with browsing(pictured, size, scheme) as page, generating(pictured):
        await asyncio.sleep(SCREENSHOT_S if "OUTRIDER_SCREENSHOTS" in os.environ else 0)
        await page.locator("#generations button").first.click()
        await expect(page.locator("#tree-plot circle.accepted").first).to_be_attached()
        image = await page.screenshot(path=folder / f"{name}.png", full_page=True)
        wide = await page.evaluate("document.scrollingElement.scrollWidth")
        paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert image.startswith(b"\x89PNG")
    assert wide <= size[0]  # nothing but tables has to be moved sideways
    assert (paper == "rgb(255, 255, 255)") is (scheme == "light")


async def test_top_shows_the_figures_in_a_terminal(shown: Shown) -> None:
    asking = asyncio.create_task(shown.ask(1000))
    status, output = await _command("top", shown.page, "--once")
    await asking
    assert status == 0
    assert "tokens/s" in output
    assert "Acceptance by depth" in output
    assert "verifier-" in output
    assert "drafter-" in output


async def test_top_without_a_page_prints_the_remedy() -> None:
    status, output = await _command("top", "127.0.0.1:1", "--once")
    assert status == 2
    assert "give the address that is its `metrics`" in output
    assert "Traceback" not in output


async def test_a_watcher_receives_every_step_of_its_session(shown: Shown) -> None:
    async with outrider.AsyncClient(shown.cluster.router_address) as client:
        session = (await client.create_session()).session_id
        steps: list[outrider.StepTree] = []

        async def watch() -> None:
            async with aclosing(client.watch(session)) as trees:
                async for tree in trees:
                    steps.append(tree)  # noqa: PERF401 (those count that came before an error)

        watching = asyncio.create_task(watch())
        first = await shown.ask(20, session=session)  # it may have begun before the watcher is there
        result = await client.generate("\n", session=session, max_tokens=300, ignore_eos=True, seed=4)
        await client.close_session(session)
        with pytest.raises(NotFound):  # it is closed
            await watching
    committed = {tree.position + at: token for tree in steps for at, token in enumerate(tree.committed)}
    begins = first.usage.prompt_tokens + 20 + len(result.token_ids)  # at least
    assert committed
    assert max(committed) + 1 >= begins
    text = dict(enumerate(result.token_ids, max(committed) + 1 - len(result.token_ids)))
    assert all(text[position] == token for position, token in committed.items() if position in text)
    drafted = [tree for tree in steps if tree.nodes]
    assert drafted
    for tree in drafted:
        accepted = [node.token for node in tree.nodes if node.accepted]
        assert tuple(accepted) == tree.committed[: len(accepted)]
        assert all(node.parent < at for at, node in enumerate(tree.nodes))
        assert {node.drafter.partition("-")[0] for node in tree.nodes} == {"drafter"}


async def test_a_session_that_does_not_exist_cannot_be_watched(shown: Shown) -> None:
    status, output = await _command("trace", "nobody", "--address", shown.cluster.router_address)
    assert status == 2
    assert "nobody" in output


async def test_trace_draws_the_trees(shown: Shown) -> None:
    async with outrider.AsyncClient(shown.cluster.router_address) as client:
        session = (await client.create_session()).session_id
        drawing = asyncio.create_task(
            _command("trace", session, "--address", shown.cluster.router_address, "--steps", "60")
        )
        await asyncio.sleep(2.0)
        while not drawing.done():
            await client.generate("x = 1\n", session=session, max_tokens=80, ignore_eos=True, seed=4)
        status, output = await drawing
    assert status == 0
    assert output.count("committed, ") == 60
    assert "└── ✓ " in output
