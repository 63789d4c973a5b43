#!/usr/bin/env python3
"""The openai package, unmodified, against a running cotenant.

    openai_client.py http://127.0.0.1:8410/v1 [--uds PATH] [--scripted] [--brief]

Every check prints one line; the exit code is 0 when all of them hold. Checks that need a server which fails on
demand run with --scripted only, where a line `script: …` in the prompt says how.
"""

import argparse
import base64
import io
import json
import sys
import time
import wave
from typing import Literal

import httpx2
import openai
import pydantic
from openai import OpenAI

import checks
from checks import check


class Context:
    def __init__(self, arguments):
        self.base_url = arguments.base_url
        self.uds = arguments.uds
        self.scripted = arguments.scripted
        self.say = arguments.say
        self.client = self.make_client()
        self.model = arguments.model or self.client.models.list().data[0].id

    def make_client(self, **settings):
        if self.uds:
            settings["http_client"] = httpx2.Client(transport=httpx2.HTTPTransport(uds=self.uds))
        return OpenAI(base_url=self.base_url, api_key="unused", **settings)

    def ask(self, text="turn on the light", client=None, **settings):
        return (client or self.client).chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": text}], **settings
        )


@check()
def models_are_listed_and_found(context):
    assert context.model in [model.id for model in context.client.models.list()]
    model = context.client.models.retrieve(context.model)
    assert (model.id, model.object, model.owned_by) == (context.model, "model", "cotenant")


@check()
def an_unknown_model_is_not_found(context):
    try:
        context.client.models.retrieve("no-such-model")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error.code
        assert error.param == "model", error.param
        assert error.type == "invalid_request_error", error.type
        assert error.request_id, "no x-request-id"
    else:
        raise AssertionError("found")
    try:
        context.client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "hi"}])
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error.code
    else:
        raise AssertionError("answered")


@check()
def an_answer_in_one_piece(context):
    answer = context.ask(max_tokens=32, temperature=0, seed=1)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.message.content, choice
    assert choice.finish_reason in ("stop", "length"), choice.finish_reason
    usage = answer.usage
    assert usage.prompt_tokens > 0 and usage.completion_tokens > 0, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id, "no x-request-id"


@check()
def a_stream_says_the_same(context):
    settings = {"max_tokens": 32, "temperature": 0, "seed": 1}
    whole = context.ask(**settings).choices[0].message.content
    chunks = list(context.ask(stream=True, stream_options={"include_usage": True}, **settings))
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks[-1]
    assert last.choices == [] and last.usage.total_tokens > 0, last
    assert all(chunk.usage is None for chunk in chunks[:-1])
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] in ("stop", "length") and not any(reasons[:-1]), reasons
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole, (text, whole)


@check()
def a_stream_may_be_left_early(context):
    with context.ask(stream=True, max_tokens=256) as stream:
        next(iter(stream))
    assert context.ask(max_tokens=8).choices[0].message.content is not None


@check()
def the_length_is_obeyed(context):
    if context.scripted:
        return
    answer = context.ask(max_completion_tokens=2)
    assert answer.usage.completion_tokens <= 2, answer.usage
    assert answer.choices[0].finish_reason in ("length", "stop")


@check()
def a_wrong_value_is_a_bad_request(context):
    for settings, param in [({"temperature": 9}, "temperature"), ({"n": 2}, "n"), ({"top_p": 2}, "top_p")]:
        try:
            context.ask(**settings)
        except openai.BadRequestError as error:
            assert error.param == param and error.code == "invalid_value", error
        else:
            raise AssertionError(f"{settings} was accepted")


@check()
def a_raw_answer_has_its_headers(context):
    raw = context.client.chat.completions.with_raw_response.create(
        model=context.model,
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
        max_tokens=8,
        extra_headers={"x-request-id": "from-the-client"},
        extra_body={"service_tier": "auto", "something_new": {"a": 1}},
        logit_bias={"1": 1},
    )
    assert raw.headers["x-request-id"] == "from-the-client"
    assert raw.headers["x-cotenant-ignored"] == "logit_bias, something_new", raw.headers


