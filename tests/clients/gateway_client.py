#!/usr/bin/env python3
"""A gateway, unmodified, before two daemons, and a client of it.

    gateway_client.py litellm|vllm-router http://127.0.0.1:8410 http://127.0.0.1:8411

Prints `ready` when the gateway serves. Each line on standard input is a number of requests to send through it, two at a time,
every second one streamed; the answer is one line of JSON: the number of answers that were whole, and the errors. The client
does not retry: what a daemon refuses, the gateway has to send to the other one.
"""

import concurrent.futures
import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import openai

KEY = "sk-of-the-test-9b1f0c62"
QUESTION = [{"role": "user", "content": "turn on the kitchen light"}]
PATIENCE = 240


def litellm(folder, port, daemons):
    """By the latency of each daemon's own answers; one that refuses is left alone for 5 s, at its first refusal."""
    deployments = [
        {
            "model_name": "demo",
            "litellm_params": {"model": "openai/demo", "api_base": f"{daemon}/v1", "api_key": "unused", "max_retries": 0},
        }
        for daemon in daemons
    ]
    settings = {
        "model_list": deployments,
        "router_settings": {
            "routing_strategy": "latency-based-routing",
            "routing_strategy_args": {"ttl": 10},
            "num_retries": 3,
            "allowed_fails": 0,
            "cooldown_time": 5,
        },
        "general_settings": {"master_key": KEY},
    }
    config = folder / "litellm.yaml"
    config.write_text(json.dumps(settings))
    return ["litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)], "/health/liveliness"


def vllm_router(folder, port, daemons):
    """By the health of each daemon: one below half of its full speed is left alone, and one that refuses, for 5 s."""
    return [
        "vllm-router", "--worker-urls", *daemons, "--policy", "round_robin",
        "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
        "--health-check-endpoint", "/health?speed=0.5", "--health-check-interval-secs", "1",
        "--health-failure-threshold", "1", "--health-success-threshold", "1",
        "--cb-failure-threshold", "1", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "5",
    ], "/health"  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_with_parent():
    """A test that fails kills its client, which then ends nothing."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def wait_for(process, address):
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError as error:
            assert process.poll() is None, f"the gateway has ended with {process.returncode}"
            assert time.monotonic() < deadline, f"the gateway does not serve: {error}"
            time.sleep(0.2)


def ask(client, number):
    try:
        asked = {"model": "demo", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        if number % 2:
            chunks = list(client.chat.completions.create(stream=True, **asked))
            choices = [choice for chunk in chunks for choice in chunk.choices]
            text = "".join(choice.delta.content or "" for choice in choices)
            end = [choice.finish_reason for choice in choices if choice.finish_reason]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
            text, end = choice.message.content, [choice.finish_reason]
        assert text and end in (["stop"], ["length"]), (text, end)
        return text, None
    except Exception as error:  # each is a failure that the caller reports
        return None, f"{type(error).__name__}: {error}"


def main():
    kind, *daemons = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        port = free_port()
        command, health = {"litellm": litellm, "vllm-router": vllm_router}[kind](folder, port, daemons)
        command[0] = pathlib.Path(sys.executable).with_name(command[0])
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent)
        try:
            wait_for(process, f"http://127.0.0.1:{port}{health}")
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60)
            print("ready", flush=True)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                for line in sys.stdin:
                    answers = list(pool.map(lambda number: ask(client, number), range(int(line))))
                    errors = [error for _, error in answers if error]
                    texts = {text for text, error in answers if not error}
                    whole = len(answers) - len(errors)
                    print(json.dumps({"answers": whole, "texts": len(texts), "errors": errors}), flush=True)
        finally:
            process.terminate()
            process.wait(20)
            sys.stderr.write((folder / "log").read_text(errors="replace")[-4000:])


main()
