#!/usr/bin/env python3
"""instructor, unmodified, against a running cotenant. Its openai is older than that of the other clients.

    instructor_client.py http://127.0.0.1:8410 [--rounds N]
"""

import asyncio
import sys
from typing import Literal

import instructor
import pydantic
from openai import AsyncOpenAI, OpenAI

import checks
from checks import check


class Light(pydantic.BaseModel):
    """A light to switch."""

    room: Literal["kitchen", "hall"]
    on: bool


class Context:
    def __init__(self, arguments):
        self.model = arguments.model
        self.openai = OpenAI(base_url=f"{arguments.host}/v1", api_key="unused")
        self.asynchronous = AsyncOpenAI(base_url=f"{arguments.host}/v1", api_key="unused")

    def ask(self, mode, **settings):
        client = instructor.from_openai(self.openai, **({"mode": mode} if mode else {}))
        messages = [{"role": "user", "content": "turn on the kitchen light"}]
        return client.chat.completions.create(
            model=self.model, messages=messages, response_model=Light, max_tokens=120, temperature=0, **settings
        )


@check()
def a_model_of_pydantic_in_every_mode(context):
    for mode in (None, instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        light = context.ask(mode)
        assert isinstance(light, Light), (mode, light)


@check()
def a_partial_model_while_it_is_streamed(context):
    client = instructor.from_openai(context.openai, mode=instructor.Mode.JSON_SCHEMA)
    partials = list(
        client.chat.completions.create_partial(
            model=context.model,
            messages=[{"role": "user", "content": "turn on the kitchen light"}],
            response_model=Light,
            max_tokens=120,
            temperature=0,
        )
    )
    Light.model_validate(partials[-1].model_dump())


@check()
def a_cancelled_request_leaves_the_next_one_served(context):
    async def cancelled():
        client = instructor.from_openai(context.asynchronous, mode=instructor.Mode.JSON_SCHEMA)
        asked = {
            "model": context.model,
            "messages": [{"role": "user", "content": "turn on the kitchen light"}],
            "response_model": Light,
            "max_tokens": 120,
        }
        for _ in range(3):
            task = asyncio.create_task(client.chat.completions.create(**asked))
            await asyncio.sleep(0.05)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                pass
        assert isinstance(await client.chat.completions.create(**asked), Light)

    asyncio.run(cancelled())


if __name__ == "__main__":
    sys.exit(checks.main("instructor", __doc__, Context))
