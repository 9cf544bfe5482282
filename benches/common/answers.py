"""What a process beside a bench answers: a request a line on stdin, an answer a line on stdout."""

import json
import os
import sys


def serve(greeting, make):
    """Greets, and then calls `make` with each request, a JSON object, whose `write()` gives its results. A line `run`
    calls `run()` of the latest one again. The answer is `done`, or what went wrong in a line."""
    # Libraries write to stdout what is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made = None
    print(greeting, file=answers, flush=True)
    for line in sys.stdin:
        try:
            if line.strip() == "run":
                made.run()
            else:
                made = None  # before the next one takes memory
                made = make(json.loads(line))
                made.write()
            print("done", file=answers, flush=True)
        except Exception as error:  # It is a line of the report that says why.
            print((str(error).strip().splitlines() or [type(error).__name__])[0], file=answers, flush=True)
