"""The page as a person uses it: by keyboard, in every width and colour, with nothing asked of anybody else."""

from __future__ import annotations

import json
import wave
from pathlib import Path

import pytest
from PIL import Image

from app.engine.request import ModelStatus
from app.engine.tokenizer import ChatTokenizer
from tests.browser.chromium import Tab
from tests.browser.conftest import NODES, Page
from tests.browser.swarm import engines
from tests.support.api_server import serve_engines, settles

pytestmark = pytest.mark.browser
VIEWS = [(1440, 900), (1024, 768), (800, 1100), (390, 844), (320, 640)]


async def test_a_question_is_typed_streamed_and_shown_as_text(page: Page) -> None:
    tab = page.tab
    await page.begins()
    await page.asks("Name three rivers of Europe.")
    await tab.waits("document.querySelector('.answer')?.innerText.length > 40")
    assert await tab.run("!document.querySelector('#stop').hidden"), "it is shown while it comes"
    await page.shows("chat-streaming")
    await page.is_over()
    await page.shows("chat")
    for selector, text in {
        "strong": "Europe",
        "ol > li:nth-child(2)": "The Rhine, which passes Basel and Cologne",
        "pre code": 'for river in ("Danube", "Rhine"):\n    print(river)',
        "blockquote": "A river is never the same twice.",
        "a": "its source",
    }.items():
        assert (await tab.text(f".answer {selector}")).strip() == text
    assert "<script>window.broken = 1</script>" in await page.answer()
    assert await tab.run("window.broken") is None
    assert await tab.run("document.querySelectorAll('.answer :is(script, img, b)').length") == 0
    assert "tokens" in await tab.text(".foot")
    assert await tab.run("document.activeElement.id") == "prompt", "the next question can be typed at once"
    page.is_clean()


async def test_what_was_said_goes_with_the_next_question(page: Page) -> None:
    await page.begins()
    talker = page.served.gateway.library._engines["smollm2"]  # type: ignore[attr-defined]
    await page.asks("hello")
    await page.is_over()
    first = len(talker.requests[0].prompt_ids)
    await page.asks("and then?")
    await page.is_over()
    assert len(talker.requests[1].prompt_ids) > first + 100, "the answer is part of it"
    await page.tab.tab_to("#fresh")
    await page.tab.press("Enter")
    await page.asks("hello")
    await page.is_over()
    assert len(talker.requests[2].prompt_ids) == first, "New forgets"
    page.is_clean()


@pytest.mark.parametrize("way", ["escape", "button"])
async def test_stopping_ends_the_answer_here_and_at_the_engine(page: Page, way: str) -> None:
    tab = page.tab
    await page.begins()
    talker = page.served.gateway.library._engines["smollm2"]  # type: ignore[attr-defined]
    talker.pause_s = 0.1
    await page.asks("hello")
    await tab.waits("document.querySelector('.answer')?.innerText.length > 5")
    if way == "escape":
        await tab.press("Escape")
    else:
        await tab.tab_to("#stop")
        await tab.press("Enter")
    await page.is_over()
    await settles(lambda: talker.num_open == 0)
    assert "stopped" in await tab.text(".foot")
    assert 0 < len(await page.answer()) < 200
    assert await tab.run("document.activeElement.id") == "prompt"
    talker.pause_s = 0.001
    await page.asks("go on")
    await page.is_over()
    page.is_clean()


