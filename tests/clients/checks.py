"""Checks of one client: each prints one line, and all must hold."""

import asyncio
import inspect
import time

CHECKS = []


def check(**marks):
    """Enters a function as a check, with marks by which it is chosen."""

    def enter(function):
        CHECKS.append((function, marks))
        return function

    return enter


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
