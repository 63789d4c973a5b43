#!/usr/bin/env python3
"""The anthropic package, unmodified, against a running cotenant.

    anthropic_client.py http://127.0.0.1:8410 [--scripted]

Every check prints one line; the exit code is 0 when all of them hold. Checks that need a server which fails on
demand run with --scripted only, where a line `script: …` in the prompt says how.
"""

import argparse
import sys
import time

import anthropic
import pydantic
from anthropic import Anthropic

import checks
from checks import check


# The package has no such argument.
GREEDY = {"temperature": 0}


class Context:
    def __init__(self, arguments):
        self.client = Anthropic(base_url=arguments.base_url, api_key="unused")
        self.model = arguments.model or self.client.models.list().data[0].id

    def ask(self, text="turn on the light", **settings):
        settings = {"max_tokens": 32, "extra_body": GREEDY} | settings
        return self.client.messages.create(
            model=self.model, messages=[{"role": "user", "content": text}], **settings
        )


@check()
def models_are_listed_and_found(context):
    assert context.model in [model.id for model in context.client.models.list()]
    model = context.client.models.retrieve(context.model)
    assert (model.id, model.type, model.display_name) == (context.model, "model", context.model), model


@check()
def an_answer_in_one_piece(context):
    answer = context.ask(system="be brief")
    assert answer.type == "message" and answer.role == "assistant" and answer.id.startswith("msg_"), answer
    assert answer.content[0].type == "text" and answer.content[0].text, answer
    assert answer.stop_reason in ("end_turn", "max_tokens"), answer
    assert answer.usage.output_tokens > 0, answer
    assert answer._request_id is None or answer._request_id


@check()
def a_stream_says_the_same(context):
    whole = context.ask()
    with context.client.messages.stream(
        model=context.model, max_tokens=32, extra_body=GREEDY, messages=[{"role": "user", "content": "turn on the light"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text, (text, whole)
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens, final


@check()
def a_stream_may_be_left_early(context):
    with context.ask(stream=True, max_tokens=256) as stream:
        next(iter(stream))
    assert context.ask(max_tokens=8).content is not None


@check()
def tokens_are_counted(context):
    def count(text):
        return context.client.messages.count_tokens(
            model=context.model, messages=[{"role": "user", "content": text}]
        ).input_tokens

    assert 0 < count("hi") < count("hi " * 50)


LIGHT = {
    "name": "set_light",
    "description": "Switches a light.",
    "input_schema": {
        "type": "object",
        "properties": {"room": {"type": "string", "enum": ["kitchen", "hall"]}},
        "required": ["room"],
    },
}


@check(scripted=False)
def a_tool_that_must_be_called_is_called_and_its_result_taken(context):
    settings = {"tools": [LIGHT], "tool_choice": {"type": "tool", "name": "set_light"}, "max_tokens": 256, "extra_body": GREEDY}
    answer = context.ask(**settings)
    assert answer.stop_reason == "tool_use", answer
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "set_light" and call.input["room"] in ("kitchen", "hall"), call
    with context.client.messages.stream(
        model=context.model, messages=[{"role": "user", "content": "turn on the light"}], **settings
    ) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input, final
    answer = context.client.messages.create(
        model=context.model,
        max_tokens=16,
        tools=[LIGHT],
        tool_choice={"type": "none"},
        messages=[
            {"role": "user", "content": "turn on the light"},
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]},
        ],
    )
    assert answer.content and answer.stop_reason != "tool_use", answer


class Light(pydantic.BaseModel):
    room: str
    level: int


@check(scripted=False)
def an_answer_follows_the_schema_of_the_client(context):
    schema = {
        "type": "object",
        "properties": {"room": {"enum": ["kitchen", "hall"]}, "level": {"enum": [1, 2]}},
        "required": ["room", "level"],
        "additionalProperties": False,
    }
    answer = context.ask(output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=256)
    assert answer.stop_reason == "end_turn", answer
    Light.model_validate_json(answer.content[0].text)


@check()
def a_wrong_value_is_a_bad_request(context):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for settings, field in [
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"text": [image]}, "messages[0].content[0].type"),
    ]:
        try:
            context.ask(**settings)
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error" and field in str(error), error
        else:
            raise AssertionError(f"{settings} was accepted")
    try:
        context.client.messages.create(
            model="no-such-model", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
        )
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error
    else:
        raise AssertionError("answered")


@check(scripted=True)
def a_shortage_is_cured_by_the_clients_own_retry(context):
    began = time.monotonic()
    raw = context.client.messages.with_raw_response.create(
        model=context.model, max_tokens=8, messages=[{"role": "user", "content": "script: refuse twice"}]
    )
    assert raw.retries_taken == 2, raw.retries_taken
    assert time.monotonic() - began < 5
    assert raw.parse().content[0].text


@check(scripted=True)
def a_failure_in_the_stream_is_an_error(context):
    text = ""
    try:
        for event in context.ask("script: lose the engine", stream=True):
            text += getattr(getattr(event, "delta", None), "text", "")
    except anthropic.APIError as error:
        assert error.body["error"]["code"] == "engine_lost", error.body
        assert text, "no text before the error"
    else:
        raise AssertionError("no error")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", help="http://127.0.0.1:8410")
    parser.add_argument("--model", help="chat model; the first one listed if absent")
    parser.add_argument("--scripted", action="store_true", help="the server fails on demand")
    arguments = parser.parse_args()
    context = Context(arguments)
    print(f"anthropic {anthropic.__version__} against {arguments.base_url}, model {context.model}")
    return checks.run(context, lambda marks: marks.get("scripted") in (None, arguments.scripted))


if __name__ == "__main__":
    sys.exit(main())
