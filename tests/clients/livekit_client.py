#!/usr/bin/env python3
"""LiveKit's plugin for OpenAI, unmodified and by its classes, against a running cotenant.

    livekit_client.py http://127.0.0.1:8410 [--rounds N] [--text]
"""

import asyncio
import sys
from typing import Literal

import aiohttp
import pydantic
from livekit import rtc
from livekit.agents import llm
from livekit.plugins import openai

import checks
from checks import check

QUESTION = "turn on the kitchen light"
RATE = 24000


class Light(pydantic.BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


@llm.function_tool
async def set_light(room: Literal["kitchen", "hall"], on: bool) -> str:
    """Switches a light."""
    return "done"


class Context:
    def __init__(self, arguments):
        self.model = arguments.model
        self.url = f"{arguments.host}/v1"

    def llm(self, **settings):
        return openai.LLM(
            model=self.model, base_url=self.url, api_key="unused", max_completion_tokens=160, temperature=0, **settings
        )

    async def speech(self):
        tts = openai.TTS(model="tts", voice="alloy", base_url=self.url, api_key="unused", response_format="pcm")
        return [event.frame async for event in tts.synthesize(QUESTION)]

    def realtime(self, http, **settings):
        return openai.realtime.RealtimeModel(
            model=self.model, voice="alloy", base_url=self.url, api_key="unused", http_session=http, **settings
        )


def asked():
    history = llm.ChatContext()
    history.add_message(role="user", content=QUESTION)
    return history


async def said(stream):
    text, calls = "", []
    async with stream:
        async for chunk in stream:
            if chunk.delta:
                text += chunk.delta.content or ""
                calls += chunk.delta.tool_calls or []
    return text, calls


@check()
async def the_llm_answers_and_calls_tools(context):
    text, _ = await said(context.llm().chat(chat_ctx=asked()))
    assert text
    _, calls = await said(context.llm(tool_choice="required").chat(chat_ctx=asked(), tools=[set_light]))
    assert calls and calls[0].name == "set_light", calls
    Light.model_validate_json(calls[0].arguments)


@check()
async def an_answer_has_the_form_of_a_model_of_pydantic(context):
    text, _ = await said(context.llm().chat(chat_ctx=asked(), response_format=Light))
    Light.model_validate_json(text)


@check()
async def a_cancelled_stream_leaves_the_next_one_served(context):
    stream = context.llm().chat(chat_ctx=asked())
    async for _chunk in stream:
        break
    await stream.aclose()
    assert (await said(context.llm().chat(chat_ctx=asked())))[0]


@check(speech=True)
async def what_the_voice_says_the_recogniser_hears(context):
    stt = openai.STT(model="asr", base_url=context.url, api_key="unused", language="en")
    heard = (await stt.recognize(await context.speech())).alternatives[0].text
    assert heard == QUESTION, heard


async def replied(generation, audio):
    text, frames = "", 0
    async for message in generation.message_stream:
        async for piece in message.text_stream:
            text += piece
        async for frame in message.audio_stream:
            frames += frame.samples_per_channel
    assert text and (frames > RATE // 4 or not audio), (text, frames)
    return text


@check()
async def a_realtime_session_answers_in_text(context):
    async with aiohttp.ClientSession() as http:
        session = context.realtime(http, modalities=["text"]).session()
        errors = []
        session.on("error", lambda error: errors.append(error))
        await session.update_instructions("be brief")
        await session.update_chat_ctx(asked())
        for _ in range(2):
            await replied(await session.generate_reply(instructions="answer in one word"), audio=False)
        await session.aclose()
        assert not errors, errors


@check(speech=True)
async def a_realtime_session_hears_answers_and_is_interrupted(context):
    spoken = await context.speech()
    async with aiohttp.ClientSession() as http:
        model = context.realtime(http)
        session = model.session()
        errors, heard = [], asyncio.get_running_loop().create_future()
        generations = asyncio.Queue()
        session.on("error", lambda error: errors.append(error))
        session.on("generation_created", generations.put_nowait)
        session.on(
            "input_audio_transcription_completed",
            lambda event: event.is_final and not heard.done() and heard.set_result(event.transcript),
        )
        await session.update_instructions("be brief")
        silence = rtc.AudioFrame(bytes(RATE * 2), RATE, 1, RATE)
        for frame in [*spoken, silence]:
            session.push_audio(frame)
        assert (await asyncio.wait_for(heard, 60)) == QUESTION, heard.result()
        await replied(await asyncio.wait_for(generations.get(), 60), audio=True)
        # a second question interrupts, and is answered next
        reply = await session.generate_reply(instructions="tell a story")
        session.interrupt()
        async for message in reply.message_stream:
            async for _piece in message.text_stream:
                pass
        while not generations.empty():
            generations.get_nowait()
        for frame in [*spoken, silence]:
            session.push_audio(frame)
        await replied(await asyncio.wait_for(generations.get(), 60), audio=True)
        await session.aclose()
        assert not errors, errors


if __name__ == "__main__":
    sys.exit(checks.main("LiveKit", __doc__, Context, speech=True))
