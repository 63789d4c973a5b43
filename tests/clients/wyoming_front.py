#!/usr/bin/env python3
"""The wyoming package, unmodified, against the Wyoming listener of a running cotenant.

    wyoming_front.py URI [TEXT] [ROUNDS]

Does what Home Assistant does: asks what is there, has a text spoken, has that audio heard, talks with the assistant; and
what a satellite does: speech to speech, with an interruption. Each with a new connection and several on one. Every check
prints one line; the exit code is 0 when all of them hold. Nothing is tried twice.
"""

import asyncio
import sys
import time

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.error import Error
from wyoming.handle import Handled, HandledChunk, HandledStart, HandledStop, NotHandled
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.pipeline import PipelineStage, RunPipeline
from wyoming.tts import (
    Synthesize,
    SynthesizeChunk,
    SynthesizeStart,
    SynthesizeStop,
    SynthesizeStopped,
    SynthesizeVoice,
)

from checks import check, run

# Home Assistant's limit for `describe` (components/wyoming/data.py).
DESCRIBE_LIMIT = 1.0


class Context:
    def __init__(self, uri, text="turn on the kitchen light", rounds="3"):
        self.uri, self.text, self.rounds = uri, text, int(rounds)

    def client(self):
        return AsyncClient.from_uri(self.uri)

    async def until(self, client, wanted, limit=30):
        """Events up to one of the wanted type."""
        found = []
        while True:
            event = await asyncio.wait_for(client.read_event(), limit)
            assert event is not None, f"closed after {[e.type for e in found]}"
            assert not Error.is_type(event.type) or wanted is Error, event.data
            found.append(event)
            if wanted.is_type(event.type):
                return found

    async def ask(self, *events, until):
        """Events up to one of the wanted type, on a connection of their own."""
        async with self.client() as client:
            for event in events:
                await client.write_event(event.event())
            return await self.until(client, until)

    async def say(self, text=None):
        """A text as chunks of audio."""
        events = await self.ask(Synthesize(text=text or self.text), until=AudioStop)
        assert AudioStart.is_type(events[0].type), events[0].type
        return [AudioChunk.from_event(event) for event in events if AudioChunk.is_type(event.type)]

    async def utter(self, client, chunks):
        first = chunks[0]
        start = AudioStart(rate=first.rate, width=first.width, channels=first.channels)
        for event in (start, *chunks, AudioStop()):
            await client.write_event(event.event())


@check
async def describe_is_answered_in_time(context):
    async with context.client() as client:
        for _ in range(20):
            began = time.monotonic()
            await client.write_event(Describe().event())
            info = Info.from_event((await context.until(client, Info, DESCRIBE_LIMIT))[-1])
            assert time.monotonic() - began < DESCRIBE_LIMIT
    assert info.asr and info.asr[0].installed and info.asr[0].models[0].languages, info
    assert info.tts and info.tts[0].installed and info.tts[0].voices, info
    assert info.tts[0].supports_synthesize_streaming, info
    assert info.handle and info.handle[0].installed and info.handle[0].models, info
    assert info.handle[0].supports_handled_streaming, info


@check
async def a_ping_is_answered(context):
    pong = (await context.ask(Ping(text="hello"), until=Pong))[-1]
    assert Pong.from_event(pong).text == "hello"


@check
async def what_is_said_is_heard(context):
    for _ in range(context.rounds):
        chunks = await context.say()
        assert 0.5 < sum(chunk.seconds for chunk in chunks) < 20
        async with context.client() as client:
            for _ in range(2):  # several on one connection
                await client.write_event(Transcribe(language="en").event())
                await context.utter(client, chunks)
                heard = Transcript.from_event((await context.until(client, Transcript))[-1]).text
                assert heard == context.text, heard


@check
async def a_text_in_pieces_is_spoken(context):
    pieces = ["Good night. ", "Sleep", " well."]
    events = await context.ask(
        SynthesizeStart(voice=SynthesizeVoice(language="en")),
        *[SynthesizeChunk(text=piece) for piece in pieces],
        Synthesize(text="".join(pieces)),
        SynthesizeStop(),
        until=SynthesizeStopped,
    )
    kinds = [event.type for event in events]
    assert kinds.count("audio-start") == kinds.count("audio-stop") == 1, kinds
    seconds = sum(AudioChunk.from_event(event).seconds for event in events if AudioChunk.is_type(event.type))
    assert seconds > 1, seconds


@check
async def an_unknown_voice_is_spoken_by_the_default_one(context):
    asked = Synthesize(text="hello", voice=SynthesizeVoice(name="unknown"))
    events = await context.ask(asked, until=AudioStop)
    assert AudioStart.is_type(events[0].type), events[0].type
    assert sum(len(AudioChunk.from_event(e).audio) for e in events if AudioChunk.is_type(e.type)) > 2000


@check
async def the_assistant_answers_the_same_each_time(context):
    answers = set()
    for number in range(context.rounds):
        asked = Transcript(text=context.text, language="en", context={"conversation_id": f"c{number}"})
        events = await context.ask(asked, until=HandledStop)
        assert HandledStart.is_type(events[0].type), events[0].type
        pieces = [HandledChunk.from_event(event).text for event in events if HandledChunk.is_type(event.type)]
        handled = Handled.from_event(events[-2])
        assert handled.text == "".join(pieces) and handled.text.strip(), (handled, pieces)
        assert handled.context["conversation_id"] == f"c{number}", handled
        answers.add(handled.text)
    assert len(answers) == 1, answers


@check
async def speech_goes_in_and_speech_comes_out(context):
    chunks = await context.say()
    async with context.client() as client:
        await client.write_event(RunPipeline(PipelineStage.ASR, PipelineStage.TTS).event())
        for _ in range(context.rounds):
            await context.utter(client, chunks)
            events = await context.until(client, AudioStop)
            assert Transcript.from_event(events[0]).text == context.text, events[0]
            assert not any(NotHandled.is_type(event.type) for event in events)
            seconds = sum(AudioChunk.from_event(event).seconds for event in events if AudioChunk.is_type(event.type))
            assert seconds > 0.3, seconds


@check
async def a_new_utterance_interrupts_the_answer(context):
    chunks = await context.say()
    async with context.client() as client:
        await client.write_event(RunPipeline(PipelineStage.HANDLE, PipelineStage.TTS).event())
        await client.write_event(Transcript(text="tell me a story").event())
        await context.until(client, HandledChunk)
        await client.write_event(RunPipeline(PipelineStage.ASR, PipelineStage.TTS).event())
        await context.utter(client, chunks)
        events = await context.until(client, Transcript)
        assert Transcript.from_event(events[-1]).text == context.text
        await context.until(client, AudioStop)


@check
async def two_at_once_do_not_mix(context):
    async def talk(text):
        chunks = await context.say(text)
        async with context.client() as client:
            await context.utter(client, chunks)
            return Transcript.from_event((await context.until(client, Transcript))[-1]).text

    texts = [context.text, "good night"]
    assert await asyncio.gather(*map(talk, texts)) == texts


def main():
    context = Context(*sys.argv[1:4])
    sys.exit(run(context))


if __name__ == "__main__":
    main()
