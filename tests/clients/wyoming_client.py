#!/usr/bin/env python3
"""The wyoming package, unmodified, against the workers of a running cotenant.

    wyoming_client.py TTS_SOCKET ASR_SOCKET [TEXT]

Says a text with the voice, has the recogniser hear it, and compares. Every check prints one line; the exit code is 0
when all of them hold.
"""

import asyncio
import sys

from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncClient
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import Synthesize

from checks import check, run


class Context:
    def __init__(self, tts, asr, text="turn on the kitchen light"):
        self.tts, self.asr, self.text = f"unix://{tts}", f"unix://{asr}", text

    async def ask(self, uri, *events, until):
        """Sends events and collects what comes, up to an event of one type."""
        async with AsyncClient.from_uri(uri) as client:
            for event in events:
                await client.write_event(event.event())
            found = []
            while True:
                event = await asyncio.wait_for(client.read_event(), 30)
                assert event is not None, f"closed after {[e.type for e in found]}"
                found.append(event)
                if until.is_type(event.type):
                    return found

    async def say(self):
        """The text as chunks of audio."""
        events = await self.ask(self.tts, Synthesize(text=self.text), until=AudioStop)
        assert AudioStart.is_type(events[0].type), events[0].type
        return [AudioChunk.from_event(event) for event in events if AudioChunk.is_type(event.type)]


@check
async def the_voice_describes_itself(context):
    info = Info.from_event((await context.ask(context.tts, Describe(), until=Info))[-1])
    assert info.tts and info.tts[0].installed and info.tts[0].voices, info
    assert not info.asr, info


@check
async def the_recogniser_describes_itself(context):
    info = Info.from_event((await context.ask(context.asr, Describe(), until=Info))[-1])
    assert info.asr and info.asr[0].installed and info.asr[0].models, info


@check
async def a_ping_is_answered(context):
    for uri in (context.tts, context.asr):
        pong = (await context.ask(uri, Ping(text="hello"), until=Pong))[-1]
        assert Pong.from_event(pong).text == "hello"


@check
async def what_is_said_is_heard(context):
    chunks = await context.say()
    seconds = sum(chunk.seconds for chunk in chunks)
    assert 0.5 < seconds < 20, seconds
    first = chunks[0]
    start = AudioStart(rate=first.rate, width=first.width, channels=first.channels)
    events = await context.ask(context.asr, Transcribe(language="en"), start, *chunks, AudioStop(), until=Transcript)
    heard = Transcript.from_event(events[-1]).text
    assert heard == context.text, heard


@check
async def two_at_once_do_not_mix(context):
    one, other = await asyncio.gather(context.say(), context.say())
    # flite draws noise, so that the samples differ each time; their number does not.
    one, other = (b"".join(chunk.audio for chunk in chunks) for chunks in (one, other))
    assert len(one) == len(other) > 0, (len(one), len(other))


@check
async def a_client_that_leaves_in_the_middle_disturbs_no_other(context):
    async with AsyncClient.from_uri(context.tts) as client:
        await client.write_event(Synthesize(text=" ".join([context.text] * 20)).event())
        event = await asyncio.wait_for(client.read_event(), 30)
        assert event is not None and AudioStart.is_type(event.type), event
    chunks = await context.say()
    first = chunks[0]
    async with AsyncClient.from_uri(context.asr) as client:
        await client.write_event(Transcribe(language="en").event())
        await client.write_event(AudioStart(rate=first.rate, width=first.width, channels=first.channels).event())
        await client.write_event(first.event())
    start = AudioStart(rate=first.rate, width=first.width, channels=first.channels)
    events = await context.ask(context.asr, Transcribe(language="en"), start, *chunks, AudioStop(), until=Transcript)
    assert Transcript.from_event(events[-1]).text == context.text


def main():
    context = Context(*sys.argv[1:4])
    sys.exit(run(context))


if __name__ == "__main__":
    main()
