"""A stand-in for an engine: speaks the workers' protocol without a model. Its behaviour comes in the options of its start task.

Every task it gets is appended to the file "log", so that a test sees the order of turns over all engines.
"""

import json
import os
import sys
import time

options = {}
asked = 0
for line in sys.stdin:
    task = json.loads(line)
    kind = task["task"]
    if kind == "start":
        options = task["options"]
    with open(options["log"], "a") as log:
        log.write(f"{options['name']} {kind} begin\n")
    asked += kind in ("decode", "prefill", "mix", "overhead")
    troubled = options.get("from_turn", 1) <= asked <= options.get("to_turn", 99) or options.get("trouble_at") == kind
    trouble = options.get("trouble") if troubled else None
    if trouble == "die":
        print("out of memory", file=sys.stderr, flush=True)
        sys.exit(3)
    if trouble == "kill":
        os.kill(os.getpid(), 9)
    if trouble == "hang":
        time.sleep(60)
    answers = {
        "start": {"versions": {"fake": "1.0"}, "engine": "a fake", "dtype": "float32"},
        "encode": {"token_ids": [[1, 2], [3]]},
        "tokens": {"token_ids": [options.get("tokens", [1]) for _ in task.get("prompts", [])]},
        "machine": {
            "name": "fake", "bandwidth": 1e10, "flops": {"float32": 1e11, "bfloat16": 2e11}, "memory": 1e9, "source": "made up",
            "label": "a fake machine", "threads": 1, "working_set": 1000, "curve": [[1000, 1e10]],
        },
        "overhead": {"overhead": 0.05, "outside": 0.1, "step_seconds": 0.1, "shares": {"model": 0.9, "rest": 0.1}},
        "profile": {"rows": 1, "steps": 1, "step_seconds": 0.1, "shares": {"matmuls": 0.6, "Python and dispatch": 0.4}},
    }  # fmt: skip
    reply = {"ok": answers.get(kind, {"seconds": options.get("seconds", 1.0), "first_token_seconds": 0.1})}
    if trouble == "refuse":
        reply = {"error": "ValueError: not today"}
    with open(options["log"], "a") as log:
        log.write(f"{options['name']} {kind} end\n")
    print("what?" if trouble == "babble" else json.dumps(reply), flush=True)
