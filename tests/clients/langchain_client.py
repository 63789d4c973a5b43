#!/usr/bin/env python3
"""LangChain's classes for OpenAI and Ollama, unmodified, against a running cotenant.

    langchain_client.py http://127.0.0.1:8410 [--rounds N]

With more rounds the checks are repeated, for a server whose memory is being taken meanwhile.
"""

import asyncio
import sys
from typing import Literal

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

import checks
from checks import check

QUESTION = "turn on the kitchen light"


class Light(pydantic.BaseModel):
    """A light to switch."""

    room: Literal["kitchen", "hall"]
    on: bool


@tool
def set_light(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switches a light."""
    return "done"


class Context:
    def __init__(self, arguments):
        openai = {"model": arguments.model, "base_url": f"{arguments.host}/v1", "api_key": "unused"}
        self.models = {
            "openai": ChatOpenAI(max_tokens=160, **openai),
            "responses": ChatOpenAI(max_tokens=160, use_responses_api=True, **openai),
            "ollama": ChatOllama(model=arguments.model, base_url=arguments.host, num_predict=160),
        }


@check()
def an_answer_and_its_usage(context):
    for name, model in context.models.items():
        answer = model.invoke(QUESTION)
        assert answer.text, (name, answer)
        usage = answer.usage_metadata
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], (name, usage)


@check()
def a_stream_is_the_answer_in_one_piece(context):
    for name, model in context.models.items():
        model = model.model_copy(update={"temperature": 0.0})
        whole = model.invoke(QUESTION).text
        chunks = list(model.stream(QUESTION))
        text = "".join(chunk.text for chunk in chunks)
        assert len(chunks) > 1 and text == whole != "", (name, text, whole)


@check()
def a_tool_is_called_and_its_outcome_goes_back(context):
    for name in ("openai", "responses"):
        model = context.models[name]
        called = model.bind_tools([set_light], tool_choice="set_light").invoke(QUESTION)
        [call] = called.tool_calls
        assert not called.invalid_tool_calls and call["name"] == "set_light", (name, called)
        outcome = ToolMessage(set_light.invoke(call["args"]), tool_call_id=call["id"])
        answer = model.bind_tools([set_light], tool_choice="none").invoke([HumanMessage(QUESTION), called, outcome])
        assert answer.text, (name, answer)
    # without a choice the model decides; its prompt contains the tools
    context.models["ollama"].bind_tools([set_light]).invoke(QUESTION)


@check()
def a_structured_output_by_the_default_method(context):
    for name, model in context.models.items():
        light = model.with_structured_output(Light).invoke(QUESTION)
        assert isinstance(light, Light), (name, light)
    raw = context.models["openai"].with_structured_output(Light, method="function_calling").invoke(QUESTION)
    assert isinstance(raw, Light), raw


@check()
def many_at_once(context):
    for name, model in context.models.items():
        answers = model.batch([QUESTION] * 4)
        assert all(answer.text for answer in answers), (name, answers)


@check()
async def a_cancelled_stream_leaves_the_next_one_served(context):
    for name, model in context.models.items():
        async for _chunk in model.astream(QUESTION):
            break
        task = asyncio.create_task(model.ainvoke(QUESTION))
        await asyncio.sleep(0.05)
        task.cancel()
        assert (await model.ainvoke(QUESTION)).text, name


if __name__ == "__main__":
    sys.exit(checks.main("LangChain", __doc__, Context))