async def test_everything_is_reached_by_keyboard(page: Page) -> None:
    tab = page.tab
    await page.begins()
    await page.asks("hello")
    await page.is_over()
    await tab.run("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(40):
        await tab.press("Tab")
        seen = await tab.run(
            "(() => { const at = document.activeElement; const style = getComputedStyle(at);"
            " return [at.id || at.textContent.trim(), style.outlineStyle !== 'none' || at.id === 'prompt',"
            " (at.getAttribute('aria-label') || at.textContent || at.labels?.[0]?.textContent || '').trim()]; })()"
        )
        if await tab.run("document.activeElement === document.body"):
            break  # past the last one
        reached.append(seen)
    names = [name for name, _, _ in reached]
    for wanted in ("model", "fresh", "theme", "prompt", "show-options", "send", "Where the time went"):
        assert wanted in names
    assert all(is_seen for name, is_seen, _ in reached if name), "the focus can be seen"
    assert all(said for name, _, said in reached if name), "and it has a name"
    page.is_clean()


async def test_the_time_of_an_answer_is_told_hop_by_hop(page: Page) -> None:
    tab = page.tab
    await page.begins()
    await page.asks("hello")
    await page.is_over()
    assert await tab.run("document.querySelectorAll('#bars rect.network').length") > 10
    assert "network" in await tab.text("#bars-say")
    await tab.run("document.querySelector('#send').focus()")
    await tab.run("[...document.querySelectorAll('.foot button')].at(-1).focus()")
    await tab.press("Enter")
    await tab.waits("document.querySelector('.details table')")
    rows = await tab.run("[...document.querySelectorAll('.details tbody th')].map((one) => one.innerText)")
    assert rows == ["0a1b2c3d", "4e5f6a7b", "8c9dae0f", "together"]
    await page.shows("details")
    page.is_clean()


async def test_the_map_shows_the_route_and_who_sees_what(page: Page) -> None:
    tab = page.tab
    await page.begins()
    said = await tab.text("#route")
    for piece in (
        "This gateway",
        "0a1b2c3d",
        "layers 1–10",
        "relayed · 39 ms",
        "as it claims",
        "sees hidden states",
    ):
        assert piece in said
    assert "Activations can still give it away" in await tab.text("#privacy")
    told = await tab.run("document.querySelector('.models li .strip').getAttribute('aria-label')")
    assert (
        told
        == "layer 0: at home; layers 1–7: several nodes; layers 8–20: one node; layers 21–29: several nodes"
    )
    assert "No node serves layers 10–16" not in await tab.text("#notice")
    await page.takes("half-a-model")
    await tab.waits("document.querySelector('#notice').innerText.includes('No node serves layers 10–16')")
    assert await tab.run(f"{NODES} === 0")
    page.is_clean()


async def test_a_picture_comes_with_previews(page: Page) -> None:
    tab = page.tab
    await page.begins()
    await page.takes("tiny-pictures")
    await tab.tab_to("#show-options")
    await tab.press("Enter")
    await tab.tab_to("#option-seed")
    await tab.write("7")
    await tab.run("document.querySelector('#prompt').focus()")
    await page.asks("a red circle")
    await tab.waits("document.querySelector('.preview')")
    await page.shows("drawing")
    await page.is_over()
    painter = page.served.gateway.library._engines["tiny-pictures"]  # type: ignore[attr-defined]
    assert (painter.requests[0].prompt, painter.requests[0].seed) == ("a red circle", 7)
    assert await tab.run("document.querySelector('.made img').alt") == "Made of: a red circle"
    assert await tab.run("document.querySelector('.made img').naturalWidth") == 64
    assert "seed 7" in await tab.text(".foot")
    assert await tab.text("#tokens-title") == "Time per step"
    page.is_clean()


async def test_a_sound_can_be_played(page: Page) -> None:
    await page.begins()
    await page.takes("composer")
    await page.asks("rain on a roof")
    await page.tab.waits("document.querySelector('.made audio')?.duration > 0.3")
    await page.is_over()
    page.is_clean()


def recording(folder: Path) -> Path:
    path = folder / "said.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * 40_000))
    return path


async def test_a_recording_is_written_down(page: Page, tmp_path: Path) -> None:
    tab = page.tab
    await page.begins()
    await page.takes("scribe")
    await page.asks("")
    assert await tab.run("document.activeElement.id") == "attach", "a recording is needed first"
    await tab.choose_files("#files", recording(tmp_path))
    await tab.waits("document.querySelector('#chips li')")
    await tab.run("document.querySelector('#prompt').focus()")
    await page.asks("")
    await tab.waits("document.querySelector('.foot')?.innerText.includes('a recording of 2.5 s')")
    assert await page.answer() == "Hello there. How are you? Fine --> I <think> & you?"
    page.is_clean()


async def test_texts_are_compared(page: Page) -> None:
    tab = page.tab
    await page.begins()
    await page.takes("librarian")
    await tab.write("a cat\na kitten\nshares")
    await tab.tab_to("#send")
    await tab.press("Enter")
    await tab.waits("document.querySelectorAll('.alike tr').length === 2")
    page.is_clean()


async def test_attachments_go_with_the_question(page: Page, tmp_path: Path) -> None:
    tab = page.tab
    red = tmp_path / "red.png"
    Image.new("RGB", (20, 10), (200, 80, 60)).save(red)
    note = tmp_path / "notes.txt"
    note.write_text("nothing")
    await page.begins()
    assert await tab.run("document.querySelector('#attach').hidden"), "this model takes text alone"
    await page.takes("seer")
    await tab.choose_files("#files", red, recording(tmp_path), note)
    await tab.waits("document.querySelectorAll('#chips li').length === 2")
    assert "does not take notes.txt" in await tab.text("#notice")
    await tab.run("document.querySelector('#prompt').focus()")
    await page.asks("what is it?")
    await tab.waits("document.querySelector('.made .wrong')")
    sent = json.loads(next(text for text in tab.bodies if "seer" in text))
    kinds = [part["type"] for part in sent["messages"][0]["content"]]
    assert kinds == ["image_url", "input_audio", "text"]
    assert sent["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert sent["messages"][0]["content"][1]["input_audio"]["format"] == "wav"
    assert tab.outside(page.served.url) == []


async def test_failures_are_told_in_words(page: Page) -> None:
    tab = page.tab
    await page.begins()
    talker = page.served.gateway.library._engines["smollm2"]  # type: ignore[attr-defined]

    async def fail(number: int) -> None:
        if number == 20:
            raise RuntimeError("a secret of ours")

    talker.before_token = fail
    await page.asks("hello")
    await tab.waits("document.querySelector('.made .wrong')")
    assert "Internal error" in await tab.text(".made .wrong")
    assert len(await page.answer()) > 5, "what came before stays"
    talker.status = ModelStatus("partial", 30, ((3, 9),))
    await page.asks("again")
    await tab.waits("document.querySelectorAll('.made .wrong').length === 2")
    assert "No node serves layers 3:9" in await tab.run(
        "document.querySelectorAll('.made .wrong')[1].innerText"
    )
    assert await tab.run("document.querySelector('.made .wrong').getAttribute('role')") == "alert"


async def test_a_gateway_that_is_gone_is_told_and_comes_back(page: Page) -> None:
    tab = page.tab
    await page.begins()
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await tab.send("Network.emulateNetworkConditions", offline=True, **offline)
    await page.asks("hello")
    await tab.waits("document.querySelector('.made .wrong')?.innerText.includes('does not answer')")
    await tab.send("Network.emulateNetworkConditions", offline=False, **offline)
    await page.asks("hello")
    await page.is_over()
    assert "Europe" in await page.answer()


async def test_the_key_is_asked_for_and_kept_in_the_tab_alone(tab: Tab, tokenizer: ChatTokenizer) -> None:
    async with serve_engines(*engines(tokenizer), api_keys="open-sesame") as served:
        page = Page(tab, served)
        await tab.open(f"{served.url}/")
        await tab.waits("document.querySelector('#key-dialog').open")
        await tab.write("wrong")
        await tab.press("Enter")
        await tab.waits("document.querySelector('#key-wrong').innerText.includes('not one of')")
        await tab.write("open-sesame")
        await tab.press("Enter")
        await tab.waits(f"{NODES} === 3")
        await page.asks("hello")
        await page.is_over()
        assert "Europe" in await page.answer()
        assert await tab.run("sessionStorage.getItem('diffuse.key')") == "open-sesame"
        assert await tab.run("JSON.stringify(localStorage)") == "{}"
        assert await tab.run("document.cookie") == ""
        assert not any("open-sesame" in address for address in tab.addresses)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", VIEWS, ids=[f"{width}x{height}" for width, height in VIEWS])
async def test_nothing_is_cut_off_in_any_width(page: Page, size: tuple[int, int], dark: bool) -> None:
    tab, (width, height) = page.tab, size
    await page.begins(width=width, height=height, dark=dark)
    await tab.run("document.querySelector('#prompt').focus()")
    await page.asks("Name three rivers of Europe.")
    await page.is_over()
    await page.shows(f"{width}-{'dark' if dark else 'light'}")
    assert await tab.run("document.documentElement.scrollWidth") <= width
    for selector in ("#send", "#model", "#prompt"):
        box = await tab.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        assert 0 <= box["left"] < box["right"] <= width
        assert 0 <= box["top"] < box["bottom"] <= height
    if width < 960:
        assert await tab.run("document.querySelector('#swarm').offsetParent === null")
        await tab.tab_to("#show-swarm")
        await tab.press("Enter")
        await page.shows(f"{width}-{'dark' if dark else 'light'}-route")
    assert await tab.run("document.querySelector('#route .node').offsetParent !== null")
    assert await tab.run(
        "document.querySelector('#swarm').scrollWidth <= document.querySelector('#swarm').clientWidth"
    )
    page.is_clean()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_words_can_be_read_against_their_ground(page: Page, dark: bool) -> None:
    """WCAG 2.1's contrast of at least 4.5 to 1, over every text that is shown."""
    await page.begins(dark=dark)
    await page.asks("hello")
    await page.is_over()
    assert await page.tab.run(CONTRAST) == []


async def test_the_button_overrides_the_systems_colours_and_is_remembered(page: Page) -> None:
    tab = page.tab
    await page.begins()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await tab.run(ground)
    await tab.tab_to("#theme")
    assert await tab.run("document.activeElement.getAttribute('aria-label')") == "Switch to dark"
    await tab.press("Enter")
    dark = await tab.run(ground)
    assert dark != light
    await tab.run("location.reload()")
    await tab.waits(f"{NODES} === 3")
    assert await tab.run(ground) == dark
    page.is_clean()


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (one) => (one <= .03928 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const ground = (at) => {
    for (; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const faint = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const at = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !at.offsetParent || at.closest('option, .hidden, .skip, noscript')) continue;
    const [one, other] = [light(rgba(getComputedStyle(at).color)), light(ground(at))];
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    if (ratio < 4.5) faint.push(`${text.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return faint;
})()"""
