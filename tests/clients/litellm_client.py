#!/usr/bin/env python3
"""litellm, unmodified, against a running cotenant, by each protocol that both speak.

    litellm_client.py http://127.0.0.1:8410 [--rounds N]

With more rounds the checks are repeated, for a server whose memory is being taken meanwhile: what is short is cured by the
package's own retries, so none of them may fail.
"""

import asyncio
import os
import sys
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pydantic

import checks
from checks import check

OVERFLOW_WORDS = 20_000
QUESTION = [{"role": "user", "content": "turn on the kitchen light"}]


class Light(pydantic.BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


TOOL = {"type": "function", "function": {"name": "set_light", "parameters": Light.model_json_schema()}}


class Context:
    def __init__(self, arguments):
        host, model = arguments.host, arguments.model
        self.routes = {
            f"openai/{model}": {"api_base": f"{host}/v1", "api_key": "unused"},
            f"anthropic/{model}": {"api_base": host, "api_key": "unused"},
            f"ollama_chat/{model}": {"api_base": host},
        }

    def ask(self, route, ask=litellm.completion, **settings):
        settings.setdefault("max_tokens", 24)
        return ask(model=route, messages=QUESTION, num_retries=3, timeout=60, **self.routes[route], **settings)


def whole(choice):
    """A text that was cut says so."""
    assert choice.finish_reason in ("stop", "length"), choice
    return choice.message.content


@check()
def an_answer_by_each_route(context):
    for route in context.routes:
        answer = context.ask(route)
        assert whole(answer.choices[0]), route
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage


@check()
def a_stream_is_the_answer_in_one_piece(context):
    for route in context.routes:
        text = context.ask(route, temperature=0).choices[0].message.content
        chunks = list(context.ask(route, temperature=0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text, route
        assert chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1]


@check()
def a_tool_is_called(context):
    for route in list(context.routes)[:2]:
        choice = {"type": "function", "function": {"name": "set_light"}}
        answer = context.ask(route, tools=[TOOL], tool_choice=choice, max_tokens=160)
        call = answer.choices[0].message.tool_calls[0].function
        assert call.name == "set_light", call
        Light.model_validate_json(call.arguments)


@check()
def a_model_of_pydantic_is_the_form(context):
    for route in context.routes:
        text = context.ask(route, response_format=Light, max_tokens=160).choices[0].message.content
        Light.model_validate_json(text)


@check()
def responses_are_answered(context):
    route = next(iter(context.routes))
    answer = litellm.responses(
        model=route, input="turn on the kitchen light", max_output_tokens=24, **context.routes[route]
    )
    assert answer.output[0].content[0].text, answer


@check()
def a_cancelled_request_leaves_the_next_ones_served(context):
    async def cancelled():
        for route in context.routes:
            stream = await context.ask(route, litellm.acompletion, stream=True, max_tokens=400)
            async for _chunk in stream:
                break
            task = asyncio.create_task(context.ask(route, litellm.acompletion, max_tokens=400))
            await asyncio.sleep(0.05)
            task.cancel()
            answer = await context.ask(route, litellm.acompletion)
            assert whole(answer.choices[0]), route

    asyncio.run(cancelled())


@check()
def errors_have_their_classes(context):
    route = next(iter(context.routes))
    for settings, kind in [
        ({"temperature": 9}, litellm.BadRequestError),
        ({"max_tokens": 0}, litellm.BadRequestError),
    ]:
        try:
            context.ask(route, **settings)
        except kind:
            pass
        else:
            raise AssertionError(f"{settings} was answered")
    # Beyond the context, but within the size limit of a request.
    messages = [{"role": "user", "content": "12345 " * OVERFLOW_WORDS}]
    try:
        litellm.completion(model=route, messages=messages, **context.routes[route])
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("answered")


if __name__ == "__main__":
    sys.exit(checks.main("litellm", __doc__, Context))
