#!/usr/bin/env python3
"""Pipecat's services for OpenAI, unmodified and by their classes, against a running cotenant.

    pipecat_client.py http://127.0.0.1:8410 [--rounds N] [--text]
"""

import asyncio
import json
import sys

import openai
from loguru import logger
from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    FunctionCallResultProperties,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStoppedFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.services.openai.tts import OpenAITTSService

import checks
from checks import check

QUESTION = "turn on the kitchen light"
RATE = 24000
ROOM = {"room": {"type": "string", "enum": ["kitchen", "hall"]}}


class Sink(FrameProcessor):
    """Keeps what reaches it, from both sides."""

    def __init__(self):
        super().__init__()
        self.frames = asyncio.Queue()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)

    async def until(self, kind):
        frames = []
        while True:
            frame = await asyncio.wait_for(self.frames.get(), 90)
            assert not isinstance(frame, ErrorFrame), frame
            frames.append(frame)
            if isinstance(frame, kind):
                return frames


class Running:
    """A pipeline while it is open."""

    def __init__(self, *processors):
        self.task = PipelineTask(
            Pipeline(list(processors)), params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
        )

    async def __aenter__(self):
        self.runner = asyncio.create_task(PipelineRunner(handle_sigint=False).run(self.task))
        return self.task

    async def __aexit__(self, *_failure):
        await self.task.queue_frame(EndFrame())
        await asyncio.wait_for(self.runner, 20)


class Context:
    def __init__(self, arguments):
        self.model = arguments.model
        self.url = f"{arguments.host}/v1"

    def llm(self, **settings):
        settings = {"model": self.model, "max_tokens": 40, "temperature": 0.0, **settings}
        return OpenAILLMService(
            api_key="unused", base_url=self.url, settings=OpenAILLMService.Settings(**settings)
        )

    def whole(self):
        """The same answer in one piece."""
        client = openai.OpenAI(base_url=self.url, api_key="unused")
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model=self.model, messages=messages, max_tokens=40, temperature=0)
        return answer.choices[0].message.content

    def realtime(self, **session):
        return OpenAIRealtimeLLMService(
            api_key="unused",
            base_url=f"{self.url.replace('http', 'ws', 1)}/realtime",
            settings=OpenAIRealtimeLLMService.Settings(
                model=self.model, session_properties=events.SessionProperties(**session)
            ),
        )

    async def speech(self):
        tts = OpenAITTSService(
            api_key="unused", base_url=self.url, settings=OpenAITTSService.Settings(model="tts", voice="alloy")
        )
        sink = Sink()
        async with Running(tts, sink) as task:
            await task.queue_frame(TTSSpeakFrame(QUESTION))
            frames = await sink.until(TTSStoppedFrame)
        return b"".join(frame.audio for frame in frames if isinstance(frame, TTSAudioRawFrame))


def text_of(frames):
    return "".join(frame.text for frame in frames if isinstance(frame, LLMTextFrame))


@check()
async def the_llm_answers(context):
    sink, history = Sink(), LLMContext([{"role": "user", "content": QUESTION}])
    pair = LLMContextAggregatorPair(history)
    whole = await asyncio.to_thread(context.whole)
    async with Running(pair.user(), context.llm(), sink, pair.assistant()) as task:
        await task.queue_frame(LLMRunFrame())
        text = text_of(await sink.until(LLMFullResponseEndFrame))
        assert text == whole != "", (text, whole)
        await task.queue_frame(LLMRunFrame())
        assert text_of(await sink.until(LLMFullResponseEndFrame))


@check()
async def a_tool_is_called(context):
    calls = asyncio.Queue()

    async def set_light(params):
        calls.put_nowait(params.arguments)
        await params.result_callback({"done": True}, properties=FunctionCallResultProperties(run_llm=False))

    llm = context.llm(max_tokens=160)
    llm.register_function("set_light", set_light)
    schema = FunctionSchema(name="set_light", description="Switches a light.", properties=ROOM, required=["room"])
    history = LLMContext(
        [{"role": "user", "content": QUESTION}],
        tools=ToolsSchema(standard_tools=[schema]),
        tool_choice={"type": "function", "function": {"name": "set_light"}},
    )
    pair = LLMContextAggregatorPair(history)
    async with Running(pair.user(), llm, Sink(), pair.assistant()) as task:
        await task.queue_frame(LLMRunFrame())
        arguments = await asyncio.wait_for(calls.get(), 90)
    assert arguments["room"] in ROOM["room"]["enum"], arguments


@check()
async def an_answer_follows_a_schema(context):
    schema = {"type": "object", "properties": ROOM, "required": ["room"]}
    form = {"type": "json_schema", "json_schema": {"name": "light", "schema": schema}}
    sink, history = Sink(), LLMContext([{"role": "user", "content": QUESTION}])
    pair = LLMContextAggregatorPair(history)
    llm = context.llm(max_tokens=160, extra={"response_format": form})
    async with Running(pair.user(), llm, sink, pair.assistant()) as task:
        await task.queue_frame(LLMRunFrame())
        said = json.loads(text_of(await sink.until(LLMFullResponseEndFrame)))
    assert set(said) == {"room"} and said["room"] in ROOM["room"]["enum"], said


@check()
async def an_interruption_leaves_the_next_answer_served(context):
    sink, history = Sink(), LLMContext([{"role": "user", "content": QUESTION}])
    pair = LLMContextAggregatorPair(history)
    async with Running(pair.user(), context.llm(max_tokens=400), sink, pair.assistant()) as task:
        await task.queue_frame(LLMRunFrame())
        await sink.until(LLMTextFrame)
        await task.queue_frame(InterruptionFrame())
        await sink.until(InterruptionFrame)
        await task.queue_frame(LLMRunFrame())
        assert text_of(await sink.until(LLMFullResponseEndFrame))


@check()
async def a_realtime_session_answers_in_text(context):
    sink, history = Sink(), LLMContext([{"role": "user", "content": QUESTION}])
    pair = LLMContextAggregatorPair(history)
    session = context.realtime(output_modalities=["text"], instructions="be brief")
    async with Running(pair.user(), session, sink, pair.assistant()) as task:
        await task.queue_frame(LLMRunFrame())
        assert text_of(await sink.until(LLMFullResponseEndFrame))


@check(speech=True)
async def a_realtime_session_hears_and_answers(context):
    spoken = await context.speech()
    assert len(spoken) > RATE // 2, len(spoken)
    above, sink, history = Sink(), Sink(), LLMContext([])
    pair = LLMContextAggregatorPair(history)
    session = context.realtime(
        instructions="be brief",
        audio=events.AudioConfiguration(
            input=events.AudioInput(
                transcription=events.InputAudioTranscription(model="asr", language="en"),
                turn_detection=events.TurnDetection(silence_duration_ms=400),
            )
        ),
    )
    async with Running(above, session, sink) as task:
        await task.queue_frame(LLMRunFrame())
        audio = spoken + bytes(RATE * 2)
        for start in range(0, len(audio), 4800):
            frame = InputAudioRawFrame(audio=audio[start : start + 4800], sample_rate=RATE, num_channels=1)
            await task.queue_frame(frame)
        heard = (await above.until(TranscriptionFrame))[-1].text
        assert heard == QUESTION, heard
        frames = await sink.until(LLMFullResponseEndFrame)
        sound = sum(len(frame.audio) for frame in frames if isinstance(frame, TTSAudioRawFrame))
        assert text_of(frames) and sound > RATE // 4, (text_of(frames), sound)


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    sys.exit(checks.main("Pipecat", __doc__, Context, speech=True))
