#!/usr/bin/env python3
"""The openai and anthropic packages, unmodified, with a patience that is too short for what it asks.

    deadline_client.py http://127.0.0.1:8410/v1

They state their read timeout in `x-stainless-read-timeout`. What cannot begin by then is refused at once instead of
being computed without a reader: the client sees a status with a code, and not its own time-out.
"""

import sys
import time

import anthropic
import openai


def prompt(words):
    """No two of them begin alike."""
    return f"{time.monotonic_ns()} " + "tell " * words


def ask(client, model, words, **settings):
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt(words)}], max_tokens=4, temperature=0, **settings
    )


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    # A prompt long enough to take some seconds on this machine.
    words = 500
    while True:
        began = time.monotonic()
        ask(client, model, words)
        took = time.monotonic() - began
        if took > 2 or words >= 16_000:
            break
        words *= 2
    print(f"a prompt of {words} words takes {took:.2f} s")
    patience = took / 4
    impatient = client.with_options(timeout=patience)
    claude = anthropic.Anthropic(
        base_url=base_url.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=patience
    )
    text = [{"role": "user", "content": prompt(words)}]
    asked = {"model": model, "temperature": 0}
    for name, request, status_error in [
        ("a chat", lambda: ask(impatient, model, words), openai.InternalServerError),
        ("a streamed chat", lambda: list(ask(impatient, model, words, stream=True)), openai.InternalServerError),
        (
            "a response",
            lambda: impatient.responses.create(input=prompt(words), max_output_tokens=16, **asked),
            openai.InternalServerError,
        ),
        (
            "a message",
            lambda: claude.messages.create(model=model, messages=text, max_tokens=4),
            anthropic.InternalServerError,
        ),
    ]:
        began = time.monotonic()
        try:
            request()
        except status_error as error:
            refused = time.monotonic() - began
            assert error.status_code in (503, 529) and "deadline_unreachable" in error.response.text, error
            assert error.response.headers["x-should-retry"] == "true", error.response.headers
            assert float(error.response.headers["retry-after-ms"]) > 0
            assert refused < patience / 2, f"{name}: refused after {refused:.3f} s only"
            print(f"{name}: refused after {refused:.3f} s of {patience:.2f} s: {error}")
        else:
            raise AssertionError(f"{name} was answered")
    # The same with enough time; the refused requests do not interfere.
    ask(client.with_options(timeout=60 + 10 * took), model, words)
    print("answered with more patience")


if __name__ == "__main__":
    main(sys.argv[1])