class Light(pydantic.BaseModel):
    """What a client may want to read out of an answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    room: Literal["kitchen", "hall"]
    level: int = pydantic.Field(ge=0, le=9)


class Plan(pydantic.BaseModel):
    """A schema with definitions, lists and choices."""

    model_config = pydantic.ConfigDict(extra="forbid")
    lights: list[Light] = pydantic.Field(min_length=1, max_length=1)
    on: bool | None


LIGHT_TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"type": "string", "enum": ["kitchen", "hall"]}},
            "required": ["room"],
            "additionalProperties": False,
        },
    },
}


@check(long=True)
def an_answer_follows_the_schema_of_the_client(context):
    if context.scripted:
        return
    for form, settings in [(Light, {"temperature": 0}), (Plan, {"temperature": 1.5, "seed": 7})]:
        answer = context.client.chat.completions.parse(
            model=context.model,
            messages=[{"role": "user", "content": "turn on the kitchen light"}],
            response_format=form,
            **settings,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop", choice
        assert isinstance(choice.message.parsed, form), choice
    with context.client.chat.completions.stream(
        model=context.model,
        messages=[{"role": "user", "content": "turn on the hall light"}],
        response_format=Light,
        temperature=0,
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Light), parsed


@check(long=True)
def any_object_is_json_unless_the_length_cuts_it(context):
    if context.scripted:
        return
    answer = context.ask(response_format={"type": "json_object"}, temperature=1, seed=1, max_tokens=24)
    choice = answer.choices[0]
    assert choice.message.content.startswith("{"), choice
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict), choice
    else:
        assert choice.finish_reason == "length", choice


@check()
def a_schema_that_cannot_be_kept_is_a_bad_request(context):
    if context.scripted:
        return
    for schema, word in [
        ({"$dynamicRef": "#light"}, "$dynamicRef"),
        ({"type": "rectangle"}, "rectangle"),
        ({"type": "array", "minItems": 10**9}, "minItems"),
    ]:
        try:
            context.ask(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        except openai.BadRequestError as error:
            assert error.param == "response_format.json_schema.schema" and word in error.message, error
        else:
            raise AssertionError(f"{schema} was taken")


@check(long=True)
def a_tool_that_must_be_called_is_called(context):
    if context.scripted:
        return
    settings = {"tools": [LIGHT_TOOL], "temperature": 1, "seed": 3}
    whole = context.ask(tool_choice="required", **settings).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None, whole
    [call] = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.id.startswith("call_") and call.function.name == "set_light", call
    assert arguments["room"] in ("kitchen", "hall"), arguments
    name, text, reasons = "", "", []
    named = {"type": "function", "function": {"name": "set_light"}}
    for chunk in context.ask(tool_choice=named, stream=True, **settings):
        reasons.append(chunk.choices[0].finish_reason)
        for piece in chunk.choices[0].delta.tool_calls or []:
            assert piece.index == 0
            name += piece.function.name or ""
            text += piece.function.arguments or ""
    assert (name, json.loads(text), reasons[-1]) == ("set_light", arguments, "tool_calls"), (name, text, reasons)


def respond(context, text="turn on the light", **settings):
    return context.client.responses.create(model=context.model, input=text, **settings)


@check()
def a_response_is_complete_or_says_what_cut_it(context):
    answer = respond(context, instructions="be brief", max_output_tokens=16, temperature=0)
    assert answer.object == "response" and answer.output_text, answer
    if answer.status == "incomplete":
        assert answer.incomplete_details.reason == "max_output_tokens", answer
    else:
        assert answer.status == "completed", answer
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens, answer.usage
    with context.client.responses.stream(
        model=context.model,
        input="turn on the light",
        instructions="be brief",
        max_output_tokens=16,
        temperature=0,
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text == events[-1].response.output_text, (text, answer.output_text)
    assert context.client.responses.input_tokens.count(model=context.model, input="hi").input_tokens > 0


@check()
def what_a_response_would_need_kept_is_refused_by_name(context):
    for settings, param in [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ]:
        try:
            respond(context, **settings)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{settings} was accepted")


@check(long=True)
def a_response_follows_the_schema_and_calls_the_tool(context):
    if context.scripted:
        return
    answer = context.client.responses.parse(
        model=context.model, input="turn on the kitchen light", text_format=Light, temperature=0
    )
    assert answer.status == "completed" and isinstance(answer.output_parsed, Light), answer
    tool = {"type": "function", "strict": True, **LIGHT_TOOL["function"]}
    answer = respond(context, tools=[tool], tool_choice="required")
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert json.loads(call.arguments)["room"] in ("kitchen", "hall"), call
    outcome = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    said = [{"role": "user", "content": "turn on the light"}, *answer.output, outcome]
    answer = respond(context, said, tools=[tool], tool_choice="none", max_output_tokens=16)
    assert answer.output[-1].type == "message", answer


@check(needs_script=True)
def a_failure_in_a_response_is_an_event_and_an_error(context):
    kinds = []
    try:
        for event in respond(context, "script: lose the engine", stream=True):
            kinds.append(event.type)
    except openai.APIError as error:
        assert error.code == "engine_lost", error
        assert kinds[-1] == "response.failed", kinds
    else:
        raise AssertionError("no error")


@check()
def a_completion_goes_on_with_the_text(context):
    settings = {"model": context.model, "prompt": "once upon a time", "max_tokens": 8, "temperature": 0}
    whole = context.client.completions.create(**settings)
    assert whole.object == "text_completion" and whole.choices[0].finish_reason in ("stop", "length"), whole
    chunks = list(context.client.completions.create(stream=True, **settings))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    try:
        context.client.completions.create(suffix="x", **settings)
    except openai.BadRequestError as error:
        assert error.param == "suffix", error
    else:
        raise AssertionError("answered")


@check()
def texts_become_vectors_where_a_model_for_them_is_there(context):
    for model in [model.id for model in context.client.models.list() if model.task == "embedding"]:
        texts = ["turn on the light", "turn off the light"]
        # The client requests base64 unless told otherwise.
        coded = context.client.embeddings.create(model=model, input=texts)
        plain = context.client.embeddings.create(model=model, input=texts, encoding_format="float")
        for one, other in zip(coded.data, plain.data):
            assert one.index == other.index
            assert all(abs(a - b) < 1e-6 for a, b in zip(one.embedding, other.embedding, strict=True))
        assert len(coded.data) == 2 and coded.usage.prompt_tokens > 0, coded.usage
        short = context.client.embeddings.create(model=model, input=texts[0], dimensions=16)
        assert len(short.data[0].embedding) == 16
        try:
            context.client.embeddings.create(model=model, input=[[1, 2, 3]])
        except openai.BadRequestError as error:
            assert error.param == "input", error
        else:
            raise AssertionError("tokens were taken for text")


@check(speech=True)
def speech_as_pcm_wav_and_what_is_asked_by_default(context):
    def speak(**settings):
        return context.client.audio.speech.with_raw_response.create(
            model="tts-1", voice="alloy", input=context.say, **settings
        )

    pcm = speak(response_format="pcm")
    assert pcm.headers["content-type"] == "audio/pcm"
    assert len(pcm.content) % 2 == 0 and len(pcm.content) >= 24000, len(pcm.content)
    if context.scripted:
        assert len(pcm.content) == 48000, len(pcm.content)
    wav = speak(response_format="wav")
    assert wav.headers["content-type"] == "audio/wav" and "x-cotenant-format" not in wav.headers
    with wave.open(io.BytesIO(wav.content)) as reader:
        assert (reader.getframerate(), reader.getnchannels(), reader.getsampwidth()) == (24000, 1, 2)
        assert len(reader.readframes(reader.getnframes())) == 2 * reader.getnframes() > 0
    aac = speak(response_format="aac")
    assert aac.headers["content-type"] == "audio/wav" and aac.headers["x-cotenant-format"] == "wav"
    for name, kind in [("flac", "audio/flac"), ("mp3", "audio/mpeg"), ("opus", "audio/ogg")]:
        encoded = speak(response_format=name)
        assert encoded.headers["content-type"] == kind and 500 < len(encoded.content) < len(pcm.content), name
    default = speak()
    assert default.headers["content-type"] == "audio/mpeg" and default.content[:2] == b"\xff\xf3", default.headers


@check(speech=True)
def speech_comes_in_pieces(context):
    with context.client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=context.say, response_format="pcm"
    ) as response:
        assert sum(len(piece) for piece in response.iter_bytes(4096)) >= 24000


@check(speech=True)
def an_unknown_voice_is_spoken_by_the_default_one_named_in_a_header(context):
    raw = context.client.audio.speech.with_raw_response.create(model="tts-1", voice="no-such-voice", input="hi")
    assert raw.headers["x-cotenant-voice"] not in ("", "no-such-voice"), raw.headers
    assert len(raw.content) > 1000, len(raw.content)


@check(speech=True)
def speech_is_understood_in_every_form(context):
    spoken = context.client.audio.speech.create(
        model="tts-1", voice="alloy", input=context.say, response_format="wav"
    ).content

    def hear(**settings):
        return context.client.audio.transcriptions.create(
            model="whisper-1", file=("speech.wav", spoken, "audio/wav"), language="en", **settings
        )

    text = hear().text
    print(f"      heard: {text!r}")
    assert isinstance(text, str)
    assert hear(response_format="text").strip() == text
    assert " --> " in hear(response_format="srt") and text in hear(response_format="srt")
    assert hear(response_format="vtt").startswith("WEBVTT")
    verbose = hear(response_format="verbose_json")
    assert verbose.text == text and verbose.language == "english" and verbose.duration > 0.3, verbose
    assert "".join(segment.text for segment in verbose.segments or []) == text
    flac = context.client.audio.speech.create(
        model="tts-1", voice="alloy", input=context.say, response_format="flac"
    ).content
    again = context.client.audio.transcriptions.create(model="whisper-1", file=("speech.flac", flac))
    assert again.text == text, again
    events = list(hear(stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text == text, events
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == text


@check(speech=True)
def broken_audio_is_a_bad_request(context):
    for name, content in [("a.wav", b"RIFF"), ("a.mp3", b"ID3 not a wav"), ("empty.wav", b"")]:
        try:
            context.client.audio.transcriptions.create(model="whisper-1", file=(name, content))
        except openai.BadRequestError as error:
            assert error.param == "file" and error.code == "invalid_audio", error
        else:
            raise AssertionError(f"{name} was taken")


def session(context, connection, **settings):
    """Sets a session up; every event is checked to be none of an error."""
    connection.session.update(session={"type": "realtime", **settings})
    return until(connection, "session.updated")[-1].session


def until(connection, kind, tolerated=()):
    events = []
    for event in connection:
        assert event.type != "error" or event.error.code in tolerated, event.error
        events.append(event)
        if event.type == kind:
            return events
    raise AssertionError(f"closed before {kind}")


def say(connection, text):
    content = [{"type": "input_text", "text": text}]
    connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    until(connection, "conversation.item.done")


@check()
def a_realtime_session_answers_in_text_again_and_again(context):
    if context.uds:  # the package connects over TCP only
        return
    with context.client.realtime.connect(model=context.model) as connection:
        settings = session(context, connection, output_modalities=["text"], instructions="be brief")
        assert settings.output_modalities == ["text"], settings
        answers = []
        for _ in range(3):
            say(connection, "turn on the light")
            connection.response.create(response={"max_output_tokens": 12})
            events = until(connection, "response.done")
            response = events[-1].response
            assert response.status in ("completed", "incomplete"), response.status_details
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text and text == response.output[0].content[0].text, response
            assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
            answers.append(text)
        connection.conversation.item.retrieve(item_id=response.output[0].id)
        assert until(connection, "conversation.item.retrieved")[-1].item.content[0].text == answers[-1]


@check(long=True)
def a_realtime_response_is_cancelled_and_the_next_one_is_given(context):
    if context.uds or context.scripted:
        return
    with context.client.realtime.connect(model=context.model) as connection:
        session(context, connection, output_modalities=["text"])
        say(connection, "turn on the light")
        connection.response.create()
        until(connection, "response.output_text.delta")
        connection.response.cancel()
        response = until(connection, "response.done")[-1].response
        # a short answer may have ended already, and then there is nothing to cancel
        assert response.status in ("cancelled", "completed"), response
        tolerated = ("response_cancel_not_active",) if response.status == "completed" else ()
        connection.response.create(response={"max_output_tokens": 4})
        last = until(connection, "response.done", tolerated)[-1].response
        assert last.status in ("completed", "incomplete"), last


@check()
def a_realtime_session_calls_tools(context):
    if context.uds or context.scripted:
        return
    tool = {
        "type": "function",
        "name": "light",
        "description": "switches the light",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    }
    with context.client.realtime.connect(model=context.model) as connection:
        session(context, connection, output_modalities=["text"], tools=[tool])
        say(connection, "turn on the light")
        connection.response.create(response={"tool_choice": {"type": "function", "name": "light"}})
        call = until(connection, "response.done")[-1].response.output[0]
        assert (call.type, call.name, call.status) == ("function_call", "light", "completed"), call
        assert isinstance(json.loads(call.arguments)["on"], bool), call.arguments
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        connection.conversation.item.create(item=output)
        connection.response.create(response={"tool_choice": "none", "max_output_tokens": 12})
        assert until(connection, "response.done")[-1].response.output[0].type == "message"


@check()
def a_wrong_realtime_event_is_an_error_and_the_session_goes_on(context):
    if context.uds:
        return
    with context.client.realtime.connect(model=context.model) as connection:
        connection.session.update(session={"type": "realtime", "audio": {"input": {"format": {"type": "audio/pcmu"}}}})
        for event in connection:
            if event.type == "error":
                break
        assert event.error.param == "session.audio.input.format", event.error
        session(context, connection, output_modalities=["text"])
    try:
        with context.client.realtime.connect(model="no-such-model"):
            raise AssertionError("connected")
    except Exception as error:
        assert "404" in str(error), error


@check(speech=True)
def a_spoken_question_is_heard_answered_and_spoken(context):
    if context.uds:
        return
    spoken = context.client.audio.speech.create(
        model="tts-1", voice="alloy", input=context.say, response_format="pcm"
    ).content
    silence = bytes(24000 * 2)
    with context.client.realtime.connect(model=context.model) as connection:
        session(context, connection, audio={"input": {"transcription": {"model": "whisper-1", "language": "en"}}})
        for audio in (silence[:9600], spoken, silence):
            for start in range(0, len(audio), 4800):
                piece = base64.b64encode(audio[start : start + 4800]).decode()
                connection.input_audio_buffer.append(audio=piece)
        events = until(connection, "response.done")
        kinds = [event.type for event in events]
        heard = [event.transcript for event in events if event.type.endswith("transcription.completed")]
        print(f"      heard: {heard!r}")
        assert kinds[0] == "input_audio_buffer.speech_started" and all(heard), kinds
        response = events[-1].response
        assert response.status == "completed", response
        audio = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta")
        said = "".join(e.delta for e in events if e.type == "response.output_audio_transcript.delta")
        assert len(audio) > 24000 // 2 and said == response.output[0].content[0].transcript, (len(audio), said)
        item = response.output[0].id
        connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=100)
        until(connection, "conversation.item.truncated")


@check(needs_script=True)
def a_shortage_is_cured_by_the_clients_own_retry(context):
    began = time.monotonic()
    raw = context.client.chat.completions.with_raw_response.create(
        model=context.model, messages=[{"role": "user", "content": "script: refuse twice"}]
    )
    assert raw.retries_taken == 2, raw.retries_taken
    assert time.monotonic() - began < 5
    assert raw.parse().choices[0].message.content


@check(needs_script=True)
def a_prompt_beyond_the_context_is_not_retried(context):
    try:
        context.ask("script: too long")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded" and error.param == "messages", error
    else:
        raise AssertionError("answered")


@check(needs_script=True)
def a_failure_in_the_stream_is_an_api_error_with_its_code(context):
    text = ""
    try:
        for chunk in context.ask("script: lose the engine", stream=True):
            text += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        assert error.code == "engine_lost" and error.type == "server_error", error
        assert text, "no text before the error"
    else:
        raise AssertionError("no error")


@check(needs_script=True)
def a_stall_longer_than_the_read_timeout_is_survived(context):
    impatient = context.make_client(timeout=httpx2.Timeout(1.0, connect=5.0), max_retries=0)
    chunks = list(context.ask("script: stall", client=impatient, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", help="http://127.0.0.1:8410/v1")
    parser.add_argument("--model", help="chat model; the first one listed if absent")
    parser.add_argument("--uds", help="path of the Unix socket to connect to instead")
    parser.add_argument("--say", default="turn on the light in the kitchen", help="what is spoken and heard")
    parser.add_argument("--brief", action="store_true", help="leave out what asks for long answers or prompts")
    parser.add_argument("--text", action="store_true", help="leave out what needs speech")
    parser.add_argument("--scripted", action="store_true", help="the server fails on demand")
    arguments = parser.parse_args()
    context = Context(arguments)
    print(f"openai {openai.__version__} against {arguments.base_url}, model {context.model}")
    left_out = {
        "needs_script": not context.scripted,
        "long": arguments.brief,
        "speech": arguments.text,
    }
    return checks.run(context, lambda marks: not any(left_out[mark] for mark in marks))


if __name__ == "__main__":
    sys.exit(main())
