"""The page at `/` in Chromium: at two widths, light and dark, and over the end and the start of the daemon.

    python page_client.py URL [FOLDER]    puts screenshots into FOLDER
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


def opened(browser, url, faults, width, scheme, motion):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion=motion)
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text))
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
    url, folder = sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else None
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        look(browser, url, folder)
        reconnect(browser, url)
        browser.close()


main()
