"""Checks of one client: each prints one line, and all must hold."""

import argparse
import asyncio
import inspect
import time

CHECKS = []


def check(function=None, **marks):
    """Enters a function as a check, with marks by which it is chosen."""

    def enter(function):
        CHECKS.append((function, marks))
        return function

    return enter(function) if function else enter


def run(context, wanted=lambda marks: True, rounds=lambda marks: 1):
    """Runs the checks that are wanted; returns the exit code."""
    failed = 0
    for function, marks in CHECKS:
        if not wanted(marks):
            continue
        name = function.__name__.replace("_", " ")
        began = time.monotonic()
        try:
            for _ in range(rounds(marks)):
                if inspect.iscoroutinefunction(function):
                    asyncio.run(function(context))
                else:
                    function(context)
            print(f"  ok  {name} ({time.monotonic() - began:.2f} s)", flush=True)
        except Exception as error:  # a check that breaks is a check that fails
            failed += 1
            print(f"  !!  {name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


def main(name, description, context, speech=False):
    """Runs the checks of a framework against the host that the arguments name; returns the exit code."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("host", help="http://127.0.0.1:8410")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=1)
    if speech:
        parser.add_argument("--text", action="store_true", help="leave out what needs speech")
    arguments = parser.parse_args()
    print(f"{name} against {arguments.host}, model {arguments.model}")
    text = speech and arguments.text
    return run(context(arguments), lambda marks: not (text and marks.get("speech")), lambda marks: arguments.rounds)
