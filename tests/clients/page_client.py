"""The page at `/` in Chromium: at two widths, light and dark, over a shed, and over the end and the start of the daemon.

    python page_client.py URL PROGRAM [FOLDER]    compares the page with PROGRAM status, puts screenshots into FOLDER

PROGRAM is cotenant, which finds the daemon by COTENANT_ENDPOINT. With COTENANT_NODE_CLIENTS, axe-core examines the page.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

# keys of the daemon's file
OPERATOR, VIEWER = "key-of-the-operator", "key-of-the-viewer"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def context_of(browser, key=OPERATOR, **options):
    """A browser whose user has typed a key, as a password and into the form."""
    context = browser.new_context(http_credentials={"username": "me", "password": key}, **options)
    context.add_init_script(f"sessionStorage.setItem('cotenant key', '{key}')")
    return context


def opened(browser, url, faults, width, scheme, motion):
    context = context_of(browser, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion)
    page = context.new_page()
    # browsers ask for an icon, which this page lacks
    page.on("console", lambda message: "favicon" in message.location["url"] or faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith(url) or faults.append(f"asks for {request.url}"))
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("LLM ", timeout=10_000)
    return page


def look(browser, url, folder):
    backgrounds = set()
    for width in (390, 1280):
        for scheme, motion in (("light", "reduce"), ("dark", "no-preference")):
            faults = []
            page = opened(browser, url, faults, width, scheme, motion)
            expect(page.locator("#layers-text")).to_contain_text("in memory")
            expect(page.locator("#owners")).to_contain_text("free")
            expect(page.locator("#level")).to_have_text("normal")
            beyond = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            moves = page.evaluate("getComputedStyle(document.querySelector('#memory > *')).transitionDuration")
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert beyond <= 0, f"{beyond} pixels wider than {width}"
            assert (moves == "0s") == (motion == "reduce"), moves
            if folder:
                page.screenshot(path=folder / f"page-{width}-{scheme}.png", full_page=True)
            assert not faults, faults
            page.context.close()
    assert len(backgrounds) == 2, backgrounds


def examine(browser, url):
    """Looks for faults that hinder people with a keyboard, a screen reader or weak eyes."""
    folder = os.environ.get("COTENANT_NODE_CLIENTS")
    if not folder:
        print("left out: axe-core, because COTENANT_NODE_CLIENTS is not set", file=sys.stderr)
        return
    axe = Path(folder, "node_modules/axe-core/axe.min.js").read_text()
    for scheme in ("light", "dark"):
        # axe needs more than the page's policy allows
        context = context_of(browser, viewport={"width": 390, "height": 900}, color_scheme=scheme, bypass_csp=True)
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#model")).to_contain_text("LLM ", timeout=10_000)
        expect(page.locator(".mark").first).to_be_visible(timeout=10_000)
        page.evaluate(axe)
        found = page.evaluate("axe.run()")["violations"]
        serious = [one for one in found if one["impact"] in ("serious", "critical")]
        assert not serious, [(one["id"], [node["html"] for node in one["nodes"]]) for one in serious]
        context.close()


def size(amount):
    power, unit = next((power, unit) for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if amount >= 2**power or power == 10)
    exact = amount / 2**power
    return f"{int(exact) if exact == int(exact) else f'{exact:.1f}'} {unit}"


def run(program, *arguments):
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def shown_by(program):
    """What the page has to show, by place."""
    status = json.loads(run(program, "status", "-o", "json"))
    held = next(lease["heldBytes"] for lease in status["leases"] if lease["tenant"] == "llm")
    resident, total = status["engine"]["layersResident"], status["engine"]["layersTotal"]
    return {
        "#budget": f"held {size(status['budget']['heldBytes'])}",
        "#owners": f"llm {size(held)}",
        "#layers-text": f"{total} in memory" if resident == total else f"{resident} of {total} in memory",
        "#level": status["pressure"]["level"].removeprefix("PRESSURE_LEVEL_").lower(),
    }


def agree(page, program):
    """Waits until the page shows the state of the program; a state that lasts a second must be shown within it."""
    for _ in range(20):
        wanted, since = shown_by(program), time.monotonic()
        while (behind := time.monotonic() - since) <= 1:
            if all(text in page.locator(place).text_content() for place, text in wanted.items()):
                return wanted, behind
            page.wait_for_timeout(20)
        shown = {place: page.locator(place).text_content() for place in wanted}
        assert shown_by(program) != wanted, f"the page shows {shown} instead of {wanted} after a second"
    raise AssertionError("the state does not settle")


def story(browser, url, program, folder):
    """Asks, sheds, grows back: the page follows, and has a mark with a sentence for each."""
    faults = []
    page = opened(browser, url, faults, 1280, "light", "reduce")
    page.fill("#question", "turn on the kitchen light")
    page.keyboard.press("Enter")
    expect(page.locator("#said .assistant")).to_contain_text("kitchen light", timeout=60_000)
    expect(page.locator("#send")).to_be_visible(timeout=60_000)
    expect(page.locator("#sequences tr").first).to_be_visible(timeout=10_000)
    full, behind = agree(page, program)
    late = [behind]
    run(program, "shed", "2MiB")
    less, behind = agree(page, program)
    late.append(behind)
    expect(page.locator(".mark.shed").first).to_be_visible(timeout=10_000)
    for _ in range(30):
        if shown_by(program)["#owners"] == full["#owners"]:
            break
        subprocess.run([program, "regrow"], check=False, capture_output=True)
        page.wait_for_timeout(500)
    again, behind = agree(page, program)
    late.append(behind)
    assert less["#owners"] != full["#owners"] == again["#owners"], (full, less, again)
    expect(page.locator(".mark.growth").last).to_have_attribute("aria-label", re.compile("growing back .* applied after"), timeout=10_000)
    # by keyboard: from the last mark back to the shed
    page.locator(".mark[tabindex='0']").focus()
    for _ in range(20):
        if "an operator asked for 2 MiB" in page.locator("#reading").text_content():
            break
        page.keyboard.press("ArrowLeft")
    expect(page.locator("#reading")).to_contain_text("an operator asked for 2 MiB; the engine sheds")
    expect(page.locator("#reading")).to_contain_text("applied after")
    # one line for the shed, with the lines of the journal below it
    shed = page.locator("#events details.shed", has_text="an operator asked for 2 MiB")
    expect(shed).to_have_count(1)
    shed.locator("summary").click()
    expect(shed.locator("li", has_text="weighed candidates")).to_be_visible()
    if folder:
        page.screenshot(path=folder / "page-story.png", full_page=True)
    assert not faults, faults
    print(f"the page was at most {max(late):.2f} s behind", file=sys.stderr)
    page.context.close()


def pid_of(program, name):
    workers = json.loads(run(program, "status", "-o", "json"))["workers"]
    return next(worker for worker in workers if worker["name"] == name).get("pid", 0)


def operate(browser, url, program):
    """An operator's key commands from the page, and a viewer's key only looks."""
    context = context_of(browser, VIEWER)
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("LLM ", timeout=10_000)
    expect(page.locator("#operate")).to_be_hidden()
    context.close()
    faults = []
    page = opened(browser, url, faults, 1280, "light", "reduce")
    page.fill("#shed-size", "1")
    page.locator("#shed button").click()
    expect(page.locator("#outcome")).to_contain_text("Shed 1 MiB: shed ", timeout=10_000)
    page.locator("#regrow").click()
    expect(page.locator("#outcome")).to_contain_text("Grow back: ", timeout=10_000)
    # a restart asks first, and "no" has the focus
    restart, question = page.get_by_role("button", name="Restart ballast"), page.locator("#confirm-text")
    restart.click()
    expect(question).to_have_text("Restart worker ballast? Its requests fail.")
    expect(page.locator("#confirm-no")).to_be_focused()
    page.keyboard.press("Enter")
    expect(question).to_be_hidden()
    expect(page.locator("#outcome")).to_contain_text("Grow back: ")
    before = pid_of(program, "ballast")
    restart.click()
    page.locator("#confirm-yes").click()
    expect(question).to_be_hidden()
    expect(page.locator("#outcome")).to_contain_text("Restart ballast: ", timeout=10_000)
    expect(page.locator("#events")).to_contain_text("an operator (key `chief`) recycles worker `ballast`", timeout=10_000)
    for _ in range(100):
        if pid_of(program, "ballast") not in (0, before):
            break
        page.wait_for_timeout(100)
    assert pid_of(program, "ballast") not in (0, before), before
    assert not faults, faults
    page.context.close()


def reconnect(browser, url):
    page = opened(browser, url, [], 390, "light", "reduce")
    print("watching", flush=True)
    expect(page.locator("#level")).to_have_text("no answer", timeout=30_000)
    expect(page.locator("#lost")).to_contain_text("old")
    print("lost", flush=True)
    expect(page.locator("#lost")).to_be_hidden(timeout=30_000)
    expect(page.locator("#level")).not_to_have_text("no answer")
    # the page continues
    before = page.locator("#run").text_content()
    expect(page.locator("#run")).not_to_have_text(before, timeout=10_000)


def main():
    url, program = sys.argv[1:3]
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        look(browser, url, folder)
        story(browser, url, program, folder)
        operate(browser, url, program)
        examine(browser, url)
        reconnect(browser, url)
        browser.close()


main()
