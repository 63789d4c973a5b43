#!/usr/bin/env python3
"""The ollama package, unmodified, against a running cotenant.

    ollama_client.py http://127.0.0.1:8410 [--rounds N]

Every check prints one line; the exit code is 0 when all of them hold. With more rounds the checks that ask the model are
repeated, for a server whose memory is being taken meanwhile: this client does not retry, so none of them may fail.
"""

import argparse
import asyncio
import json
import sys

import httpx
import ollama

import checks
from checks import check

SCHEMA = {
    "type": "object",
    "properties": {"room": {"type": "string", "enum": ["kitchen", "hall"]}},
    "required": ["room"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "set_light", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "turn on the kitchen light"}]


class Context:
    def __init__(self, arguments):
        # Home Assistant limits a list to 5 s; a silent stream gets a line each second. A non-streamed answer takes its time.
        self.impatient = ollama.Client(host=arguments.host, timeout=httpx.Timeout(5.0))
        self.host = arguments.host
        self.client = ollama.Client(host=arguments.host)
        self.model = arguments.model or self.impatient.list().models[0].model


@check()
def models_are_listed_with_their_size(context):
    models = {model.model: model for model in context.impatient.list().models}
    model = models[context.model]
    assert model.size > 0 and model.modified_at and len(model.digest) == 64, model
    assert model.details.format == "gguf", model


@check(repeated=True)
def a_stream_with_its_wishes_is_answered(context):
    text, last = "", None
    for part in context.impatient.chat(
        model=context.model,
        messages=QUESTION,
        stream=True,
        keep_alive=-1,
        options={"num_ctx": 8192, "temperature": 0, "num_predict": 64},
    ):
        text += part.message.content or ""
        last = part
    assert last.done and last.done_reason in ("stop", "length"), last
    assert last.eval_count > 0 and last.prompt_eval_count > 0 and last.total_duration > 0, last
    assert "kitchen" in text, text


@check(repeated=True)
def the_grant_is_in_ps(context):
    # Answered from memory, regardless of the engine.
    [running] = context.impatient.ps().models
    assert running.model == context.model and running.context_length > 0, running
    assert 0 < running.size_vram <= running.size, running
    assert running.expires_at.year > 2100, running


@check(repeated=True)
def an_answer_in_one_piece_follows_a_schema(context):
    answer = context.client.chat(model=context.model, messages=QUESTION, format=SCHEMA, options={"temperature": 0})
    said = json.loads(answer.message.content)
    assert set(said) == {"room"} and said["room"] in ("kitchen", "hall"), said
    assert answer.done_reason == "stop", answer


@check()
def tools_are_reported_and_their_outcome_is_taken(context):
    answer = context.client.chat(
        model=context.model,
        messages=[
            *QUESTION,
            {"role": "assistant", "tool_calls": [{"function": {"name": "set_light", "arguments": {"room": "hall"}}}]},
            {"role": "tool", "tool_name": "set_light", "content": "done"},
        ],
        tools=[TOOL],
        options={"num_predict": 4},
    )
    assert answer.done, answer


@check()
def a_prompt_is_continued(context):
    answer = context.client.generate(model=context.model, prompt="turn on the kitchen light", options={"temperature": 0})
    assert "kitchen" in answer.response and answer.done, answer


@check(repeated=True)
async def a_cancelled_request_leaves_the_next_one_served(context):
    client = ollama.AsyncClient(host=context.host)
    asked = {"model": context.model, "messages": QUESTION}
    async for _part in await client.chat(stream=True, options={"num_predict": 400}, **asked):
        break
    task = asyncio.create_task(client.chat(options={"num_predict": 400}, **asked))
    await asyncio.sleep(0.05)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    answer = await client.chat(options={"temperature": 0, "num_predict": 64}, **asked)
    assert answer.done_reason in ("stop", "length") and answer.message.content, answer


@check()
def a_model_shows_what_it_is(context):
    shown = context.client.show(context.model)
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] > 0, shown
    assert "completion" in shown.capabilities, shown


@check()
def texts_become_vectors_where_a_model_for_them_is_there(context):
    names = [model.model for model in context.client.list().models]
    for model in [name for name in names if "embedding" in context.client.show(name).capabilities]:
        found = context.client.embed(model=model, input=["turn on the light", "what time is it"], keep_alive="5m")
        assert len(found.embeddings) == 2 and found.prompt_eval_count > 0, found
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in found.embeddings)
        old = context.client.embeddings(model=model, prompt="turn on the light")
        assert len(old.embedding) == len(found.embeddings[0])


@check()
def errors_have_their_status_and_their_text(context):
    for arguments, status in [
        ({"model": "no-such-model", "messages": QUESTION}, 404),
        ({"model": context.model, "messages": QUESTION, "options": {"temperature": 9}}, 400),
        ({"model": context.model, "messages": QUESTION, "format": {"not": {}}}, 400),
    ]:
        try:
            context.client.chat(**arguments)
        except ollama.ResponseError as error:
            assert error.status_code == status and error.error, error
        else:
            raise AssertionError(f"{arguments} was answered")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("host", help="http://127.0.0.1:8410")
    parser.add_argument("--model", help="the first one listed if absent")
    parser.add_argument("--rounds", type=int, default=1, help="how often the model is asked")
    arguments = parser.parse_args()
    context = Context(arguments)
    print(f"ollama against {arguments.host}, model {context.model}")
    return checks.run(context, rounds=lambda marks: arguments.rounds if marks.get("repeated") else 1)


if __name__ == "__main__":
    sys.exit(main())
