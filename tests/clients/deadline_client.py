#!/usr/bin/env python3
"""The openai package, unmodified, with a patience that is too short for what it asks.

    deadline_client.py http://127.0.0.1:8410/v1

The package tells its read timeout in `x-stainless-read-timeout`. What cannot begin by then is refused at once instead of
being computed for nobody: the client sees a status with a code, and not its own time-out.
"""

import sys
import time

import openai


def ask(client, model, words, **settings):
    text = f"{time.monotonic_ns()} " + "tell " * words
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0, **settings
    )


def main(base_url):
    client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    # As long a prompt as takes some seconds on this machine.
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
    for stream in (False, True):
        impatient = client.with_options(timeout=patience)
        began = time.monotonic()
        try:
            answer = ask(impatient, model, words, stream=stream)
            list(answer)
        except openai.InternalServerError as error:
            told = time.monotonic() - began
            assert error.status_code == 503 and error.code == "deadline_unreachable", error
            assert error.response.headers["x-should-retry"] == "true", error.response.headers
            assert float(error.response.headers["retry-after-ms"]) > 0
            print(f"refused after {told:.3f} s of {patience:.2f} s (stream={stream}): {error}")
        else:
            raise AssertionError("answered")
    # The same with enough time, and nothing of the refused ones is in its way.
    ask(client.with_options(timeout=60 + 10 * took), model, words)
    print("answered with more patience")


if __name__ == "__main__":
    main(sys.argv[1])
